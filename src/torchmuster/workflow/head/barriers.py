"""The barriers of one group, which its head keeps: who waits, who is missing, when a wait ends.

Without I/O: the caller passes the time and sends the answers. After a full barrier, the next call
begins a new round. A caller that disconnects is removed; an invalid call is refused alone. What
makes the wait of all hopeless (a task that ended, counts that disagree) fails all of them at once.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.core.model.text import MAX_NAMES, few_of
from torchmuster.errors import BarrierError
from torchmuster.workflow.head.task_messages import BarrierAnswer, BarrierCall, BarrierState

MAX_BARRIERS = 1000
MAX_COUNT = 1 << 16
PROGRESS_S = 5.0
_MAX_TIMEOUT_S = 366 * 86400.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """A waiting caller."""

    member: str
    call: BarrierCall
    deadline_s: float

    @property
    def label(self) -> str:
        return self.member if self.call.rank is None else f"rank {self.call.rank}"

    @property
    def key(self) -> str:
        """Return the key that must be unique in a round."""
        if self.call.rank is not None:
            return f"rank {self.call.rank}"
        is_counted = self.call.count is not None
        return f"caller {self.call.caller_id}" if is_counted else f"task {self.member}"


@dataclass(slots=True, kw_only=True)
class _Barrier:
    """The barrier of one name: its current round, and what earlier rounds have shown.

    Attributes:
        took_part: The tasks that called in this or an earlier round of the same count.
        has_several: Whether several processes of one task have waited at once.
        notes: Label of a missing caller -> why it no longer waits.
    """

    name: str
    needed: int = 0
    arrivals: dict[str, _Arrival] = field(default_factory=dict)
    report_at_s: dict[str, float] = field(default_factory=dict)
    took_part: set[str] = field(default_factory=set)
    has_several: bool = False
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, arrival: _Arrival, needed: int, now_s: float) -> None:
        if needed != self.needed:
            self.took_part.clear()
            self.has_several = False
        self.needed = needed
        self.has_several |= any(a.member == arrival.member for a in self.arrivals.values())
        self.arrivals[arrival.call.caller_id] = arrival
        self.report_at_s[arrival.call.caller_id] = now_s + PROGRESS_S
        self.took_part.add(arrival.member)

    def remove(self, caller_id: str) -> _Arrival:
        del self.report_at_s[caller_id]
        return self.arrivals.pop(caller_id)


class Barriers:
    """All barriers of a group.

    Args:
        members: The names of the group's tasks.
    """

    def __init__(self, members: tuple[str, ...]) -> None:
        self._members = members
        self._gone: dict[str, str] = {}
        self._barriers: dict[str, _Barrier] = {}
        self._at: dict[str, _Barrier] = {}  # caller_id -> where it waits

    def arrive(self, member: str, call: BarrierCall, now_s: float) -> tuple[BarrierAnswer, ...]:
        """Add a caller; return the answers that are now due, to it and to others."""
        arrival = _Arrival(member=member, call=call, deadline_s=now_s + call.timeout_s)
        needed = len(self._members) if call.count is None else call.count
        try:
            self._check(arrival, needed)
            barrier = self._open(call.name)
            _check_double(barrier, arrival)
        except BarrierError as error:
            return (_failure(call.caller_id, error),)
        if barrier.arrivals and barrier.needed != needed:
            clash = _disagreement(barrier, arrival)
            return (_failure(call.caller_id, clash), *self._fail(barrier, clash))
        barrier.add(arrival, needed, now_s)
        self._at[call.caller_id] = barrier
        if len(barrier.arrivals) == needed:
            released = BarrierState.RELEASED
            everyone = self._empty(barrier)
            return tuple(BarrierAnswer(caller_id=one, kind=released) for one in everyone)
        return self._fail_if_hopeless(barrier)

    def leave(self, caller_id: str) -> None:
        """Remove a disconnected caller; ignore unknown ones."""
        barrier = self._at.pop(caller_id, None)
        if barrier is not None:
            label = barrier.remove(caller_id).label
            barrier.notes[label] = "stopped waiting"

    def end_member(self, member: str, why: str) -> tuple[BarrierAnswer, ...]:
        """Record that a task has ended; fail the barriers that can't be full without it.

        Args:
            member: The task's name.
            why: The reason, for the sentence `task NAME has ended: WHY`.
        """
        self._gone[member] = why
        answers: list[BarrierAnswer] = []
        for barrier in self._barriers.values():
            for caller in [c for c, a in barrier.arrivals.items() if a.member == member]:
                barrier.remove(caller)
                del self._at[caller]
                error = BarrierError(f"task `{member}` has ended: {why}")
                answers.append(_failure(caller, error))
            answers += self._fail_if_hopeless(barrier)
        return tuple(answers)

    def tick(self, now_s: float) -> tuple[BarrierAnswer, ...]:
        """Return the answers that are due: expired time limits, and every 5 s who is missing."""
        answers: list[BarrierAnswer] = []
        for barrier in self._barriers.values():
            if barrier.arrivals:
                answers += self._expire(barrier, now_s)
                answers += self._report(barrier, now_s)
        return tuple(answers)

    def _check(self, arrival: _Arrival, needed: int) -> None:
        call, name = arrival.call, arrival.call.name
        if arrival.member not in self._members:
            raise BarrierError(f"`{arrival.member}` is not a task of this group")
        if call.caller_id in self._at:
            raise BarrierError("this call waits already", where=f"barrier {name[:64]}")
        if not _NAME.fullmatch(name):
            fix = "letters, digits, `.`, `_` and `-`, at most 64"
            raise BarrierError(f"`{name[:80]}` is not a valid name of a barrier", fix=fix)
        if not 1 <= needed <= MAX_COUNT:
            raise BarrierError(f"a barrier can't wait for {needed}", fix=f"1 to {MAX_COUNT}")
        if call.rank is not None and not 0 <= call.rank < needed:
            raise BarrierError(
                f"rank {call.rank} is out of range: the barrier `{name}` waits for {needed}",
                where=f"task {arrival.member}",
                fix=f"ranks are 0 to {needed - 1}",
            )
        if not (math.isfinite(call.timeout_s) and 0 < call.timeout_s <= _MAX_TIMEOUT_S):
            raise BarrierError(f"{call.timeout_s} s is not a valid limit for a wait")

    def _open(self, name: str) -> _Barrier:
        """Return the barrier of this name; at the limit, remove one at which nobody waits."""
        if name not in self._barriers and len(self._barriers) >= MAX_BARRIERS:
            idle = next((b.name for b in self._barriers.values() if not b.arrivals), None)
            if idle is None:
                raise BarrierError(f"the group waits at {MAX_BARRIERS} barriers already")
            del self._barriers[idle]
        return self._barriers.setdefault(name, _Barrier(name=name))

    def _fail(self, barrier: _Barrier, error: BarrierError) -> tuple[BarrierAnswer, ...]:
        return tuple(_failure(caller, error) for caller in self._empty(barrier))

    def _empty(self, barrier: _Barrier) -> tuple[str, ...]:
        """Remove all callers; the next call begins a new round."""
        callers = tuple(barrier.arrivals)
        for caller in callers:
            del self._at[caller]
        barrier.arrivals.clear()
        barrier.report_at_s.clear()
        barrier.notes.clear()
        return callers

    def _fail_if_hopeless(self, barrier: _Barrier) -> tuple[BarrierAnswer, ...]:
        lost = self._missing_ended_tasks(barrier)
        if not barrier.arrivals or not lost:
            return ()
        names = name_missing([f"`{name}`" for name in lost], len(lost))
        what = f"the barrier `{barrier.name}` can never be full: task {names} has ended"
        why = "\n".join(f"{name}: {self._gone[name]}" for name in lost[:MAX_NAMES])
        return self._fail(barrier, BarrierError(what, why=why))

    def _missing_ended_tasks(self, barrier: _Barrier) -> list[str]:
        """Return the ended tasks without which the round can never be full."""
        here = {arrival.member for arrival in barrier.arrivals.values()}
        gone = [name for name in self._members if name in self._gone and name not in here]
        if any(arrival.call.count is None for arrival in barrier.arrivals.values()):
            return gone
        if barrier.needed <= len(self._members) and not barrier.has_several:
            return gone if barrier.needed > len(self._members) - len(self._gone) else []
        # Several processes of a task may call, in unknown number; tasks that took part are missed.
        return [name for name in gone if name in barrier.took_part]

    def _expire(self, barrier: _Barrier, now_s: float) -> list[BarrierAnswer]:
        late = {c: a for c, a in barrier.arrivals.items() if a.deadline_s <= now_s}
        names, who = self._missing(barrier) if late else ((), "")
        sentence = say_missing(len(barrier.arrivals), barrier.needed, who)
        answers = []
        for caller, arrival in late.items():
            limit = f"{arrival.call.timeout_s:g} s"
            what = f"the barrier `{barrier.name}` was not full within {limit}: missing {who}"
            answers.append(
                BarrierAnswer(
                    caller_id=caller,
                    kind=BarrierState.FAILED,
                    what=what,
                    why=sentence,
                    missing=names,
                    timed_out=True,
                )
            )
            barrier.remove(caller)
            del self._at[caller]
            barrier.notes[arrival.label] = f"gave up after {limit}"
        return answers

    def _report(self, barrier: _Barrier, now_s: float) -> list[BarrierAnswer]:
        due = [caller for caller, at_s in barrier.report_at_s.items() if at_s <= now_s]
        names, who = self._missing(barrier) if due else ((), "")
        sentence = say_missing(len(barrier.arrivals), barrier.needed, who)
        for caller in due:
            barrier.report_at_s[caller] = now_s + PROGRESS_S
        return [
            BarrierAnswer(
                caller_id=caller,
                kind=BarrierState.WAITING,
                what=sentence,
                missing=names,
                left_s=barrier.arrivals[caller].deadline_s - now_s,
            )
            for caller in due
        ]

    def _missing(self, barrier: _Barrier) -> tuple[tuple[str, ...], str]:
        """Return the names of the first missing callers, and a text about all of them."""
        num_missing = barrier.needed - len(barrier.arrivals)
        ranks = {arrival.call.rank for arrival in barrier.arrivals.values()}
        if None in ranks:
            here = {arrival.member for arrival in barrier.arrivals.values()}
            names = [name for name in self._members if name not in here]
        else:
            absent = (rank for rank in range(barrier.needed) if rank not in ranks)
            names = [f"rank {rank}" for rank, _ in zip(absent, range(MAX_NAMES), strict=False)]
        who = name_missing([self._with_note(barrier, name) for name in names], num_missing)
        if None not in ranks and self._gone:
            ended = [f"task {name} has ended: {why}" for name, why in self._gone.items()]
            who = f"{who} ({'; '.join(ended[:MAX_NAMES])})"
        return tuple(names[:MAX_NAMES]), who

    def _with_note(self, barrier: _Barrier, label: str) -> str:
        ended = f"has ended: {self._gone[label]}" if label in self._gone else None
        note = ended or barrier.notes.get(label)
        return f"{label} ({note})" if note else label


def _failure(caller_id: str, error: BarrierError) -> BarrierAnswer:
    return BarrierAnswer(
        caller_id=caller_id,
        kind=BarrierState.FAILED,
        what=error.what,
        where=error.where,
        why=error.why,
        fix=error.fix,
    )


def _check_double(barrier: _Barrier, arrival: _Arrival) -> None:
    if any(other.key == arrival.key for other in barrier.arrivals.values()):
        rank = arrival.call.rank
        who = f"task `{arrival.member}`" if rank is None else f"rank {rank}"
        fix = "give each process its own rank, and the count of all of them"
        raise BarrierError(f"{who} waits at the barrier `{barrier.name}` already", fix=fix)


def _disagreement(barrier: _Barrier, arrival: _Arrival) -> BarrierError:
    other = next(iter(barrier.arrivals.values()))
    return BarrierError(
        f"the callers of the barrier `{barrier.name}` disagree about the number of callers",
        why=f"{_counted(other)}, {_counted(arrival)}",
        fix="give all of them the same count",
    )


def _counted(arrival: _Arrival) -> str:
    call = arrival.call
    number = "one call of each task" if call.count is None else str(call.count)
    rank = "" if call.rank is None else f" (rank {call.rank})"
    return f"task {arrival.member}{rank} waits for {number}"


def name_missing(names: Sequence[str], num_missing: int) -> str:
    """Return `b, c`, or `2 of b, c, d` when any two of these are enough, or `5 more`.

    Args:
        names: Possible names; the first few suffice if all are missing.
        num_missing: How many are still missing.
    """
    if not names:
        return f"{num_missing} more"
    if len(names) > num_missing:
        return f"{num_missing} of {few_of(names, MAX_NAMES)}"
    return few_of(names, MAX_NAMES, num_missing)


def say_missing(num_here: int, num_needed: int, who: str) -> str:
    """Return the sentence for a progress line."""
    return f"{num_here} of {num_needed} {'is' if num_here == 1 else 'are'} here, missing: {who}"
