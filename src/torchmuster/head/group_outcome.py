"""How a group of a workflow has ended: its exit code, and the report that names the first failure."""

import glob
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.head.group_policy import Failure, GroupPolicy
from torchmuster.model import codec
from torchmuster.model.outcome import FailureFacts, GroupOutcome, TaskOutcome, explain_task_failure
from torchmuster.model.states import State
from torchmuster.model.verdict import Report
from torchmuster.model.workflow import GroupPlan, TaskNetwork, WorkflowPlan
from torchmuster.net.messages import TaskEnded, TaskNotPrepared

_MAX_EARLIER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What is known of a group when its last task is over.

    Attributes:
        outcomes: The last state of each task, by name.
        ends: What each task's agent has said of the end of its command.
        stop_why: Who stopped the group; None: it ended by itself.
    """

    plan: WorkflowPlan
    group: GroupPlan
    run_dir: RunDir
    policy: GroupPolicy
    outcomes: Mapping[str, TaskOutcome]
    ends: Mapping[str, TaskEnded | TaskNotPrepared]
    stop_why: str | None

    def outcome(self, elapsed_s: float) -> GroupOutcome:
        """Return the outcome of the group after so many seconds."""
        state = self.policy.state
        needs_report = state.is_failed and state is not State.FAILED_CANCELED
        return GroupOutcome(
            group=self.group.name,
            state=state,
            exit_code=self._exit_code(state),
            elapsed_s=elapsed_s,
            tasks=tuple(self.outcomes.values()),
            report=self._report() if needs_report else None,
        )

    def _exit_code(self, state: State) -> int:
        if not state.is_failed:
            return 0
        if state is State.FAILED_CANCELED:
            return 128 + signal.SIGTERM
        failure, lead = self.policy.first_failure, self.outcomes.get(self.group.lead.name)
        found = failure.code if failure is not None else lead.code if lead else 1
        return found if found is not None and 0 < found < 256 else 1

    def _report(self) -> Report:
        failure = self.policy.first_failure
        if failure is None:
            why = self.stop_why or "it was stopped"
            error = f"group {self.group.name} ended as {self.policy.state.value}: {why}"
            return Report(error=error, because=self._earlier_failures())
        verdict = self._training_verdict(failure)
        if verdict is not None:
            return replace(verdict, error=f"task {failure.task} failed: {verdict.error}")
        report = explain_task_failure(self._facts(failure))
        return replace(report, because=(*report.because, *self._earlier_failures()))

    def _facts(self, failure: Failure) -> FailureFacts:
        end = self.ends.get(failure.task)
        ended = end if isinstance(end, TaskEnded) else None
        refused = end if isinstance(end, TaskNotPrepared) else None
        shared = self.plan.network is TaskNetwork.SHARED
        others = [t.name for t in self.group.tasks if t.name != failure.task] if shared else []
        return FailureFacts(
            group=self.group.name,
            task=failure.task,
            attempt=failure.attempt,
            why=failure.why,
            code=failure.code,
            tail=ended.tail if ended else refused.detail if refused else (),
            memory_evidence=ended.memory_evidence if ended else None,
            hint=refused.hint if refused else None,
            others=others,
            log=self.run_dir.task_log(self.group.name, failure.task, failure.attempt),
        )

    def _earlier_failures(self) -> tuple[str, ...]:
        """What did not count may still be the cause: a peer that is gone makes the lead fail."""
        shown = self.policy.ignored[:_MAX_EARLIER]
        return tuple(f"{failure.task} had failed before: {failure.why}" for failure in shown)

    def _training_verdict(self, failure: Failure) -> Report | None:
        """Return the verdict of the run that a training task was: it names the rank and the line."""
        if self.group.task(failure.task).training is None or self.stop_why is not None:
            return None
        folder = self.run_dir.training_folder(failure.task, failure.attempt)
        for path in glob.glob(os.path.join(glob.escape(folder), "*", "result.json")):
            plain = atomic.read_json(path)
            try:
                return codec.from_plain(Report, (plain or {}).get("report"))
            except codec.CodecError:
                continue
        return None
