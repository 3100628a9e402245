"""Read the events of a training run: its attempts with their ends and causes, and what else is worth knowing."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.model.display.narration import narrate
from torchmuster.model.event import moment_of
from torchmuster.model.record.loose import lines, listed, mapped, number, text, whole
from torchmuster.model.record.training import LibraryStart, TrainingState
from torchmuster.report.story import (
    AttemptNode,
    AttemptTold,
    MomentTold,
    NetworkTold,
    PairTold,
    RankEnd,
)
from torchmuster.report.training import when_reached

FIRST_ATTEMPTS, LAST_ATTEMPTS = 50, 150  # of very many
_MAX_NODES = 64
_MAX_ENDS = 64
_MAX_MOMENTS = 200
_MAX_CAUSES = 20
_MAX_PAIRS = 4096
_WORTH_KNOWING = {
    "agent_refused",
    "early_end",
    "hang",
    "head_replaced",
    "left_running",
    "network",
    "newcomer",
    "node_left_out",
    "node_lost",
    "spare_lost",
    "spare_taken",
    "notice",
    "preflight",
    "shrunk",
    "start_wait",
    "stopping",
    "straggler",
}


@dataclass(slots=True)
class _Attempt:
    number: int
    began: float
    fields: Mapping[str, Any]
    ended: float | None = None
    workers_at: float | None = None
    failure: Mapping[str, Any] | None = None
    stop: str = ""
    ends: list[RankEnd] = field(default_factory=list)
    num_ends: int = 0
    last_end: float | None = None


@dataclass(slots=True)
class EventRecord:
    """What `events.jsonl` says."""

    began: float | None = None
    last_at: float | None = None
    attempts: list[_Attempt] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    moments: list[MomentTold] = field(default_factory=list)
    num_moments: int = 0
    software: list[Mapping[str, Any]] = field(default_factory=list)
    network: NetworkTold | None = None
    ended: Mapping[str, Any] = field(default_factory=dict)
    ran: Mapping[str, Any] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event."""
        at, name = moment_of(event.get("time")), event.get("event")
        if at is None or not isinstance(name, str):
            return
        self.began = at if self.began is None else min(self.began, at)
        self.last_at = at if self.last_at is None else max(self.last_at, at)
        if name == "attempt_started":
            self._start(at, event)
        elif name == "workers_started" and (attempt := self._of(event)) is not None:
            attempt.workers_at = at
        elif name == "worker_ended" and (attempt := self._of(event)) is not None:
            _end_of_rank(attempt, at, event)
            self.ran = mapped(event.get("code")) or self.ran
        elif name == "attempt_failed" and (attempt := self._of(event)) is not None:
            attempt.failure, attempt.ended = event, at
            self.causes[text(event.get("what"), 300) or "a failure"] += 1
        elif name == "run_ended":
            self.ended = event
            if self.attempts and self.attempts[-1].ended is None:
                self.attempts[-1].ended = at
        elif name == "stopping" and self.attempts:
            self.attempts[-1].stop = text(event.get("text"), 300)
        if name in _WORTH_KNOWING:
            self._note(at, name, event)
        if name == "preflight":
            rows = listed(event.get("software")) or listed(event.get("nodes"))
            self.software = [row for row in rows if isinstance(row, dict)] or self.software
        if name in ("network", "preflight") and (network := _network(event)) is not None:
            self.network = network

    def _of(self, event: Mapping[str, Any]) -> _Attempt | None:
        number = whole(event.get("attempt"))
        return next((one for one in self.attempts[:-4:-1] if one.number == number), None)

    def _start(self, at: float, event: Mapping[str, Any]) -> None:
        if (
            self.attempts and self.attempts[-1].ended is None
        ):  # no failure: a stop, a growth, a lost head
            last = self.attempts[-1]
            last.ended = last.last_end or at
        number = whole(event.get("attempt"))
        following = self.attempts[-1].number + 1 if self.attempts else 0
        self.attempts.append(
            _Attempt(number=following if number is None else number, began=at, fields=event)
        )

    def _note(self, at: float, name: str, event: Mapping[str, Any]) -> None:
        try:
            told = narrate(name, event)
        except (LookupError, TypeError, ValueError, AttributeError):  # of another version
            told = text(event.get("text"))
        if not told:
            return
        self.num_moments += 1
        one = MomentTold(at=at, kind=name, text=text(told))
        if len(self.moments) < _MAX_MOMENTS:
            self.moments.append(one)
        else:  # of very many the first half and the last
            del self.moments[_MAX_MOMENTS // 2]
            self.moments.append(one)


def _end_of_rank(attempt: _Attempt, at: float, event: Mapping[str, Any]) -> None:
    attempt.last_end = at
    rank = whole(event.get("rank"))
    if rank is None or event.get("asked") is True:
        return
    attempt.num_ends += 1
    if len(attempt.ends) < _MAX_ENDS:
        what, node = text(event.get("what"), 300), text(event.get("node"), 80)
        attempt.ends.append(RankEnd(rank=rank, node=node, at=at, what=what))


def _network(event: Mapping[str, Any]) -> NetworkTold | None:
    sentence = ""
    if event.get("event") == "network":
        try:
            sentence = text(narrate("network", event))
        except (LookupError, TypeError, ValueError, AttributeError):
            sentence = text(event.get("interface"))
    rows = [row for row in listed(event.get("pairs")) if isinstance(row, list) and len(row) >= 5]
    pairs = [pair for row in rows[:_MAX_PAIRS] if (pair := _pair(row)) is not None]
    names = [
        text(mapped(row).get("node") if isinstance(row, dict) else row, 80)
        for row in listed(event.get("nodes"))
    ]
    if not sentence and not pairs:
        return None
    return NetworkTold(sentence=sentence, nodes=tuple(names[:256]), pairs=tuple(pairs))


def _pair(row: Sequence[object]) -> PairTold | None:
    source, target = whole(row[0]), whole(row[1])
    if source is None or target is None:
        return None
    return PairTold(
        source=source,
        target=target,
        why=text(row[2], 200) or None,
        latency_us=number(row[3]),
        mb_per_s=number(row[4]),
    )


def read_events_of(events: Iterable[Mapping[str, Any]]) -> EventRecord:
    """Return what the events of a run say."""
    record = EventRecord()
    for event in events:
        record.take(event)
    return record


def told_attempts(
    record: EventRecord, training: TrainingState | None, saved_step: int | None
) -> tuple[AttemptTold, ...]:
    """Return all attempts, joined with what the library has recorded of each.

    Args:
        record: Of the head.
        training: Of the library, None without one.
        saved_step: What a restart would go on from, if the last attempt did not end well.
    """
    starts = training.starts if training is not None else []
    found: list[AttemptTold] = []
    place = 0
    for index, attempt in enumerate(record.attempts):
        ends = (
            record.attempts[index + 1].began if index + 1 < len(record.attempts) else float("inf")
        )
        while place < len(starts) and starts[place].at < attempt.began:
            place += 1
        start = starts[place] if place < len(starts) and starts[place].at < ends else None
        following = next((s for s in starts[place + 1 :] if s.at >= ends), None) if start else None
        kept = following.step if following is not None else None
        if index + 1 == len(record.attempts):
            kept = saved_step
        one = _told(attempt, start, is_last=index + 1 == len(record.attempts), record=record)
        if training is not None and start is not None and kept is not None:
            kept = min(kept, start.last_step)
            one = replace(one, kept_step=kept, kept_at=when_reached(training, start, kept))
        found.append(one)
    return tuple(found)


def _told(
    attempt: _Attempt, start: LibraryStart | None, *, is_last: bool, record: EventRecord
) -> AttemptTold:
    fields, failure = attempt.fields, attempt.failure or {}
    cause = mapped(failure.get("cause"))
    nodes = [one for one in listed(fields.get("nodes")) if isinstance(one, dict)]
    ended_by = text(failure.get("what"), 500) if failure else attempt.stop
    if not ended_by and attempt.ended is not None:
        state = text(record.ended.get("state"), 40) if is_last else ""
        ended_by = "all workers ended well" if state == "succeeded" else state
    return AttemptTold(
        number=attempt.number,
        began=attempt.began,
        ended=attempt.ended,
        workers_at=attempt.workers_at,
        training_at=start.at if start is not None else None,
        why=text(fields.get("why"), 300),
        ended_by=ended_by,
        has_failed=bool(failure),
        cause_rank=whole(cause.get("rank")),
        cause_node=text(cause.get("node"), 80),
        world_size=whole(fields.get("world_size")) or 0,
        nodes=tuple(
            AttemptNode(
                node=text(n.get("node"), 80),
                host=text(n.get("host"), 80),
                ranks=text(n.get("ranks"), 80),
            )
            for n in nodes[:_MAX_NODES]
        ),
        num_nodes=whole(fields.get("num_nodes")) or len(nodes),
        first_step=start.step if start is not None else None,
        last_step=start.last_step if start is not None else whole(cause.get("step")),
        evidence=_evidence(cause),
        ends=tuple(attempt.ends),
        num_ends=attempt.num_ends,
    )


def _evidence(cause: Mapping[str, Any]) -> tuple[str, ...]:
    found: list[str] = []
    error = mapped(cause.get("error"))
    if isinstance(error.get("traceback"), str):
        found += lines(error["traceback"], 30)
    elif cause.get("tail"):
        found += lines(cause["tail"], 30)
    found += [
        text(cause[key]) for key in ("detail", "memory_evidence") if isinstance(cause.get(key), str)
    ]
    return tuple(found)


def few_attempts(attempts: Sequence[AttemptTold]) -> tuple[AttemptTold, ...]:
    """Return the first and the last of very many."""
    if len(attempts) <= FIRST_ATTEMPTS + LAST_ATTEMPTS:
        return tuple(attempts)
    return (*attempts[:FIRST_ATTEMPTS], *attempts[-LAST_ATTEMPTS:])


def frequent_causes(record: EventRecord) -> tuple[tuple[str, int], ...]:
    """Return what ended the attempts and how often, the most frequent first."""
    return tuple(record.causes.most_common(_MAX_CAUSES))
