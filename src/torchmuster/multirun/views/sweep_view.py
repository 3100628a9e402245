"""The view of a sweep: from its record, which has the states of all members, or of job arrays."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torchmuster.core import proc
from torchmuster.core.files.layout import Kind, RunDir, short_id
from torchmuster.core.model.contract import EX_TEMPFAIL
from torchmuster.core.model.events import Stamped
from torchmuster.core.model.plan import GRACE_S
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import few_of, in_one_line
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.owner.record import (
    changed_at,
    ends_of,
    next_attempt,
    read_events,
    read_result,
)
from torchmuster.errors import MissingRecordError, MusterError, NotFoundError
from torchmuster.launcher.engines.base import ArrayDialect, object_dialect
from torchmuster.launcher.jobs.answers import FIRST_POLL_S, ask_scheduler
from torchmuster.launcher.model.job import JobState, JobView
from torchmuster.launcher.model.live import LiveTask
from torchmuster.launcher.model.run import RunRecord
from torchmuster.launcher.views.run_view import RunView
from torchmuster.multirun.sweep import events
from torchmuster.multirun.sweep.members import lacks_files, member_dir, why_of
from torchmuster.multirun.sweep.metric import MetricReader
from torchmuster.multirun.sweep.plan import SweepPlan, read_sweep
from torchmuster.multirun.sweep.policy import state_of_sweep

if TYPE_CHECKING:
    from torchmuster.multirun.sweep.arrays import SweepArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """The state of one member.

    Attributes:
        attempt: The newest attempt; None before the first.
        started: When that attempt began, as in the record.
        why: The reason for the state, such as what ended the member; None if there is none.
        value: The last value of the metric, at `step`.
    """

    number: int
    state: RunState = RunState.WAITING
    attempt: int | None = None
    started: str | None = None
    elapsed_s: float | None = None
    exit_code: int | None = None
    why: str | None = None
    value: float | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    """The state of a sweep and of its members."""

    plan: SweepPlan
    state: RunState
    members: tuple[MemberView, ...]
    result: Result | None

    @property
    def best(self) -> MemberView | None:
        """Return the member with the best last value so far; the first of equals."""
        if self.plan.metric is None:
            return None
        values = {m.number: m.value for m in self.members if m.value is not None}
        best = self.plan.metric.best_of(values)
        return self.members[best] if best is not None else None

    def counted(self) -> dict[RunState, int]:
        """Return the number of members in each state, in the order of `RunState`."""
        states = [member.state for member in self.members]
        return {state: states.count(state) for state in RunState if state in states}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun(RunView):
    """The view of a sweep as a run; `sweep` is None if its plan can't be read."""

    kind: ClassVar[Kind] = Kind.SWEEP
    has_ranks: ClassVar[bool] = False
    sweep: SweepView | None = None

    @property
    def name(self) -> str:
        """A short description."""
        if self.sweep is None:
            return "sweep"
        return f"sweep of {in_one_line(os.path.basename(self.sweep.plan.run.program.target))}"

    @property
    def command(self) -> str:
        """What the sweep runs, in words."""
        if self.sweep is None:
            return "sweep"
        return f"sweep of {' '.join(self.sweep.plan.run.program.display())}"

    def member_state(self, number: int) -> RunState | None:
        """Return the state of a member; None if the plan can't be read."""
        return self.sweep.members[number].state if self.sweep is not None else None

    @property
    def size(self) -> str:
        """The number of members, in words."""
        return f"{len(self.sweep.plan.members)} members" if self.sweep is not None else "-"

    @property
    def grace_s(self) -> float:
        """The grace of its members."""
        return self.sweep.plan.run.limits.grace_s if self.sweep is not None else GRACE_S

    @property
    def is_readable(self) -> bool:
        """Return True: its folder shows that it is a sweep."""
        return True

    @property
    def plan_problem(self) -> str:
        """Why its plan can't be read; empty if it can."""
        return "" if self.sweep is not None else "the plan of the sweep can't be read"

    @property
    def place(self) -> str:
        """Where its members run: hosts, a session, or the engine."""
        if self.sweep is None:
            return "local"
        plan = self.sweep.plan
        hosts = dict.fromkeys(place.host for place in plan.places)
        if not hosts and plan.run.session is not None:
            return f"session {plan.run.session}"
        return few_of(hosts, 3) if hosts else plan.run.engine

    def parts(self) -> tuple[LiveTask, ...]:
        """Return its members for the display."""
        return tuple(map(self._shown, self.sweep.members)) if self.sweep is not None else ()

    def _shown(self, member: MemberView) -> LiveTask:
        plan = self.sweep_view().plan
        metric, run_dir = plan.metric, RunDir(self._folder(member.number))
        has_value = metric is not None and member.value is not None
        value = f"{metric.name} {member.value:.6g}" if metric and has_value else ""
        return LiveTask(
            group=str(member.number),
            name=plan.words_of(member.number)[:60],
            state=member.state.value,
            attempt=member.attempt or 0,
            why=member.why or value,
            folder=run_dir.path if os.path.isdir(run_dir.path) else "",
            log=run_dir.rank_log(member.attempt or 0, 0),
        )

    def _folder(self, number: int) -> str:
        return os.path.join(self.run_dir.members, self.sweep_view().plan.member_id(number))

    def sweep_view(self) -> SweepView:
        """Return the view of the sweep and its members.

        Raises:
            NotFoundError: Its plan can't be read.
        """
        if self.sweep is None:
            raise NotFoundError("the plan of the sweep can't be read", where=self.run_dir.sweep)
        return self.sweep

    def member(self, number: int) -> RunDir | None:
        """Return the run directory of a member; None if the plan can't be read.

        Raises:
            NotFoundError: There is no such member, or it has not begun.
        """
        if self.sweep is None:
            return None
        name, last = short_id(self.run_id), len(self.sweep.members) - 1
        if number > last:
            what = f"the sweep {name} has no member {number}"
            raise NotFoundError(what, where=self.run_dir.path, why=f"its members are 0 to {last}")
        path = self._folder(number)
        if not os.path.isdir(path):
            what = f"member {number} of the sweep {name} has not begun"
            raise NotFoundError(what, where=self.run_dir.path)
        return RunDir(path)


def view_sweep(run_dir: RunDir, *, is_alive: bool) -> SweepView | None:
    """Return the state of a sweep; None if its plan can't be read.

    Args:
        run_dir: The run directory of the sweep.
        is_alive: Whether its owner lives; if not, members that run by the record are lost.
    """
    plan = read_sweep(run_dir)
    if plan is None:
        return None
    members = [MemberView(number=number) for number in range(len(plan.members))]
    is_going_on = False
    for one in read_events(run_dir.events):
        match one.event:
            case events.SweepStartedEvent():
                is_going_on = True
                members = [_lost(member) for member in members]
            case events.SweepEndedEvent():
                is_going_on = False
            case events.MemberEvent(member=number) if 0 <= number < len(members):
                members[number] = _after(members[number], one)
    result = read_result(run_dir) if not (is_going_on and is_alive) else None
    if result is not None and result.state is RunState.CANCELLED:
        members = [
            replace(m, state=RunState.CANCELLED) if m.state is RunState.WAITING else m
            for m in members
        ]
    if not is_alive:
        members = [_lost(member) for member in members]
    if is_alive and result is None:
        state = RunState.RUNNING if is_going_on else RunState.STARTING
    else:
        state = result.state if result is not None else RunState.LOST
    return SweepView(plan=plan, state=state, members=tuple(members), result=result)


def _lost(member: MemberView) -> MemberView:
    if member.state is not RunState.RUNNING:
        return member
    return replace(member, state=RunState.LOST, why="it had not ended when its owner was killed")


def _after(member: MemberView, one: Stamped) -> MemberView:
    match one.event:
        case events.MemberStartedEvent(attempt=attempt):
            return MemberView(
                number=member.number, state=RunState.RUNNING, attempt=attempt, started=one.time
            )
        case events.MemberLostEvent():
            return replace(member, state=RunState.WAITING)
        case events.MemberMeasuredEvent(value=value, step=step):
            return replace(member, value=value, step=step)
        case events.MemberEndedEvent() as event:
            if event.value is not None:
                member = replace(member, value=event.value, step=event.step)
            return replace(
                member,
                state=RunState(event.state),
                elapsed_s=event.elapsed_s,
                exit_code=event.exit_code,
                why=event.why,
            )
    return member


def view_of_sweep(run_dir: RunDir) -> SweepView:
    """Return the view of a sweep.

    Raises:
        NotFoundError: Its plan can't be read, or it is not a sweep.
    """
    from torchmuster.launcher.views.find import view_run

    view = view_run(run_dir)
    if not isinstance(view, SweepRun):
        raise NotFoundError("it is no sweep that can be read", where=run_dir.path, why=view.problem)
    return view.sweep_view()


# Of job arrays: members' results, and the scheduler's states for the rest.


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
    from torchmuster.multirun.sweep.arrays import load_arrays  # what other sweeps do without

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


def _with_lost_job_state(member: MemberView, noted: "SweepArrays", run_dir: RunDir) -> MemberView:
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
    return {event.member for event in said if isinstance(event, events.MemberStoppedEvent)}


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
    dialect: ArrayDialect, noted: "SweepArrays", wanted: set[int], ask: Ask
) -> tuple[dict[int, JobView], str | None]:
    """Return the scheduler's states for these members, and the problem if it could not answer.

    One command covers all; further ones run only for members that it does not know.
    """
    element_of: dict[int, tuple[str, int]] = {}
    alone = {array.job_id for array in noted.arrays if len(array.members) == 1}
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
                view = jobs.get(job_id) if job_id in alone else None
            if view is not None:
                found[number] = view
        stderr = said.stderr.decode(errors="replace").strip()
        problem = None if said.status == 0 else (stderr or "it did not answer").splitlines()[-1]
        if wanted <= found.keys():
            break
    return found, problem


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
