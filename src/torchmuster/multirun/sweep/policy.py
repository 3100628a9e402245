"""Decide which member of a sweep starts when, in which slot; without I/O, from reported events."""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchmuster.core.model.states import RunState
from torchmuster.multirun.sweep.plan import MetricChoice


@dataclass(slots=True)
class SweepPolicy:
    """The queue of a sweep.

    Attributes:
        num_slots: How many members run at a time.
        metric: The metric that members are compared by, if any.
        states: The states of members that have ended or will not start.
        running: The slot of each running member.
        asked: The members that were asked to end, and the state that they get for it.
        values: The last value of the metric, by member.
        has_given_up: Whether members are left that can't be started now.
        num_at_home: How many of those have an entry in `homes`.
        homes: The slots in which a member must run, because its snapshots are there; a member
            without an entry may run in any.
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
        """Queue the members, except those that an earlier owner of the sweep has settled."""
        self.states = dict(settled)
        self._waiting = deque(member for member in members if member not in settled)
        self._free = list(range(self.num_slots))

    # Queries.

    @property
    def is_over(self) -> bool:
        """Return whether no member runs or waits."""
        return not self.running and not self._waiting

    @property
    def has_room(self) -> bool:
        """Return whether a member waits that can start in a free slot."""
        return self.next_start() is not None

    @property
    def is_stuck(self) -> bool:
        """Return whether members wait, but all slots in which they could run are lost."""
        return bool(self._waiting) and not self.running and not self.has_room

    @property
    def num_waiting(self) -> int:
        """Return how many members wait."""
        return len(self._waiting)

    def next_waiting(self, most: int) -> list[int]:
        """Return the next waiting members, at most `most`."""
        return list(itertools.islice(self._waiting, most))

    def next_start(self) -> int | None:
        """Return the first waiting member that has a free slot, or None."""
        free = frozenset(self._free)
        fitting = (m for m in self._waiting if not free.isdisjoint(self.homes.get(m, free)))
        return next(fitting, None)

    @property
    def best(self) -> int | None:
        """Return the member with the best value so far, the first of equals, or None."""
        return self.metric.best_of(self.values) if self.metric is not None else None

    @property
    def state(self) -> RunState:
        """Return the state of a sweep that is over."""
        if self.is_cancelled:
            return RunState.CANCELLED
        left = [RunState.PREEMPTED] * self.has_given_up
        return state_of_sweep([*self.states.values(), *left])

    # Events.

    def start(self) -> tuple[int, int]:
        """Take the next member from the queue into the lowest free slot; return member and slot.

        Raises:
            IndexError: No waiting member has a free slot.
        """
        if (member := self.next_start()) is None:
            raise IndexError("no room")
        slot = next(one for one in self._free if one in self.homes.get(member, self._free))
        self._waiting.remove(member)
        self._free.remove(slot)
        self.running[member] = slot
        return member, slot

    def ended(self, member: int, state: RunState, *, retire: bool = False) -> RunState:
        """Record the end of a member; return its state.

        If it was asked to end and did not succeed, the request decides its state. With `retire`
        its slot is lost: nothing starts there any more.
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
        """Put a member that was lost through no fault of its own at the front of the queue."""
        self._free_slot(member, retire=retire)
        asked = self.asked.pop(member, None)
        if asked is None:
            self._waiting.appendleft(member)
        else:
            self.states[member] = asked

    def stop(self, member: int) -> bool:
        """Mark a member as stopped early; return whether it runs and was not marked before."""
        if member not in self.running or member in self.asked:
            return False
        self.asked[member] = RunState.STOPPED
        return True

    def give_up(self) -> None:
        """Clear the queue; waiting members keep their state, for a restart of the sweep."""
        self.has_given_up = bool(self._waiting)
        self.num_at_home = sum(member in self.homes for member in self._waiting)
        self._waiting.clear()

    def cancel(self) -> list[int]:
        """Cancel waiting and running members; return the running ones, which must be ended."""
        self.is_cancelled = True
        for member in self._waiting:
            self.states[member] = RunState.CANCELLED
        self._waiting.clear()
        for member in self.running:
            self.asked[member] = RunState.CANCELLED
        return list(self.running)


def state_of_sweep(states: Iterable[RunState]) -> RunState:
    """Return the state of a sweep that is over, from its worst member."""
    found = set(states)
    if found & {RunState.FAILED, RunState.LOST, RunState.TIMED_OUT}:
        return RunState.FAILED
    for state in (RunState.PREEMPTED, RunState.CANCELLED):
        if state in found:
            return state
    return RunState.SUCCEEDED
