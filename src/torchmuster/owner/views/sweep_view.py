"""A sweep as its record shows it: one file tells where all members stand."""

from contextlib import suppress
from dataclasses import dataclass, replace

from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Result
from torchmuster.owner.views.record import DAMAGED, read_events, read_result
from torchmuster.spec.sweep_plan import REMOVED_FIELDS, SweepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """Where one member stands.

    Attributes:
        attempt: The newest; None before the first.
        started: When that began, as the record says.
        why: What ended it; None for a success and while it lasts.
        value: The last of the metric.
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
    """Where a sweep stands."""

    plan: SweepPlan
    state: RunState
    members: tuple[MemberView, ...]
    result: Result | None

    @property
    def best(self) -> MemberView | None:
        """Return the member with the best last value so far; of equals the first."""
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
        """Return how many members are in each state, in the order of the states."""
        states = [member.state for member in self.members]
        return {state: states.count(state) for state in RunState if state in states}


def read_sweep(run_dir: RunDir) -> SweepPlan | None:
    """Return the plan of a sweep, or None when there is no readable one."""
    plain = atomic.read_json(run_dir.sweep)
    if isinstance(plain, dict):
        plain = {name: value for name, value in plain.items() if name not in REMOVED_FIELDS}
    try:
        return codec.from_plain(SweepPlan, plain)
    except codec.CodecError:
        return None


def view_sweep(run_dir: RunDir, *, is_alive: bool) -> SweepView | None:
    """Return where a sweep stands; None when its plan can't be read.

    Args:
        run_dir: Of the sweep.
        is_alive: Its owner lives; else what runs by the record is lost.
    """
    plan = read_sweep(run_dir)
    if plan is None:
        return None
    members = [MemberView(number=number) for number in range(len(plan.members))]
    is_going_on = False
    for event in read_events(run_dir.events):
        with suppress(*DAMAGED):
            if event["event"] == "sweep_started":
                is_going_on = True
                members = [_lost(member) for member in members]
            elif event["event"] == "sweep_ended":
                is_going_on = False
            elif str(event["event"]).startswith("member_"):
                number = int(event["member"])
                if 0 <= number < len(members):
                    members[number] = _after(members[number], event)
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


def _after(member: MemberView, event: dict[str, object]) -> MemberView:
    value, step = event.get("value"), event.get("step")
    measured = replace(
        member,
        value=float(value) if isinstance(value, int | float) else member.value,
        step=step if isinstance(step, int) and value is not None else member.step,
    )
    match event["event"]:
        case "member_started":
            return MemberView(
                number=member.number,
                state=RunState.RUNNING,
                attempt=int(str(event["attempt"])),
                started=str(event["time"]),
            )
        case "member_lost":
            return replace(member, state=RunState.WAITING)
        case "member_measured":
            return measured
        case "member_ended":
            elapsed_s, code, why = event["elapsed_s"], event["exit_code"], event["why"]
            return replace(
                measured,
                state=RunState(event["state"]),
                elapsed_s=float(elapsed_s) if isinstance(elapsed_s, int | float) else None,
                exit_code=code if isinstance(code, int) else None,
                why=str(why) if why is not None else None,
            )
    return member
