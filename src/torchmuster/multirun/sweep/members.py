"""The run directories of a sweep and of its members, and the records of members without a head."""

import contextlib
import os
from dataclasses import replace

from torchmuster.core.files import atomic
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir, runs_dir
from torchmuster.core.model import codec, events, verdict
from torchmuster.core.model.contract import EX_TEMPFAIL
from torchmuster.core.model.failure import EndKind, WorkerEnd, describe
from torchmuster.core.model.states import RunState
from torchmuster.core.owner import create
from torchmuster.core.owner.record import next_attempt
from torchmuster.errors import MissingRecordError
from torchmuster.launcher.owner.origin import note_origin
from torchmuster.multirun.sweep.plan import SweepPlan


def member_dir(run_dir: RunDir, plan: SweepPlan, number: int) -> RunDir:
    """Return the run directory of a member, which may not exist yet."""
    return RunDir(os.path.join(run_dir.members, plan.member_id(number)))


def prepare_member(run_dir: RunDir, plan: SweepPlan, number: int) -> tuple[RunDir, int]:
    """Create the run directory of a member, or prepare it for another attempt.

    Return it with the attempt's number.

    Raises:
        RunDirectoryError: The directory can't be written.
    """
    member = member_dir(run_dir, plan, number)
    if not os.path.isdir(member.path):
        create.create_member_dir(plan.member_plan(number), run_dir)
        return member, 0
    try:
        # A member with a result has no job any more, even if the cluster does not say so yet.
        of_job = (member.job,) if os.path.exists(member.result) else ()
        for path in (member.result, member.links, *of_job):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        atomic.write_json(member.plan, codec.to_plain(plan.member_plan(number)))
        create.write_owner(member)
    except OSError as error:
        raise create.unusable(member.path, error.strerror or str(error)) from error
    return member, next_attempt(member)


def state_of_end(end: WorkerEnd) -> RunState:
    """Return the state of a member whose only process ended like this, without stop requests."""
    if end.kind is EndKind.SUCCESS:
        return RunState.SUCCEEDED
    return RunState.PREEMPTED if end.kind is EndKind.PREEMPTED else RunState.FAILED


def stopped_by_rule(plan: SweepPlan) -> verdict.Report:
    """Return the report for a member that the sweep's rule has stopped."""
    metric = plan.metric.name if plan.metric else "metric"
    why = f"the rule `{plan.stop}` compares the members' {metric}"
    return verdict.Report(error="the sweep stopped this member early", because=(why,))


def result_of_end(
    plan: SweepPlan, number: int, end: WorkerEnd, state: RunState, log: str
) -> verdict.Result:
    """Return the result of a member that was one process.

    Args:
        plan: The plan of the sweep.
        number: The number of the member.
        end: How its process ended.
        state: The member's state, which also depends on whether it was asked to stop.
        log: The path of its log.
    """
    report: verdict.Report | None = None
    code = 0
    if state is RunState.PREEMPTED:
        code = EX_TEMPFAIL
        report = verdict.Report(error="the run was preempted and can be resumed")
    elif state is RunState.STOPPED:
        code = end.shell_code
        report = stopped_by_rule(plan)
    elif state is RunState.CANCELLED:
        code = end.shell_code or 128 + 15
        report = verdict.Report(error="the run was stopped", because=("its sweep was cancelled",))
    elif state is not RunState.SUCCEEDED:
        code = verdict.final_exit_code(end, first_cause_code=True)
        report = verdict.explain_failure(
            end,
            [end],
            verdict.Circumstances(
                world_size=1,
                attempt=end.attempt,
                restarts_spent=0,
                max_restarts=0,
                same_as=None,
                is_final=False,
                early_ranks=(),
                restart_hint=False,
                log_path=log,
            ),
        )
    return verdict.Result(
        run_id=plan.member_id(number),
        state=state,
        exit_code=code,
        attempts=end.attempt + 1,
        restarts_spent=0,
        elapsed_s=end.elapsed_s,
        report=report,
        cause=end if state is RunState.FAILED else None,
        trained_step=end.step,
    )


class MemberRecords:
    """Writes the records of members that are single processes, with the events of a head.

    Args:
        plan: The plan of the sweep.
        disk: Writes the files.
    """

    def __init__(self, plan: SweepPlan, disk: DiskWriter) -> None:
        self._plan, self._disk = plan, disk

    def begin(self, number: int, run_dir: RunDir, attempt: int) -> None:
        """Record that an attempt of a member starts on this machine."""
        node, host = self._plan.run.node_name(0), os.uname().nodename
        run_id = self._plan.member_id(number)
        self._event(run_dir, events.RunStartedEvent(run_id=run_id, first_attempt=attempt))
        self._event(
            run_dir,
            events.AttemptStartedEvent(
                attempt=attempt,
                world_size=1,
                num_nodes=1,
                nodes=(events.AttemptNode(node=node, host=host, ranks="rank 0"),),
                why="first start" if attempt == 0 else "the sweep was started again",
            ),
        )

    def end(self, run_dir: RunDir, end: WorkerEnd, result: verdict.Result) -> None:
        """Record how a member has ended, and its result."""
        self._event(run_dir, events.event_of_end(end))
        if result.state is RunState.FAILED:
            what = describe(end)
            self._event(
                run_dir, events.AttemptFailedEvent(attempt=end.attempt, what=what, cause=end)
            )
        self._disk.replace(run_dir.result, atomic.as_json(codec.to_plain(result)))
        self._event(run_dir, events.RunEndedEvent(result=result))
        self._disk.close_file(run_dir.events)

    def _event(self, run_dir: RunDir, event: events.RecordEvent) -> None:
        self._disk.append(run_dir.events, events.line_of(event).encode())


def lacks_files(result: verdict.Result) -> bool:
    """Return whether a member succeeded but its files were lost with its pod."""
    code = MissingRecordError.exit_code
    return result.state is RunState.SUCCEEDED and result.exit_code == code


def why_of(result: verdict.Result) -> str | None:
    """Return the error of a member that did not succeed, in one sentence."""
    return result.report.error if result.report is not None else None


def create_sweep_dir(plan: "SweepPlan") -> RunDir:
    """Create the run directory of a sweep.

    Raises:
        UsageError: The directory exists already.
        RunDirectoryError: The directory can't be created or written.
    """

    def fill(run_dir: RunDir) -> None:
        carried = replace(plan, run=create.with_call(plan.run, run_dir))
        atomic.write_json(run_dir.sweep, codec.to_plain(carried))
        os.mkdir(run_dir.members, 0o700)

    run_dir = create.make_dir(os.path.join(runs_dir(), plan.run_id), fill)
    note_origin(run_dir, plan.run.program)
    return run_dir
