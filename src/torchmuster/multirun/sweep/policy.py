"""Which member of a sweep starts when, in which slot: decides without I/O, and is told what has happened."""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchmuster.core.model.states import RunState
from torchmuster.multirun.sweep.plan import MetricChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStart:
    """A member that is to start now."""

    member: int
    slot: int


@dataclass(slots=True)
class SweepPolicy:
    """The queue of a sweep.

    Attributes:
        num_slots: How many members run at a time.
        metric: What is looked for; None: nothing.
        states: Of the members that have begun or will not.
        running: The slot of each member that runs.
        asked: Members that were asked to end, and why: the state that follows.
        values: The last value of the metric, by member.
        has_given_up: Members are left that can't be started now.
        num_at_home: How many of those have a home.
        homes: The slots in which a member has to run, because what it has saved is there; any where it is not named.
    """

    num_slots: int
    metric: MetricChoice | None = None
    states: dict[int, RunState] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    asked: dict[int, RunState] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)
    is_cancelled: bool = False
    has_given_up: bool = False
    num_at_home: int = 0
    homes: dict[int, frozenset[int]] = field(default_factory=dict)
    _waiting: deque[int] = field(default_factory=deque)
    _free: list[int] = field(default_factory=list)

    def begin(self, members: Iterable[int], settled: Mapping[int, RunState]) -> None:
        """Take the members; those that are settled by an earlier life of the sweep don't run again."""
        self.states = dict(settled)
        self._waiting = deque(member for member in members if member not in settled)
        self._free = list(range(self.num_slots))

    # Questions.

    @property
    def is_over(self) -> bool:
        """Say whether nothing runs and nothing will."""
        return not self.running and not self._waiting

    @property
    def has_room(self) -> bool:
        """Say whether a member waits and a slot is free for it."""
        return self.next_start() is not None

    @property
    def is_stuck(self) -> bool:
        """Say whether members wait, and all slots are lost in which they could run."""
        return bool(self._waiting) and not self.running and not self.has_room

    @property
    def num_waiting(self) -> int:
        """Return how many have not begun."""
        return len(self._waiting)

    def next_waiting(self, most: int) -> list[int]:
        """Return the members that come next."""
        return list(itertools.islice(self._waiting, most))

    def next_start(self) -> int | None:
        """Return the first member for which a slot is free; None without any."""
        free = frozenset(self._free)
        fitting = (m for m in self._waiting if not free.isdisjoint(self.homes.get(m, free)))
        return next(fitting, None)

    @property
    def best(self) -> int | None:
        """Return the member with the best value so far, of equals the first; None without any."""
        best: int | None = None
        for member in sorted(self.values) if self.metric is not None else ():
            value = self.values[member]
            if value == value and (
                best is None or self.metric.is_better(value, self.values[best])  # type: ignore[union-attr]
            ):
                best = member
        return best

    @property
    def state(self) -> RunState:
        """Return the state of a sweep that is over."""
        if self.is_cancelled:
            return RunState.CANCELLED
        left = [RunState.PREEMPTED] * self.has_given_up
        return state_of_sweep([*self.states.values(), *left])

    # What happens.

    def start(self) -> MemberStart:
        """Return what starts now, in the lowest free slot; it counts as running from here on.

        Raises:
            IndexError: There is no room, or nothing waits.
        """
        if (member := self.next_start()) is None:
            raise IndexError("no room")
        slot = next(one for one in self._free if one in self.homes.get(member, self._free))
        self._waiting.remove(member)
        self._free.remove(slot)
        start = MemberStart(member=member, slot=slot)
        self.running[start.member] = start.slot
        return start

    def ended(self, member: int, state: RunState, *, retire: bool = False) -> RunState:
        """Take the end of a member; return its state, which who asked for it decides unless it ended well.

        With `retire` its slot is lost: nothing starts there any more.
        """
        self._free_slot(member, retire=retire)
        asked = self.asked.pop(member, None)
        if asked is not None and state is not RunState.SUCCEEDED:
            state = asked
        self.states[member] = state
        return state

    def _free_slot(self, member: int, *, retire: bool) -> None:
        slot = self.running.pop(member)
        if not retire:
            self._free.append(slot)
            self._free.sort()

    def again(self, member: int, *, retire: bool = False) -> None:
        """Let a member that ended by no fault of its own start once more, before all others."""
        self._free_slot(member, retire=retire)
        asked = self.asked.pop(member, None)
        if asked is None:
            self._waiting.appendleft(member)
        else:
            self.states[member] = asked

    def measured(self, member: int, value: float) -> None:
        """Take the newest value of a member's metric."""
        self.values[member] = value

    def stop(self, member: int) -> bool:
        """Ask a member to end because it is among the worst; say whether it runs and was not asked before."""
        if member not in self.running or member in self.asked:
            return False
        self.asked[member] = RunState.STOPPED
        return True

    def give_up(self) -> None:
        """Start nothing more: members that have not begun are left as they are, for another life of the sweep."""
        self.has_given_up = bool(self._waiting)
        self.num_at_home = sum(member in self.homes for member in self._waiting)
        self._waiting.clear()

    def cancel(self) -> list[int]:
        """Start nothing more; return the members that have to end."""
        self.is_cancelled = True
        for member in self._waiting:
            self.states[member] = RunState.CANCELLED
        self._waiting.clear()
        for member in self.running:
            self.asked[member] = RunState.CANCELLED
        return list(self.running)


def state_of_sweep(states: Iterable[RunState]) -> RunState:
    """Return the state of a sweep that is over: that of its worst member."""
    found = set(states)
    if found & {RunState.FAILED, RunState.LOST, RunState.TIMED_OUT}:
        return RunState.FAILED
    for state in (RunState.PREEMPTED, RunState.CANCELLED):
        if state in found:
            return state
    return RunState.SUCCEEDED
