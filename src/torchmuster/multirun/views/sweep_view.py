"""The view of a sweep from its record: one file has the states of all members."""

import os
from dataclasses import dataclass, replace
from typing import ClassVar

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import Kind, RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.events import (
    MemberEndedEvent,
    MemberEvent,
    MemberLostEvent,
    MemberMeasuredEvent,
    MemberStartedEvent,
    Stamped,
    SweepEndedEvent,
    SweepStartedEvent,
)
from torchmuster.core.model.plan import GRACE_S
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import few_of, in_one_line
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.record import read_events, read_result
from torchmuster.errors import NotFoundError
from torchmuster.launcher.model.live import LiveTask
from torchmuster.launcher.views.run_view import RunView
from torchmuster.multirun.sweep.plan import REMOVED_FIELDS, SweepPlan


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
        best: MemberView | None = None
        metric = self.plan.metric
        for member in self.members if metric is not None else ():
            if member.value is None or member.value != member.value:
                continue
            if best is None or (
                metric is not None
                and best.value is not None
                and metric.is_better(member.value, best.value)
            ):
                best = member
        return best

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
        name = " ".join(f"{name}={value}" for name, value in plan.values_of(member.number).items())
        has_value = metric is not None and member.value is not None
        value = f"{metric.name} {member.value:.6g}" if metric and has_value else ""
        return LiveTask(
            group=str(member.number),
            name=name[:60],
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


def read_sweep(run_dir: RunDir) -> SweepPlan | None:
    """Return the plan of a sweep; None if it can't be read."""
    plain = atomic.read_json(run_dir.sweep)
    if isinstance(plain, dict):
        plain = {name: value for name, value in plain.items() if name not in REMOVED_FIELDS}
    try:
        return codec.from_plain(SweepPlan, plain)
    except codec.CodecError:
        return None


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
            case SweepStartedEvent():
                is_going_on = True
                members = [_lost(member) for member in members]
            case SweepEndedEvent():
                is_going_on = False
            case MemberEvent(member=number) if 0 <= number < len(members):
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
        case MemberStartedEvent(attempt=attempt):
            return MemberView(
                number=member.number, state=RunState.RUNNING, attempt=attempt, started=one.time
            )
        case MemberLostEvent():
            return replace(member, state=RunState.WAITING)
        case MemberMeasuredEvent(value=value, step=step):
            return replace(member, value=value, step=step)
        case MemberEndedEvent() as event:
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
