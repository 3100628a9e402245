"""One fold of a training run's `events.jsonl` for every view, and one of its `training.jsonl`.

Both are bounded, whatever the number of ranks and steps. Workflows and sweeps use the first for
their own records, too, for the common parts: start and notices. A line of another version, or a
value of another type, is ignored; the others count.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, TypeVar

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import events
from torchmuster.core.model.codec import moment_of
from torchmuster.core.model.events import RecordEvent, Stamped, parse
from torchmuster.core.model.failure import RanCode, ValueNote, WorkerEnd
from torchmuster.core.model.narration import narrate
from torchmuster.core.model.text import loss_of, place_of, printable
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.record import RecordTail
from torchmuster.launcher.model import events as parts

# Thin out a long series without losing its extremes: 100,000 steps keep their spikes on a plot of
# 900 pixels.


Point = TypeVar("Point", bound=tuple[float, float | None])


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return up to about `most` points: first, least, greatest and one missing per stretch.

    Args:
        points: (step, value), ordered by step; a value is None or not finite where it is missing.
        most: At least 8.
    """
    if len(points) <= most:
        return list(points)
    num_stretches = max(most // 4, 1)
    size = len(points) / num_stretches
    found: list[Point] = []
    for stretch in range(num_stretches):
        part = points[round(stretch * size) : round((stretch + 1) * size)]
        if part:
            found += _telling(part)
    if found[-1] != points[-1]:
        found.append(points[-1])
    return found


def _telling(part: Sequence[Point]) -> list[Point]:
    known = [p for p, (_, value) in enumerate(part) if value is not None and isfinite(value)]
    places = {0}
    if known:
        places |= {end(known, key=lambda p: part[p][1] or 0.0) for end in (min, max)}
    if len(known) < len(part):
        places.add(next(p for p, (_, v) in enumerate(part) if v is None or not isfinite(v)))
    return [part[place] for place in sorted(places)]


# Read values from a record that may be of another version, half written or malicious: checked by
# type, bounded, printable.


MAX_TEXT = 2000


def text(value: object, most: int = MAX_TEXT) -> str:
    """Return a text without control characters, cut; empty if it is not a text."""
    if not isinstance(value, str):
        return ""
    cut = value if len(value) <= most else f"{value[:most]} ..."
    return printable(cut.encode(errors="replace").decode())


def lines(value: object, most_lines: int = 60) -> tuple[str, ...]:
    """Return the lines of a text or of a list of texts; of too many the first and the last."""
    parts = value.splitlines() if isinstance(value, str) else listed(value)
    found = [text(part, 500) for part in parts if isinstance(part, str)]
    if len(found) > most_lines:
        half = most_lines // 2
        left = len(found) - 2 * half
        found = [*found[:half], f"... {left} lines ...", *found[-half:]]
    return tuple(found)


def number(value: object) -> float | None:
    """Return a finite number, or None."""
    if type(value) is float:  # nearly all
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: object) -> int | None:
    """Return a whole number that is not negative, or None."""
    if type(value) is int and 0 <= value < 2**53:  # nearly all
        return value
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**53 else None


def listed(value: object) -> list[Any]:
    """Return a list; empty if it is not one."""
    return value if isinstance(value, list) else []


def mapped(value: object) -> Mapping[str, Any]:
    """Return an object; empty if it is not one."""
    return value if isinstance(value, dict) else {}


def several(count: int, one: str) -> str:
    """Return `1 line`, `3 lines`."""
    return f"{count} {one if count == 1 else f'{one}s'}"


def ends_of(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Return the minimum and maximum of the known values; None without any."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


MOST_POINTS = 2000  # kept of a series once it has twice as many
MOST_REDONE = 500
MOST_NOT_FINITE = 5
_MOST_SERIES, _LONGEST_NAME = 100, 200
T = TypeVar("T")


def bad_loss(values: Mapping[str, float], not_finite: Mapping[str, int]) -> str:
    """Return `loss nan (since step 100)`; empty if the loss is finite or there is none."""
    name = loss_of(values)
    if name is None or name not in not_finite:
        return ""
    return f"{name} {values[name]}{since_suffix(not_finite[name])}"


def since_suffix(step: int | None) -> str:
    """Return the suffix for a value that is not finite, ` (since step 100)`, else nothing."""
    return f" (since step {step})" if step is not None else ""


def bad_since(points: Sequence[tuple[int, float | None]]) -> int | None:
    """Return the step since which no value is finite; None if the last one is."""
    since = None
    for step, value in reversed(points):
        if value is not None and math.isfinite(value):
            break
        since = step
    return since


def with_later(means: Mapping[str, T], later: Mapping[str, T]) -> dict[str, T]:
    """Return an epoch's means plus values logged after its last step, which override none."""
    return {**means, **later, **means}


def numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, finite or not."""
    return {
        str(name): float(value)
        for name, value in values.items()
        if type(value) is float or number(value) is not None
    }


@dataclass(slots=True)
class Series:
    """The values of one metric, bounded: of too many, the extremes of each stretch are kept.

    Attributes:
        points: Steps and values that count.
        newest: The newest value.
        since: The step since which no value is finite; None while the newest is.
        num_points: How many values count; approximate if there are very many.
        redone: Values of steps that a later attempt repeated.
        not_finite: The first values that are not finite, repeated or not.
        num_not_finite: Number of values that are not finite.
    """

    points: list[tuple[int, float]] = field(default_factory=list)
    newest: tuple[int, float] = (0, 0.0)
    since: int | None = None
    num_points: int = 0
    redone: list[tuple[int, float]] = field(default_factory=list)
    not_finite: list[tuple[int, float]] = field(default_factory=list)
    num_not_finite: int = 0

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        self.newest = (step, value)
        if math.isfinite(value):
            self.since = None
        else:
            self.since = step if self.since is None else self.since
            self.num_not_finite += 1
            if self.num_not_finite <= MOST_NOT_FINITE:
                self.not_finite.append(self.newest)
        self.num_points += 1
        self.points.append(self.newest)
        if len(self.points) > 2 * MOST_POINTS:
            self.points = thinned(self.points, MOST_POINTS)

    def go_back(self, step: int) -> None:
        """Mark the values after a step as repeated: an attempt resumes from there."""
        kept = [point for point in self.points if point[0] <= step]
        self.redone += [point for point in self.points if point[0] > step]
        if len(self.redone) > 2 * MOST_REDONE:
            self.redone = thinned(self.redone, MOST_REDONE)
        self.num_points = round(self.num_points * len(kept) / max(len(self.points), 1))
        self.points = kept
        if self.newest[0] > step:
            self.since = bad_since(kept)
            self.newest = kept[-1] if kept else self.newest


@dataclass(slots=True)
class Metrics:
    """All metrics of a record."""

    by_name: dict[str, Series] = field(default_factory=dict)

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a line of the record; ignore values that are not numbers."""
        for name, value in numbers_in(values).items():
            key = name[:_LONGEST_NAME]
            series = self.by_name.get(key)
            if series is None and len(self.by_name) >= _MOST_SERIES:
                continue
            # What counts is in the order of its first value.
            if series is None or not series.points:
                self.by_name.pop(key, None)
                self.by_name[key] = series = series or Series()
            series.add(step, value)

    def go_back(self, step: int) -> None:
        """Discard the values after a step: an attempt resumes from there."""
        for series in self.by_name.values():
            series.go_back(step)

    def series(self) -> dict[str, Series]:
        """Return the series that have points, by name, in the order of views."""
        # All points of a series may be repeated.
        names = [name for name, series in self.by_name.items() if series.points]
        return {name: self.by_name[name] for name in sorted(names, key=place_of)}

    def values(self) -> dict[str, float]:
        """Return the newest value of each metric."""
        return {name: series.newest[1] for name, series in self.series().items()}

    def not_finite(self) -> dict[str, int]:
        """Return the metrics whose newest value is not finite, each with the step since which."""
        found = {name: series.since for name, series in self.series().items()}
        return {name: since for name, since in found.items() if since is not None}


MOST_MOMENTS = 200  # the first half and the last
# Attempts of which all is kept; of those between, when they were and how they ended.
WHOLE_FIRST, WHOLE_LAST = 50, 150
_MOST_ENDS = 64
_MOST_WORKERS = 10**7  # above this the record is damaged
_MOST_TEXT = 2000
_START = events.AttemptStartedEvent.name
_WORTH_KNOWING = (
    events.AgentRefusedEvent
    | events.EarlyEndEvent
    | parts.HangEvent
    | parts.HeadReplacedEvent
    | events.LeftRunningEvent
    | parts.NetworkEvent
    | events.NewcomerEvent
    | events.NodeLeftOutEvent
    | events.NodeLostEvent
    | events.SpareLostEvent
    | events.SpareTakenEvent
    | events.NoticeEvent
    | parts.PreflightEvent
    | events.ShrunkEvent
    | parts.StartWaitEvent
    | events.StoppingEvent
    | parts.StragglerEvent
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """The end of a rank that muster had not requested."""

    rank: int
    node: str
    at: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMoment:
    """A noteworthy event as a sentence; `kind` is the event's name."""

    at: float
    kind: str
    text: str


@dataclass(slots=True)
class AttemptRecord:
    """An attempt, as recorded.

    Attributes:
        time: When it began, in ISO 8601; `began` is the same in seconds since 1970.
        start: Its start event.
        ended: None while it runs and, after a lost head, until the next attempt begins.
        workers_at: When all workers had started.
        pids: Process ids of the first ranks.
        failure: Its failure event.
        stop: The sentence about the stop that ended it.
        state: State of the run that ended in it; empty if the run continued.
        ends: The first ranks that ended by themselves; `num_ends` counts all.
        values: Return values by rank; only for the last attempt.
        last_end: When its last rank ended.
    """

    number: int
    time: str
    began: float
    start: events.AttemptStartedEvent
    ended: float | None = None
    workers_at: float | None = None
    pids: tuple[int, ...] = ()
    failure: events.AttemptFailedEvent | None = None
    stop: str = ""
    state: str = ""
    ends: list[RankEnd] = field(default_factory=list)
    num_ends: int = 0
    values: dict[int, ValueNote] = field(default_factory=dict)
    last_end: float | None = None

    @property
    def num_workers(self) -> int | None:
        """Number of workers; None if the record is damaged."""
        count = self.start.world_size
        return count if 0 < count <= _MOST_WORKERS else None

    @property
    def cause(self) -> WorkerEnd | None:
        """The end that explains its failure."""
        return self.failure.cause if self.failure is not None else None

    def shorten(self) -> None:
        """Keep only its times and how it ended."""
        self.start = replace(self.start, nodes=(), spares=None)
        self.ends = []
        if self.failure is not None:
            self.failure = replace(self.failure, cause=None)


@dataclass(slots=True)
class RunRecord:
    """The content of a record's lines so far.

    Attributes:
        started: Time of the first event, as written.
        began, last_at: Times of the earliest and the latest event, in seconds since 1970.
        num_bad: Number of lines that can't be parsed as events.
        num_torn: Number of lines that are not objects, including an unterminated one.
        why_not: Why the record can't be read; empty if it can, or does not exist.
        moments: Noteworthy events, of too many the first half and the last; `num_moments` counts
            all.
        waits: The newest event about a wait, while the run waits.
        has_waited: It has waited for nodes.
        notice: The newest notice event.
        ends_at: When the job's time ends, in seconds since 1970.
        spares: Names of the spare nodes.
        imports_why: Why the workers of a node import for themselves.
        slow: Sentences about slow ranks, by rank.
        masters: Addresses of torch's store.
        result: How the run ended, unless another attempt has begun since.
        code: The code that rank 0 ran, by its last report.
        process: For a sweep member without a head.
    """

    started: str = ""
    began: float | None = None
    last_at: float | None = None
    num_bad: int = 0
    num_torn: int = 0
    why_not: str = ""
    attempts: list[AttemptRecord] = field(default_factory=list)
    moments: list[RecordMoment] = field(default_factory=list)
    num_moments: int = 0
    waits: Stamped | None = None
    has_waited: bool = False
    notice: Stamped | None = None
    ends_at: float | None = None
    spares: list[str] = field(default_factory=list)
    imports_why: str = ""
    slow: dict[int, str] = field(default_factory=dict)
    masters: set[str] = field(default_factory=set)
    network: parts.NetworkEvent | None = None
    preflight: parts.PreflightEvent | None = None
    result: Result | None = None
    code: RanCode | None = None
    process: parts.WorkerProcessEvent | None = None
    _nodes: object = None

    def take(self, line: Mapping[str, Any]) -> None:
        """Add a line of the record."""
        # The nodes make up most of the record, and are usually those of the previous attempt.
        nodes = line.get("nodes") or None
        is_same = nodes is not None and line.get("event") == _START and nodes == self._nodes
        stamped = parse({**line, "nodes": []} if is_same else line)
        if stamped is None:
            self.num_bad += 1
            return
        if isinstance(stamped.event, events.AttemptStartedEvent):
            if is_same:
                same = replace(stamped.event, nodes=self.attempts[-1].start.nodes)
                stamped = replace(stamped, event=same)
            self._nodes = nodes
        at = stamped.at
        self.started = self.started or stamped.time
        self.began = at if self.began is None else min(self.began, at)
        self.last_at = at if self.last_at is None else max(self.last_at, at)
        self._take(stamped, at, stamped.event)
        if isinstance(stamped.event, _WORTH_KNOWING):
            self._note(at, stamped.event)

    def _take(self, stamped: Stamped, at: float, event: RecordEvent) -> None:
        match event:
            case events.AttemptStartedEvent():
                self._start(stamped, event)
            case events.WorkersStartedEvent(attempt=number, pids=pids):
                if (attempt := self._of(number)) is not None:
                    attempt.workers_at, attempt.pids = at, pids
            case events.WorkerEndedEvent() | events.WorkersEndedEvent():
                self._end(at, event)
            case events.AttemptFailedEvent(attempt=number):
                if (attempt := self._of(number)) is not None:
                    attempt.failure, attempt.ended = event, at
            case events.RunEndedEvent(result=result):
                self.result, self.waits = result, None
                if self.attempts:
                    last = self.attempts[-1]
                    last.state = result.state.value if result is not None else ""
                    last.ended = at if last.ended is None else last.ended
            case events.StoppingEvent(text=text) if self.attempts:
                self.attempts[-1].stop = text
            case events.WaitingEvent():
                self.waits, self.has_waited = stamped, True
            case events.WaitingForEndEvent():
                self.waits = stamped
            case events.NoticeEvent():
                self.notice = stamped
            case events.TimeLimitEvent(ends_at=ends_at):
                self.ends_at = ends_at
            case events.SpareJoinedEvent(node=node):
                self.spares.append(node)
            case events.SpareLostEvent(node=node) | events.SpareTakenEvent(node=node):
                self.spares = [name for name in self.spares if name != node]
            case events.ImportsInWorkersEvent(why=why):
                self.imports_why = why
            case parts.StragglerEvent(rank=rank, text=text):
                self.slow[rank] = text
            case parts.NetworkEvent():
                self.network = event
            case parts.PreflightEvent():
                self.preflight = event
            case parts.WorkerProcessEvent():
                self.process = event

    def _of(self, number: int) -> AttemptRecord | None:
        return next((one for one in self.attempts[:-4:-1] if one.number == number), None)

    def _start(self, stamped: Stamped, event: events.AttemptStartedEvent) -> None:
        if self.attempts:
            last = self.attempts[-1]
            if last.ended is None:  # no failure: a stop, a growth, a lost head
                last.ended = last.last_end or stamped.at
            last.values = {}
        if event.spares is not None:
            self.spares = list(event.spares)
        if event.master:
            self.masters.add(event.master)
        self.waits = self.result = None
        self.attempts.append(AttemptRecord(event.attempt, stamped.time, stamped.at, event))
        if len(self.attempts) > WHOLE_FIRST + WHOLE_LAST:
            self.attempts[-WHOLE_LAST - 1].shorten()

    def _end(self, at: float, event: events.WorkerEndedEvent | events.WorkersEndedEvent) -> None:
        attempt = self._of(event.attempt)
        if attempt is None:
            return
        attempt.last_end = at
        if isinstance(event, events.WorkersEndedEvent):
            attempt.num_ends += 0 if event.asked else event.num
            return
        self.code = event.code or self.code
        if event.value is not None:
            attempt.values[event.rank] = event.value
        if event.asked:
            return
        attempt.num_ends += 1
        if len(attempt.ends) < _MOST_ENDS:
            end = RankEnd(rank=event.rank, node=event.node, at=at, what=event.what)
            attempt.ends.append(end)

    def _note(self, at: float, event: RecordEvent) -> None:
        sentence = narrate(event)
        if not sentence:
            return
        one = RecordMoment(at=at, kind=event.name, text=printable(sentence)[:_MOST_TEXT])
        self.num_moments += 1
        if len(self.moments) >= MOST_MOMENTS:
            del self.moments[MOST_MOMENTS // 2]
        self.moments.append(one)

    @property
    def num_workers(self) -> int | None:
        """Number of workers in the last attempt; None before the first one or if damaged."""
        return self.attempts[-1].num_workers if self.attempts else None

    def wait_sentence(self, now: float) -> str:
        """Return a sentence about what the run waits for and how long; empty if it does not wait.

        Args:
            now: Seconds since 1970.
        """
        if self.waits is None:
            return ""
        event = self.waits.event
        if isinstance(event, events.WaitingEvent):
            return event.narration_after(now - self.waits.at)
        return event.narration() or ""

    def with_losses(self, losses: Mapping[str, str]) -> list[AttemptRecord]:
        """Return the attempts; those that lost a pod include the cluster's reason.

        Args:
            losses: Reasons by attempt number, as text.
        """
        found = list(self.attempts)
        for place, attempt in enumerate(found):
            said = losses.get(str(attempt.number))
            if said is None:
                continue
            if attempt.failure is not None:
                what = f"{attempt.failure.what}; {said}"
                found[place] = replace(attempt, failure=replace(attempt.failure, what=what))
            elif place + 1 < len(found):  # a removed pod is not a failure
                following = found[place + 1]
                why = "; ".join(filter(None, (following.start.why, said)))
                found[place + 1] = replace(following, start=replace(following.start, why=why))
        return found

    def ended_by(self, attempts: list[AttemptRecord] | None = None) -> list[str]:
        """Return what ended each attempt, in a few words; empty for the last one if none failed."""
        records = self.attempts if attempts is None else attempts
        found = []
        for attempt, following in zip(records, [*records[1:], None], strict=False):
            if attempt.failure is not None:
                found.append(attempt.failure.what)
            elif following is None:
                found.append("")
            else:  # a node that left is not a failure
                stop, why = attempt.state or "its head was lost", following.start.why
                found.append(why.replace(f"after attempt {attempt.number}", stop, 1))
        return found


def fold_run(lines: Iterable[Mapping[str, Any]]) -> RunRecord:
    """Return the record folded from its lines."""
    record = RunRecord()
    for line in lines:
        record.take(line)
    return record


def frequent_causes(attempts: Iterable[AttemptRecord], most: int) -> list[tuple[str, int]]:
    """Return the causes of failed attempts with their counts, most frequent first."""
    failed = (one.failure for one in attempts if one.failure is not None)
    return Counter(one.what or "a failure" for one in failed).most_common(most)


class RunReader:
    """Folds the record of a run, each line once.

    Attributes:
        record: The fold of the lines read so far.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._tail = RecordTail(run_dir.events)
        self.record = RunRecord()

    def read(self) -> RunRecord:
        """Fold the new lines; return the record."""
        lines, restarted = self._tail.read()
        if restarted:
            self.record = RunRecord()
        for line in lines:
            self.record.take(line)
        self.record.num_torn, self.record.why_not = self._tail.num_torn, self._tail.why_not
        return self.record


def record_of(run_dir: RunDir) -> RunRecord:
    """Return the current record of a run."""
    return RunReader(run_dir).read()


MOST_EPOCHS = MOST_SAVES = 500  # the last ones; their total is counted
_MOST_STARTS, _FIRST_STARTS = 1000, 100
_MOST_REACHED = 500  # per start; beyond it, every second one is dropped


@dataclass(slots=True)
class LibraryStart:
    """A start of the training library in an attempt, at a step.

    Attributes:
        at: The time, in seconds since 1970.
        reached: Steps of its metrics, and when they were reached.
    """

    at: float
    step: int
    last_step: int
    reached: list[tuple[int, float]] = field(default_factory=list)

    def reach(self, step: int, at: float) -> None:
        """Record that its metrics have reached a step."""
        if len(self.reached) >= _MOST_REACHED:
            self.reached = [*self.reached[:-1:2], self.reached[-1]]
        self.reached.append((step, at))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochView:
    """An epoch that has ended, with the evidence of which samples it saw.

    Attributes:
        samples: How many were seen, each exactly once; None if the script did not use our loader.
        lost, twice: How many samples were not seen, and how many were seen again.
        is_whole: Whether these counts cover all samples of the epoch.
    """

    epoch: int
    step: int
    elapsed_s: float | None
    values: dict[str, float]
    samples: int | None
    lost: int
    twice: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A snapshot: how long the loop waited, and when it was complete; None if never recorded."""

    step: int
    at: float | None
    blocked_s: float
    done_at: float | None = None


@dataclass(slots=True)
class TrainingState:
    """The state after the lines so far.

    Attributes:
        step: The newest step that a line names.
        total_steps: Steps of the whole run, over all attempts; None if the library can't know.
        times: Seconds per step.
        starts: Starts of the library, one per attempt; if very many, the first and the last ones.
        steps_before: Steps made in the starts that are left out.
        ended: The last epoch to end in this start; None before.
        saved: The newest complete snapshot: its step, and when it was complete.
        saving: The snapshot that is being written: its step, and since when.
        folder: Folder of the snapshots.
        order: Settings that decide the order of the samples, by name.
        num_bad: Number of lines that are not objects.
    """

    num_events: int = 0
    step: int = 0
    total_steps: int | None = None
    metrics: Metrics = field(default_factory=Metrics)
    times: Series = field(default_factory=Series)
    starts: list[LibraryStart] = field(default_factory=list)
    steps_before: int = 0
    epochs: list[EpochView] = field(default_factory=list)
    num_epochs: int = 0
    ended: int | None = None
    saves: list[Save] = field(default_factory=list)
    num_saves: int = 0
    blocked_s: float = 0.0
    saved: tuple[int, float | None] | None = None
    saving: tuple[int, float | None] | None = None
    folder: str = ""
    order: dict[str, str] = field(default_factory=dict)
    is_finished: bool = False
    num_dropped: int = 0
    num_bad: int = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Apply a line."""
        self.num_events += 1
        name, step, at = event.get("event"), whole(event.get("step")), moment_of(event.get("time"))
        self.num_dropped += whole(event.get("dropped_before")) or 0
        if isinstance(event.get("folder"), str):
            self.folder = event["folder"]
        self.step = self.step if step is None else step
        if name == "resumed":
            self._begin(at, mapped(event.get("order")))
        elif not self.starts and step is not None and at is not None:
            self.starts.append(LibraryStart(at, 0, 0))  # the record's beginning is lost
        if self.starts:
            self.starts[-1].last_step = max(self.starts[-1].last_step, self.step)
        if name == "metrics":
            self._take_metrics(at, mapped(event.get("values")))
        elif name == "planned":
            self.total_steps = whole(event.get("total_steps")) or self.total_steps
        elif name == "save":
            self._take_save(at, number(event.get("blocked_s")) or 0.0)
        elif name == "saved" and (saved := whole(event.get("saved"))) is not None:
            self._take_saved(saved, at)
        elif name == "epoch" and (ended := _epoch(event)) is not None:
            self.ended = ended.epoch
            self._keep_epoch(ended)
        elif name == "finished":
            self.is_finished = True

    def _begin(self, at: float | None, order: Mapping[str, Any]) -> None:
        if at is not None:
            self.starts.append(LibraryStart(at, self.step, self.step))
        if len(self.starts) > _MOST_STARTS:
            left_out = self.starts.pop(_FIRST_STARTS)
            self.steps_before += left_out.last_step - left_out.step
        self.order = {str(name): str(value) for name, value in order.items()} or self.order
        self.ended, self.is_finished = None, False
        self.metrics.go_back(self.step)
        self.times.go_back(self.step)
        self.saving = None  # the unfinished snapshot of the last attempt is lost
        if self.step:  # it began with a snapshot of that step
            self.saved = (self.step, at)

    def _take_metrics(self, at: float | None, values: Mapping[str, Any]) -> None:
        self.metrics.take(self.step, values)
        if at is not None and self.starts:
            start = self.starts[-1]
            before = start.reached[-1] if start.reached else (start.step, start.at)
            if self.step > before[0] and at >= before[1]:
                self.times.add(self.step, (at - before[1]) / (self.step - before[0]))
            start.reach(self.step, at)
        last = self.epochs[-1] if self.epochs else None
        if last is not None and (last.epoch, last.step) == (self.ended, self.step):
            # The epoch's own metrics, though logged after its loop.
            self.epochs[-1] = replace(last, values=with_later(last.values, numbers_in(values)))

    def _keep_epoch(self, ended: EpochView) -> None:
        """Add an epoch; if it was repeated, keep only the last time."""
        others = [one for one in self.epochs if one.epoch != ended.epoch]
        self.num_epochs += len(others) == len(self.epochs)
        self.epochs = [*others[1 - MOST_EPOCHS :], ended]

    def _take_save(self, at: float | None, blocked_s: float) -> None:
        # Else the loop waited for the save, which was already complete.
        if self.saved is None or self.saved[0] != self.step:
            self.saving = (self.step, at)
        self.num_saves += 1
        self.blocked_s += blocked_s
        if self.saves and self.saves[-1].step >= self.step:  # repeated
            self.saves = [one for one in self.saves if one.step != self.step]
        self.saves.append(Save(step=self.step, at=at, blocked_s=blocked_s))
        if len(self.saves) > 2 * MOST_SAVES:
            del self.saves[:MOST_SAVES]

    def _take_saved(self, step: int, at: float | None) -> None:
        self.saved, self.saving = (step, at), None
        for place in range(len(self.saves) - 1, -1, -1):
            if self.saves[place].step == step:
                self.saves[place] = replace(self.saves[place], done_at=at)
                return

    @property
    def ended_last(self) -> int | None:
        """Number of the last epoch that has ended; None before the first."""
        return self.epochs[-1].epoch if self.epochs else None

    @property
    def steps_done(self) -> int:
        """Number of all steps; repeated ones count again."""
        return self.steps_before + sum(start.last_step - start.step for start in self.starts)


def _epoch(event: Mapping[str, Any]) -> EpochView | None:
    epoch, step, ledger = whole(event.get("epoch")), whole(event.get("step")), event.get("ledger")
    if epoch is None or step is None or not isinstance(ledger or {}, dict):
        return None
    return EpochView(
        epoch=epoch,
        step=step,
        elapsed_s=number(event.get("elapsed_s")),
        values=numbers_in(mapped(event.get("values"))),
        samples=whole(mapped(ledger).get("samples")),
        lost=whole(mapped(ledger).get("lost")) or 0,
        twice=whole(mapped(ledger).get("twice")) or 0,
        is_whole=mapped(ledger).get("whole") is not False,
    )
