"""From logs to events, fast: lines that differ in their numbers only are judged once.

Every digit of a block becomes 0; a line whose shape is known to mean nothing costs one look into a table.
"""

import os
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogLine, Who
from torchmuster.diagnose.explain.reading import boxes, json_lines, patterns, prefix
from torchmuster.diagnose.explain.reading.crashes import CrashReader
from torchmuster.diagnose.explain.reading.ends import LogSource, Notes
from torchmuster.diagnose.explain.reading.levels import level_named
from torchmuster.diagnose.explain.reading.shapes import (
    MAX_EVENTS_OF_A_SHAPE,
    MAX_PROGRESS_BYTES,
    Shape,
    ShapeTable,
)
from torchmuster.diagnose.explain.reading.tracebacks import TracebackReader

MAX_EVENTS = 50_000
MAX_FRAME_LINES = 20_000  # first and last lines of all logs; of further logs few are kept
_MAX_KNOWN = 64
_MAX_KNOWN_OF_ONE = 2  # in a log whose name says which rank has written it
_RAISES = ("Error", "Exception", "Exit", "Warning")  # before the colon of an exception's last line
_HEADER_LINES = 200
_LAST_LINES = 30
_FEW_LINES = 10
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_RANK_FILE = re.compile(r"(?:^|[/_.-])rank[-_]?(\d+)\b", re.IGNORECASE)
_TASK_FILE = re.compile(
    r"attempt_\d+/(\d+)/std(?:err|out)\.log$|[-_.](\d{1,5})_(\d{1,5})\.(?:out|err|log)$"
)
_HOST_FILE = re.compile(
    r"(?:^|/)(?:(?:log|out|err|stdout|stderr|node|slurm|agent)s?[-_.])?"
    r"(?P<host>[A-Za-z][A-Za-z0-9]*[-A-Za-z0-9]*?\d+[A-Za-z0-9-]*(?:\.[A-Za-z][\w.-]*?)?)"
    r"(?:[-_.](?:log|out|err|stdout|stderr|txt))*$"
)
_SURELY_A_HOST = re.compile(r"(?:[a-z]{1,12}-?\d{1,6}|ip(?:-\d+){4})$")
_ENDING = re.compile(r"(?:[-_.](?:log|out|err|stdout|stderr|txt|gz|tar|tgz|zst))+$", re.IGNORECASE)
_NO_HOST_FILE = re.compile(
    r"^(?:rank|attempt|slurm|job|log|out|err|std|part|epoch|run|train|e|o)[-_]?\d+", re.IGNORECASE
)


@dataclass(slots=True)
class Log:
    """What is known of one source when it has been read.

    Attributes:
        last: Its last lines, newest last.
        last_progress: How far each writer got.
    """

    path: str
    who: Who
    num_lines: int = 0
    num_bytes: int = 0
    header: list[LogLine] = field(default_factory=list)
    last: list[LogLine] = field(default_factory=list)
    last_progress: dict[Who, LogEvent] = field(default_factory=dict)


@dataclass(slots=True)
class LogRecord:
    """Everything that the logs say."""

    events: list[LogEvent] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    num_lines: int = 0


def read_sources(
    sources: Iterable[LogSource], *, year: int, notes: Notes | None = None
) -> LogRecord:
    """Return the events of logs that are open."""
    record = LogRecord(notes=notes or Notes())
    scanner = _Scanner(record, year)
    for source in sources:
        scanner.read(source)
    if len(record.logs) == 1:
        _forget_host_of_name(record)
    return record


def _forget_host_of_name(record: LogRecord) -> None:
    """Take the name of a single file for no host's, unless it looks like one or the log has it: it need tell nothing apart."""
    log = record.logs[0]
    host = log.who.host
    said = (line.text for line in (*log.header, *log.last))
    if host is None or _SURELY_A_HOST.match(host) or any(host in text for text in said):
        return

    def without(line: LogLine) -> LogLine:
        return replace(line, who=replace(line.who, host=None)) if line.who.host == host else line

    log.who = replace(log.who, host=None)
    log.header, log.last = [*map(without, log.header)], [*map(without, log.last)]
    record.events = [replace(event, line=without(event.line)) for event in record.events]
    steps = (replace(event, line=without(event.line)) for event in log.last_progress.values())
    log.last_progress = {step.line.who: step for step in steps}


def who_of_path(path: str) -> Who:
    """Return who wrote a log, by its name: `rank-3.log`, `n1.log`, `attempt_0/3/stderr.log`."""
    name = os.path.basename(path)
    rank = _RANK_FILE.search(path)
    if rank is not None:
        return Who(rank=int(rank[1]))
    task = _TASK_FILE.search(path)
    if task is not None and task[1]:
        return Who(task=int(task[1]))
    host = _HOST_FILE.search(_ENDING.sub("", name))
    if host is not None and not _NO_HOST_FILE.match(host["host"]):
        return Who(host=host["host"])
    return Who()


class _Place(NamedTuple):
    """Where a line of a log is. What ends with a carriage return is read by itself, but is a part of a line.

    Attributes:
        order: Counted by all ends, for what stands before what.
        number: Counted as editors do, by newlines only.
        goes_on: The next one is a part of the same line.
    """

    order: int
    number: int
    goes_on: bool = False


class _Scanner:
    """Reads one source after the other; what it learns of one serves for all."""

    def __init__(self, record: LogRecord, year: int) -> None:
        self.record = record
        self.year = year
        self.words = patterns.WordFilter()
        self.table = ShapeTable()
        self.num_frame_lines = 0
        self.num_read = 0  # lines and parts of lines
        self.thrown: dict[Who, str] = {}

    def read(self, source: LogSource) -> None:
        """Read a log to its end."""
        self.log = Log(path=source.path, who=who_of_path(source.path), num_lines=source.num_before)
        self.tracebacks = TracebackReader()
        self.crashes = CrashReader()
        self.rows = boxes.RowReader()
        self.order = self.num_read
        self.at = _Place(source.num_before, source.num_before)
        is_full = self.num_frame_lines > MAX_FRAME_LINES
        self.header_lines = _FEW_LINES if is_full else _HEADER_LINES
        last_block = b""
        first = self.at
        for block in source.blocks:
            first = self.at
            self._take_block(block)
            last_block = block
        self._judge_rows()
        self._close_tracebacks()
        self._keep_progress()
        self._keep_last(last_block, first, _FEW_LINES if is_full else _LAST_LINES)
        self.table.end_log()
        self.num_frame_lines += len(self.log.header) + len(self.log.last)
        self.record.logs.append(self.log)
        self.record.num_lines += self.log.num_lines
        self.num_read += self.at.order

    def _take_block(self, block: bytes) -> None:
        table = self.table
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        kinds = block.translate(_DIGITS).split(b"\n")
        (order, number, goes_on), header_lines = self.at, self.header_lines
        has_parts = b"\r" in block
        is_open = self._is_following
        for raw, shape in zip(lines, kinds, strict=False):
            order += 1
            number += not goes_on
            goes_on = has_parts and raw.endswith(b"\r")
            if goes_on:
                raw, shape = raw[:-1], shape[:-1]  # noqa: PLW2901
            state = table.known.get(shape)
            if state is not None and order > header_lines and not is_open:
                if not state.is_meaningful:
                    continue
                if state.progress is not None:
                    state.progress.append((order, number, raw[:MAX_PROGRESS_BYTES]))
                    continue
            self._take_line(raw, shape, state, _Place(order, number))
            is_open = self._is_following
        self.at = _Place(order, number, goes_on)
        self.log.num_lines = number
        self.log.num_bytes += len(block)

    @property
    def _is_following(self) -> bool:
        """Say whether the next line may belong to what lines before it have begun."""
        return self.tracebacks.is_open or self.crashes.is_open or self.rows.is_open

    def _take_line(self, raw: bytes, shape: bytes, state: Shape | None, place: _Place) -> None:
        if b'{"' in raw and len(parts := json_lines.lines_of(raw)) > 1:
            for part in parts:
                shape = part.translate(_DIGITS)
                self._take_line(part, shape, self.table.known.get(shape), place)
            return
        line: LogLine | None = None
        if place.order <= self.header_lines:
            line = self._line(raw, place)
            self.log.header.append(line)
        if self.rows.is_open:
            line = line or self._line(raw, place)
            if self.rows.takes(line):
                return
            self._judge_rows()
        if self.crashes.is_open:
            line = line or self._line(raw, place)
            if self.crashes.takes(line):
                return
        if self.tracebacks.is_open:
            line = line or self._line(raw, place)
            if place.order % 1024 == 0:
                self.tracebacks.forget(line.order)
            if self._takes_traceback(line):
                return
        if state is None:
            may = self._may_mean_something(raw, shape)
            state = self.table.learn(shape, is_meaningful=may)
        if state.is_progress:
            self.table.keep_progress(state, place.order, place.number, raw)
        elif state.is_meaningful and state.num_taken <= MAX_EVENTS_OF_A_SHAPE:
            self._judge(line or self._line(raw, place), state, raw)

    def _may_mean_something(self, raw: bytes, shape: bytes) -> bool:
        if self.words.is_harmless(shape):
            return False
        return patterns.may_mean_something(prefix.clean(raw))

    def _takes_traceback(self, line: LogLine) -> bool:
        """Say whether a line belongs to a traceback, and so means nothing else."""
        if self.tracebacks.holds(line):
            list(self.tracebacks.take(line))
            return True
        ended = list(self.tracebacks.take(line))
        for event in ended:
            self._add(event)
        for event in self.tracebacks.superseded:
            if event in self.record.events[-64:]:
                self.record.events.remove(event)
        self.tracebacks.superseded.clear()
        return bool(ended)

    def _judge_rows(self) -> None:
        for line in self.rows.close():
            found = patterns.match(line.text) or patterns.SAID_TO_BE_AN_ERROR
            self._add(LogEvent(kind=found.kind, role=found.role, line=line, fields=found.fields))

    def _judge(self, line: LogLine, state: Shape, raw: bytes) -> None:
        if self.tracebacks.opens(line) or self.tracebacks.announces(line):
            return
        if self.rows.begins(line):
            return
        thrown = self.tracebacks.take_what(line, self.thrown.get(line.who, ""))
        if thrown is not None:
            self.thrown.pop(line.who, None)
            self._add(thrown)
            return
        found = patterns.match(line.text, is_raised=line.text.partition(":")[0].endswith(_RAISES))
        if found is None and line.level == "error":
            found = patterns.SAID_TO_BE_AN_ERROR
        if found is None:
            state.miss()
            return
        if found.kind == "progress":
            state.is_progress = True
            self.table.keep_progress(state, line.order - self.order, line.number, raw)
            return
        self.table.take(state)
        if (
            found.kind == "fatal_python"
            and "type" in found.fields
            and len(self.thrown) < _MAX_KNOWN
        ):
            self.thrown[line.who] = found.fields["type"]  # its message stands in the next line
        event = LogEvent(kind=found.kind, role=found.role, line=line, fields=found.fields)
        self.crashes.begin(event)
        self._add(event)

    def _keep_progress(self) -> None:
        """Note how far each writer got, from the last lines of each shape."""
        most_known = _MAX_KNOWN if self.log.who.rank is None else _MAX_KNOWN_OF_ONE
        for lines in self.table.progress():
            seen: set[Who] = set()
            num_known = 0
            for order, number, raw in reversed(lines):
                line = self._line(raw, _Place(order, number))
                if line.who in seen:
                    num_known += 1
                    if num_known > most_known:
                        break  # all that write such lines have been met
                    continue
                seen.add(line.who)
                self._note_progress(line)

    def _note_progress(self, line: LogLine) -> None:
        found = patterns.PROGRESS.find(line.text)
        known = self.log.last_progress.get(line.who)
        if found is not None and (known is None or known.line.order < line.order):
            fields = patterns.fields_of(found)
            event = LogEvent(kind="progress", role=LineRole.CONTEXT, line=line, fields=fields)
            self.log.last_progress[line.who] = event

    def _line(self, raw: bytes, place: _Place) -> LogLine:
        said = self._said(raw)
        return LogLine(
            path=self.log.path,
            number=place.number,
            text=said.text,
            order=self.order + place.order,
            who=said.who.known(self.log.who),
            when=said.when,
            level=said.level,
        )

    def _said(self, raw: bytes) -> prefix.SplitLine:
        found, begin = None, -1
        if b'{"' in raw:
            begin = json_lines.begin_of(raw)
            found = json_lines.read(raw[begin:]) if begin >= 0 else None
        if found is None:
            said = prefix.split(prefix.clean(raw), self.year)
            if boxes.is_drawn(said.text):
                return said._replace(text=boxes.undrawn(said.text))
            return said
        label = prefix.split(f"{prefix.clean(raw[:begin])} -", self.year)
        inner = prefix.split(prefix.clean(found.message.encode()), self.year)
        when = found.when
        if isinstance(when, str):
            when = prefix.seconds_of(when, self.year)
        return prefix.SplitLine(
            inner.text,
            inner.who.known(found.who).known(label.who),
            next((time for time in (when, inner.when, label.when) if time is not None), None),
            level_named(found.level) or inner.level,
        )

    def _add(self, event: LogEvent) -> None:
        if len(self.record.events) < MAX_EVENTS:
            self.record.events.append(event)

    def _close_tracebacks(self) -> None:
        for event in self.tracebacks.close():
            self._add(event)

    def _keep_last(self, block: bytes, first: _Place, most: int) -> None:
        raw_lines = block.split(b"\n")
        if raw_lines and not raw_lines[-1]:
            raw_lines.pop()
        placed: deque[tuple[_Place, bytes]] = deque(maxlen=most)
        place = first
        for raw in raw_lines:
            number = place.number + (not place.goes_on)
            place = _Place(place.order + 1, number, raw.endswith(b"\r"))
            placed.append((place, raw))
        parts = ((place, part) for place, raw in placed for part in json_lines.lines_of(raw))
        self.log.last = [self._line(raw, place) for place, raw in parts if raw.strip()][-most:]
