"""The view of a sweep of job arrays: members' results, and the scheduler's states for the rest."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model.contract import EX_TEMPFAIL
from torchmuster.core.model.events import MemberStoppedEvent
from torchmuster.core.model.states import JobState, RunState
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.owner.record import (
    changed_at,
    ends_of,
    next_attempt,
    read_events,
    read_result,
)
from torchmuster.errors import MissingRecordError, MusterError
from torchmuster.launcher.engines.base import ArrayDialect, object_dialect
from torchmuster.launcher.jobs.answers import FIRST_POLL_S, ask_scheduler
from torchmuster.launcher.model.job import JobView
from torchmuster.launcher.model.run import RunRecord
from torchmuster.launcher.views.run_view import RunView
from torchmuster.multirun.sweep.arrays import SweepArrays, load_arrays
from torchmuster.multirun.sweep.members import lacks_files, member_dir, why_of
from torchmuster.multirun.sweep.metric import MetricReader
from torchmuster.multirun.sweep.plan import SweepPlan
from torchmuster.multirun.sweep.policy import state_of_sweep
from torchmuster.multirun.views.sweep_view import (
    MemberView,
    SweepRun,
    SweepView,
    read_sweep,
    view_sweep,
)

Ask = Callable[[Sequence[str]], proc.CommandOutput]
_CODES = {RunState.FAILED: 1, RunState.PREEMPTED: EX_TEMPFAIL, RunState.CANCELLED: 143}
_MAX_EVIDENCE = 5
_lately: dict[tuple[str, ...], tuple[float, proc.CommandOutput]] = {}


def ask_cached(argv: Sequence[str]) -> proc.CommandOutput:
    """Ask the scheduler, or return its answer if it is recent, because all users share a scheduler.

    Raises:
        MusterError: The command can't be executed.
    """
    key, now = tuple(argv), time.monotonic()
    known = _lately.get(key)
    if known is None or now - known[0] >= FIRST_POLL_S:
        _lately.clear()  # those questions were about the members that were open then
        known = _lately[key] = (now, ask_scheduler(argv))
    return known[1]


def view_arrays(run_dir: RunDir, ask: Ask = ask_cached) -> SweepView | None:
    """Return the state of a sweep of job arrays; None if its plan can't be read.

    A member without a result has the state that the scheduler reports for its element.
    """
    plan, loaded = read_sweep(run_dir), load_arrays(run_dir)
    if plan is None or loaded is None:
        return None
    members = [_left_by(run_dir, plan, number) for number in range(len(plan.members))]
    # A member that was preempted has a result, and may come back.
    wanted = {m.number for m in members if not m.state.is_final or m.state is RunState.PREEMPTED}
    has_ends = (
        object_dialect(loaded[0]) is not None
    )  # results of pods are copied here when somebody views the run
    scheduler_views, problem = _ask_for(*loaded, wanted, ask)
    for number in wanted:
        found = scheduler_views.get(number)
        if found is not None and found.state.is_final:
            members[number] = _left_by(run_dir, plan, number)  # it may have ended just now
        members[number] = _with_scheduler_state(members[number], found, problem)
        if has_ends and found is not None and found.state is JobState.SUCCEEDED:
            left = members[number]
            why = left.why if left.state is RunState.SUCCEEDED else None
            members[number] = replace(left, state=RunState.SUCCEEDED, why=why)
    stopped = stopped_members(run_dir)
    members = [
        _as_stopped(member, plan) if member.number in stopped else member for member in members
    ]
    members = [_with_lost_job_state(member, loaded[1], run_dir) for member in members]
    is_open = any(not member.state.is_final for member in members)
    result = None if is_open else _result_of(plan, run_dir, members)
    if not loaded[1].arrays:
        result = read_result(run_dir)  # its submission was refused
    state = result.state if result is not None else _open_state(members)
    return SweepView(plan=plan, state=state, members=tuple(members), result=result)


def _with_lost_job_state(member: MemberView, noted: SweepArrays, run_dir: RunDir) -> MemberView:
    """Return the state of a member whose job is unknown.

    It was cancelled with the sweep, or it had ended before others were submitted again.
    """
    if member.state is not RunState.LOST:
        return member
    if noted.arrays and not any(member.number in array.members for array in noted.arrays):
        why = "it had ended before the others ran again"
        return replace(member, state=RunState.SUCCEEDED, why=why)
    if os.path.exists(run_dir.cancelled):
        return replace(member, state=RunState.CANCELLED, why="the sweep was cancelled")
    return member


def stopped_members(run_dir: RunDir) -> set[int]:
    """Return the members that a rule has ended, as the sweep's followers have recorded."""
    said = (one.event for one in read_events(run_dir.events))
    return {event.member for event in said if isinstance(event, MemberStoppedEvent)}


def _as_stopped(member: MemberView, plan: SweepPlan) -> MemberView:
    if member.state is RunState.SUCCEEDED or not member.state.is_final:
        return member
    why = f"the rule `{plan.stop}` has ended it early"
    return replace(member, state=RunState.STOPPED, why=why)


def _left_by(run_dir: RunDir, plan: SweepPlan, number: int) -> MemberView:
    """Return the state of a member from its run directory."""
    folder, view = member_dir(run_dir, plan, number), MemberView(number=number)
    if not os.path.isdir(folder.path):
        return view
    view = replace(view, attempt=max(0, next_attempt(folder) - 1))
    if plan.metric is not None:
        reader = MetricReader(folder, plan.metric.name)
        reader.read()
        if (newest := reader.newest) is not None:
            view = replace(view, value=newest.value, step=newest.step)
    result = read_result(folder)
    if result is None:
        return view
    return replace(
        view,
        state=result.state,
        elapsed_s=result.elapsed_s,
        exit_code=result.exit_code,
        why=why_of(result)
        if result.state is not RunState.SUCCEEDED or lacks_files(result)
        else None,
    )


def _ask_for(
    dialect: ArrayDialect, noted: SweepArrays, wanted: set[int], ask: Ask
) -> tuple[dict[int, JobView], str | None]:
    """Return the scheduler's states for these members, and the problem if it could not answer.

    One command covers all; further ones run only for members that it does not know.
    """
    element_of: dict[int, tuple[str, int]] = {}
    for array in noted.arrays:
        for position, number in enumerate(array.members):
            element_of[number] = (array.job_id, position)
    ids = sorted({element_of[number][0] for number in wanted if number in element_of} - {""})
    found: dict[int, JobView] = {}
    problem: str | None = None
    for argv in dialect.array_status_argv(ids) if ids else ():
        try:
            said = ask(argv)
            text = said.stdout.decode(errors="replace")
            elements, jobs = dialect.array_views(text), dialect.views(text)
        except MusterError as error:
            problem = error.why or error.what
            continue
        for number in wanted - found.keys() & element_of.keys():
            job_id, position = element_of[number]
            bare = dialect.array_key(job_id)
            view = elements.get((bare, position))
            if view is None and "[" not in job_id and (bare, position) not in elements:
                view = jobs.get(job_id) if len(_members_of(noted, job_id)) == 1 else None
            if view is not None:
                found[number] = view
        stderr = said.stderr.decode(errors="replace").strip()
        problem = None if said.status == 0 else (stderr or "it did not answer").splitlines()[-1]
        if wanted <= found.keys():
            break
    return found, problem


def _members_of(noted: SweepArrays, job_id: str) -> tuple[int, ...]:
    return next((array.members for array in noted.arrays if array.job_id == job_id), ())


def _with_scheduler_state(
    member: MemberView, job: JobView | None, problem: str | None
) -> MemberView:
    """Return the state of a member that has no result, or one that may not be its last."""
    if job is None:
        if member.state.is_final:
            return member
        if problem is not None:
            return replace(member, state=RunState.UNKNOWN, why=problem)
        why = "its job has left no result, and the scheduler knows it no more"
        return replace(member, state=RunState.LOST, why=why)
    if not job.state.is_final:
        state = job.state.of_run
        return replace(member, state=state, why=job.reason if state is RunState.WAITING else None)
    if member.state.is_final:
        return member
    word = job.state.value.replace("_", " ")
    return replace(
        member,
        state=job.state.of_run,
        exit_code=job.exit_code,
        why=f"its job left no result: it is {word}",
    )


def _open_state(members: Sequence[MemberView]) -> RunState:
    states = {member.state for member in members}
    if RunState.RUNNING in states or any(state.is_final for state in states):
        return RunState.RUNNING
    return RunState.UNKNOWN if states == {RunState.UNKNOWN} else RunState.WAITING


def _result_of(plan: SweepPlan, run_dir: RunDir, members: Sequence[MemberView]) -> Result:
    """Return the result of a sweep that is over; none of its processes could write it."""
    state = state_of_sweep(member.state for member in members)
    bad = [m for m in members if m.state in (RunState.FAILED, RunState.LOST, RunState.TIMED_OUT)]
    report: Report | None = None
    if bad:
        name = short_id(plan.run_id)
        report = Report(
            error=f"{len(bad)} of {len(members)} members of the sweep failed",
            at=run_dir.path,
            because=_reasons(plan, bad),
            hint=f"once that is mended, muster restart {name} runs those again",
        )
    lacks = (RunState.SUCCEEDED, MissingRecordError.exit_code)
    lacking = [m for m in members if (m.state, m.exit_code) == lacks]
    code = _CODES.get(state, MissingRecordError.exit_code if lacking else 0)
    if lacking and report is None:
        report = Report(
            error=f"files of {len(lacking)} of {len(members)} members did not come here",
            at=run_dir.path,
            because=_reasons(plan, lacking),
            hint="`claims` and `home` of the site keep files on a volume",
        )
    return Result(
        run_id=plan.run_id,
        state=state,
        exit_code=code,
        attempts=sum((m.attempt or 0) + 1 for m in members if m.attempt is not None),
        restarts_spent=0,
        elapsed_s=_elapsed_s(plan, run_dir),
        report=report,
    )


def _elapsed_s(plan: SweepPlan, run_dir: RunDir) -> float:
    """Return the time from the newest submission to the last event of a member."""
    records = (member_dir(run_dir, plan, number).events for number in range(len(plan.members)))
    ends = [time for path in records for time in ends_of(path)[-1:]]
    began = changed_at(run_dir.arrays)
    return max(0.0, max(ends) - began) if ends and began is not None else 0.0


def _reasons(plan: SweepPlan, members: Sequence[MemberView]) -> tuple[str, ...]:
    name = short_id(plan.run_id)
    return tuple(
        f"{name}.{m.number}: {m.why or 'no reason is known'}" for m in members[:_MAX_EVIDENCE]
    )


def view_of_record(run_dir: RunDir, record: RunRecord) -> RunView:
    """Return the view of a sweep."""
    from torchmuster.launcher.views.find import owner_lives

    del record  # `view_sweep` reads its members from it
    if os.path.isfile(run_dir.arrays):
        sweep = view_arrays(run_dir)
    else:
        # A sweep that was a Job and has a result needs no question to the cluster.
        has_ended = os.path.isfile(run_dir.job) and read_result(run_dir) is not None
        sweep = view_sweep(run_dir, is_alive=not has_ended and owner_lives(run_dir))
    return SweepRun(
        run_id=os.path.basename(run_dir.path),
        run_dir=run_dir,
        state=sweep.state if sweep is not None else RunState.LOST,
        plan=None,
        result=sweep.result if sweep is not None else None,
        sweep=sweep,
    )
