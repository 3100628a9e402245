"""Jobs that can never start: detect them, explain why, cancel them, and end their run.

A scheduler accepts such a job and shows its reason for ever. Commands that wait for the job end it;
`status` and `ps` only report it.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.states import JobState
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.create import failed_before_start
from torchmuster.core.owner.record import read_result
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.base import Dialect, EngineError
from torchmuster.launcher.engines.wait_reasons import WaitReasons, reasons_of
from torchmuster.launcher.jobs.answers import Ask, ask_scheduler
from torchmuster.launcher.jobs.jobs import read_job
from torchmuster.launcher.jobs.links import cancel_jobs, view_newest
from torchmuster.launcher.model.job import JobView

# A scheduler may say so while nodes are added or a partition changes: it must still say so after
# this time.
MIN_PERSIST_S = 5.0
WAITS = frozenset({JobState.PENDING, JobState.HELD})


@dataclass(slots=True)
class NeverStartsWatch:
    """Detects jobs that can never start; asks the scheduler once per job and reason."""

    ask: Ask = ask_scheduler
    clock: Callable[[], float] = time.monotonic
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _looked_at: set[tuple[str, str]] = field(default_factory=set)

    def judge(self, view: JobView | None, dialect: Dialect) -> Report | None:
        """Return a report on a job that can't start, however long it waits; None while it may."""
        reasons = reasons_of(dialect)
        wait = view.wait if view is not None else None
        if view is None or reasons is None or wait is None or view.state not in WAITS:
            return None
        patience_s = MIN_PERSIST_S if wait.patience_s is None else wait.patience_s
        if not (wait.never or wait.may_be_never or wait.patience_s):
            return None
        # Not keyed by the reason's text: it changes when a second pod has the same problem.
        key = (view.job_id, wait.sentence)
        if self.clock() - self._since.setdefault(key, self.clock()) < patience_s:
            return None
        if key in self._looked_at:
            return None
        self._looked_at.add(key)
        has = self._shortage(reasons, view.job_id)
        if not (wait.never or wait.patience_s) and has is None:
            return None  # perhaps nodes are only down
        if not wait.never and has is None:
            words = f"{dialect.name} says for {patience_s:.0f} s: {view.reason}"
            error = f"job {view.job_id} does not start: {wait.sentence}"
            at = f"job {view.job_id} of {dialect.name}"
            return Report(error=error, at=at, because=(words,), hint=wait.hint)
        words = f"{dialect.name} says: {view.reason}"
        return Report(
            error=f"job {view.job_id} can never start: {wait.sentence}",
            at=f"job {view.job_id} of {dialect.name}",
            because=(has, words) if has is not None else (words,),
            hint=wait.hint,
        )

    def _shortage(self, reasons: WaitReasons, job_id: str) -> str | None:
        answers: list[str] = []
        for argv in reasons.capacity_argv(job_id):
            try:
                answers.append(self.ask(argv).stdout.decode(errors="replace"))
            except MusterError:
                return None
        return reasons.shortage(answers)

    def cancel_if_hopeless(self, run_dir: RunDir) -> None:
        """Cancel a run's job if it can never start, and record the reason as the run's result."""
        job = read_job(run_dir)
        report = self.judge(view_newest(run_dir), job[0]) if job is not None else None
        if report is None or read_result(run_dir) is not None:
            return
        with contextlib.suppress(
            MusterError
        ):  # the verdict is valid even if the scheduler is silent
            cancel_jobs(run_dir)
        atomic.write_json(
            run_dir.result,
            codec.to_plain(failed_before_start(run_dir, EngineError.exit_code, report)),
        )


def note_group(run_dir: RunDir, group: str, report: Report) -> None:
    """Record a report as the outcome of a workflow's group whose job can never start."""
    from torchmuster.core.model.states import State
    from torchmuster.core.model.verdict import GroupOutcome

    outcome = GroupOutcome(
        group=group,
        state=State.FAILED_BACKEND_ERROR,
        exit_code=EngineError.exit_code,
        elapsed_s=0.0,
        report=report,
    )
    atomic.write_json(run_dir.group(group).result, codec.to_plain(outcome))
