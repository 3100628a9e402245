"""Turns logs into events, fast: lines that differ only in their numbers are judged once.

Every digit of a block becomes 0; a line whose shape is known to mean nothing costs one look-up in a
table.
"""

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogLine, Who
from torchmuster.diagnose.explain.reading import json_lines, patterns, prefix
from torchmuster.diagnose.explain.reading.ends import LogSource, Notes
from torchmuster.diagnose.explain.reading.prefix import level_named
from torchmuster.diagnose.explain.reading.tracebacks import TracebackReader

# Tracebacks and messages in boxes that rich draws: read as if Python had printed them. Source: rich
# 13 to 15, `traceback.py` and `panel.py`: a title, one line `FILE:LINE in FUNCTION` for each frame,
# its code with numbers.


_TITLE = re.compile(r"^(?P<left> *)[╭┌][─━]+ (?P<title>.+?) [─━]+[╮┐]?")
_BOTTOM = re.compile(r"^ *[╰└][─━]*[╯┘]?$")
_SIDE = re.compile(r"^(?P<left> *)[│┃] ?(?P<text>.*?)\s*[│┃]?$")
_FRAME = re.compile(r"^(?P<file>[^\s:]\S*):(?P<line>\d+)(?: in ?(?P<function>\S.*)?)?$")
_CODE = re.compile(r"^(?:(?P<mark>❱) +|  +)\d+ (?:[│ ] ?)?(?P<code>.*)$")
# A row of rich's logging: level, text, place; text that did not fit is in the rows below, indented
# as far.
_ROW = re.compile(
    r"^ *(?P<level>WARNING|ERROR|CRITICAL) +(?P<text>\S.*?) {2,}\S+\.py:\d+$|^ *(?P<level2>WARNING|ERROR|CRITICAL) +(?P<text2>\S.*?) \S+\.py:\d+$"
)
_BELOW = re.compile(r"^ {20,}(?P<text>\S.*)$")
_MAX_ROWS = 40
_EDGES = ("╭", "╰", "│", "┌", "└")
_IS_TRACEBACK = "Traceback (most recent call last)"


def is_drawn(text: str) -> bool:
    """Return whether a line may be part of a box."""
    return "─" in text or "│" in text or "┃" in text


def undrawn(text: str) -> str:
    """Return a line without its box.

    The title of a traceback keeps its width, at which its message will be wrapped.
    """
    title = _TITLE.match(text)
    if title is not None:
        plain = f"{title['left']}{title['title']}"
        return f"{plain}:".ljust(len(text)) if title["title"] == _IS_TRACEBACK else plain
    if _BOTTOM.match(text):
        return ""
    side = _SIDE.match(text)
    if side is None:
        return text
    left, inner = side["left"], side["text"].rstrip("│┃ ")
    frame = _FRAME.match(inner)
    if frame is not None:
        return (
            f'{left}  File "{frame["file"]}", line {frame["line"]}, in {frame["function"] or "?"}'
        )
    code = _CODE.match(inner)
    if code is not None:
        return f"{left}    {code['code'].strip()}" if code["mark"] else ""
    is_nested = inner.lstrip().startswith(_EDGES)  # the values of variables
    return f"{left}{inner}" if inner and not is_nested else ""


class RowReader:
    """Joins the rows of rich's logging: an error's important words are often in a later row."""

    def __init__(self) -> None:
        self._line: LogLine | None = None
        self._parts: list[str] = []

    @property
    def is_open(self) -> bool:
        """Return whether further rows may follow."""
        return self._line is not None

    def begins(self, line: LogLine) -> bool:
        """Begin a message if a line is the first row of a warning or error; return whether so."""
        row = _ROW.match(line.text)
        if row is None:
            return False
        level = level_named(row["level"] or row["level2"])
        self._line, self._parts = replace(line, level=level), [row["text"] or row["text2"]]
        return True

    def takes(self, line: LogLine) -> bool:
        """Add a line if it is a further row and no traceback; return whether more may follow."""
        row = _BELOW.match(line.text)
        if row is None or _ROW.match(line.text) or "Traceback (most" in line.text:
            return False
        self._parts.append(row["text"].strip())
        return len(self._parts) < _MAX_ROWS

    def close(self) -> Iterator[LogLine]:
        """Yield the message as one line, if there is one."""
        if self._line is not None:
            width = max(map(len, self._parts))
            text = "".join(
                part if " " not in part and len(part) == width else f"{part} "
                for part in self._parts
            )
            line, self._line = self._line, None
            yield replace(line, text=text.strip())


# Reports of crashes in native code: the library, function and Python line in which the process was.
# UCX, Open MPI, glibc, Ray and Python's faulthandler each draw the stack in their own way; the
# frame nearest to the crash that belongs neither to the C library nor to the interpreter tells whom
# to ask.


_MAX_FRAMES = 120
_MAX_ODD_LINES = 4  # titles, blank lines, lines of others
_MAX_OPEN = 64
_ADDRESS = r"\[?0x[0-9a-fA-F]+\]?"
_NATIVE = (
    # UCX, Open MPI, glibc: ` 3  /lib/libx.so(name+0x1b) [0x7f..]`,
    # `[ 1] /lib/libx.so(name+0x1b)[0x7f..]`
    re.compile(
        r"^(?:\[? ?\d+\]? +)?(?P<path>/[^\s()]+)\((?P<symbol>[^()+]*)(?:\+0x[0-9a-f]+)?\) ?"
        + _ADDRESS
    ),
    # UCX with debug symbols: ` 1 0x000000000003c2d1 uct_progress()  ???:0`
    re.compile(r"^ ?\d+ +0x[0-9a-f]+ (?P<symbol>[\w:~<>, ]+)\(.*\) +\S*:\d+$"),
    # c10: `frame #5: name + 0x10 (0x7f.. in /lib/libx.so)`
    re.compile(r"^frame #\d+: (?P<symbol>.+?) \+ 0x[0-9a-f]+ \(0x[0-9a-f]+ in (?P<path>[^)]+)\)"),
    # Abseil, as Ray has it: `PC: @  0x7f..  (unknown)  name`
    re.compile(r"^(?:PC: )? *@ +0x[0-9a-f]+ +(?:\(unknown\)|\d+) +(?P<symbol>\S.*)$"),
)
_OF_OPEN_MPI = re.compile(r"^\[[\w.-]+:\d+\] ")  # where the host's name does not look like one
_PYTHON = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_CRASHES_TITLE = re.compile(
    r"^(?:=+ ?backtrace|Current thread|Stack \(most recent|C stack trace|Stack trace|Signal(?: code)?:|Failing at address|\*\*\*"
    r"|Exception raised from|$)"
)
_OTHER_THREAD = re.compile(r"^Thread 0x")
_ENDS = re.compile(r"^(?:=+$|\*\*\* End of error message|Extension modules:)")
# The handlers that draw the report, the C library, the interpreter, and functions that only pass on
# a call.
_SAYS_NOTHING = re.compile(
    r"^(?:libc|libpthread|libm|libdl|ld-linux[\w-]*|libgcc_s|libstdc\+\+|libucs|libffi|libpython[\d.]*\w?|python[\d.]*|_ctypes\S*"
    r"|libasan|linux-vdso)(?:[.-]|$)"
)
_HANDLERS = re.compile(
    r"^(?:\(unknown\)|__|_?start\b|ucs_|abort$|raise$|gsignal|opal_|show_stackframe|Py|_Py|ffi_|c10::get_backtrace"
    r"|c10::detail::|c10::Error::|ray::|absl::|main$)"
)
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib/python\d[\w.]*)/|^<frozen")


@dataclass(slots=True)
class _Report:
    fields: dict[str, str]  # of the event that the report belongs to
    is_other_thread: bool = False
    num_lines: int = 0
    num_odd: int = 0
    files: list[re.Match[str]] = field(default_factory=list)


class CrashReader:
    """Follows the report below each crash message, and adds the place of the crash to its event."""

    def __init__(self) -> None:
        self._open: dict[Who, _Report] = {}

    @property
    def is_open(self) -> bool:
        """Return whether lines of a report may follow."""
        return bool(self._open)

    def begin(self, event: LogEvent) -> None:
        """Follow the lines below an event, if it is one that a report follows."""
        if event.kind not in ("signal_received", "fatal_python") or event.get("type"):
            return
        if isinstance(event.fields, dict) and len(self._open) < _MAX_OPEN:
            known = self._open.get(event.who)
            # Open MPI and UCX may both report one crash: the first report is that of the crash
            # itself.
            if known is None or not known.num_lines:
                self._open[event.who] = _Report(event.fields)

    def takes(self, line: LogLine) -> bool:
        """Handle a line; return whether it is part of a report, and so means nothing else."""
        report = self._open.get(line.who)
        if report is None:
            return False
        text = _OF_OPEN_MPI.sub("", line.text)
        if _ENDS.match(text) or report.num_lines >= _MAX_FRAMES:
            del self._open[line.who]
            return False
        if (python := _PYTHON.match(text)) is not None:
            if not report.is_other_thread:
                _add_python(report, python)
        elif (native := _native(text)) is not None:
            _add_native(report.fields, native)
        elif _OTHER_THREAD.match(text):
            report.is_other_thread = True
            return True
        else:
            if text.startswith("Current thread"):
                report.is_other_thread = False
            if not _CRASHES_TITLE.match(text):
                report.num_odd += 1
            if report.num_odd > _MAX_ODD_LINES:
                del self._open[line.who]
            return False
        report.num_lines += 1
        return True


def _native(text: str) -> re.Match[str] | None:
    return next((found for form in _NATIVE if (found := form.match(text)) is not None), None)


def _add_native(fields: dict[str, str], frame: re.Match[str]) -> None:
    """Keep the first frame that tells something: it is the nearest to the crash."""
    symbol = frame["symbol"].strip()
    path = frame.groupdict().get("path") or ""
    library = path.rpartition("/")[2]
    says = not _SAYS_NOTHING.match(library) if library else not _HANDLERS.match(symbol)
    if says and not fields.get("crash_library") and not fields.get("crash_symbol"):
        fields["crash_library"] = library
        fields["crash_symbol"] = "" if _HANDLERS.match(symbol) else symbol


def _add_python(report: _Report, frame: re.Match[str]) -> None:
    """Keep the innermost line of the user's own code, else the innermost."""
    is_own = _LIBRARY.search(frame["file"]) is None
    if not report.files or (is_own and not report.fields.get("own")):
        report.fields["where"] = f"{frame['file']}:{frame['line']}"
        report.fields["own"] = "1" if is_own else ""
    if not report.files and not is_own:
        report.fields["crash_call"] = f"{frame['function']} of {_package(frame['file'])}"
    report.files.append(frame)


def _package(file: str) -> str:
    found = re.search(r"/(?:site|dist)-packages/(\w+)", file)
    return found[1] if found is not None else "Python"


# What lines that differ only in their numbers are worth, learnt once for all logs, in bounded
# memory. The shape of a line is the line with every digit replaced by 0. Most lines of a training
# log have a shape that means nothing.


MAX_EVENTS_OF_A_SHAPE = (
    1024  # of one source; of progress lines only this many last ones are examined
)
MAX_MISSES = 64  # after these, lines of this shape mean nothing, whatever their numbers
_MAX_SHAPES = 200_000
_MAX_TABLE_BYTES = 48 << 20
_MAX_SHAPE_BYTES = 4096
MAX_PROGRESS_BYTES = 1000  # of a progress line: the number is near its beginning
_DEEP_SHAPES = 64  # this many shapes of progress keep many lines, others few
_MAX_PROGRESS_SHAPES = 2048
_FEW_LINES = 64


@dataclass(slots=True)
class Shape:
    """What is known about lines that differ only in their numbers.

    Attributes:
        num_taken: How many became events in this log.
        num_missed: How many meant nothing after all, in all logs.
        progress: The last lines of this log, if they show progress: place, number and text.
    """

    is_meaningful: bool
    was_taken: bool = False
    num_taken: int = 0
    num_missed: int = 0
    is_progress: bool = False
    progress: deque[tuple[int, int, bytes]] | None = None

    def miss(self) -> None:
        """Record that a line meant nothing after all."""
        self.num_missed += 1
        self.is_meaningful = self.was_taken or self.num_missed < MAX_MISSES


@dataclass(slots=True)
class ShapeTable:
    """All known shapes, of all logs.

    Attributes:
        known: By the bytes of a shape; a scanner reads it directly, for speed.
    """

    known: dict[bytes, Shape] = field(default_factory=dict)
    _touched: list[Shape] = field(default_factory=list)
    _num_bytes: int = 0
    _num_progress: int = 0

    def learn(self, shape: bytes, *, is_meaningful: bool) -> Shape:
        """Return a new shape; keep it unless it is very long."""
        state = Shape(is_meaningful)
        if len(shape) > _MAX_SHAPE_BYTES:
            return state
        if len(self.known) >= _MAX_SHAPES or self._num_bytes > _MAX_TABLE_BYTES:
            self._forget()
        self.known[shape] = state
        self._num_bytes += len(shape)
        return state

    def take(self, state: Shape) -> None:
        """Record that a line became an event."""
        if state.num_taken == 0:
            self._touched.append(state)
        state.num_taken += 1
        state.was_taken = True

    def keep_progress(self, state: Shape, order: int, number: int, raw: bytes) -> None:
        """Keep a progress line; the oldest of its shape goes."""
        if state.progress is None:
            if self._num_progress >= _MAX_PROGRESS_SHAPES:
                return
            deep = self._num_progress < _DEEP_SHAPES
            state.progress = deque(maxlen=MAX_EVENTS_OF_A_SHAPE if deep else _FEW_LINES)
            self._num_progress += 1
            self._touched.append(state)
        state.progress.append((order, number, raw[:MAX_PROGRESS_BYTES]))

    def progress(self) -> Iterator[deque[tuple[int, int, bytes]]]:
        """Yield the last progress lines of this log, for each shape."""
        for state in self._touched:
            if state.progress is not None:
                yield state.progress

    def end_log(self) -> None:
        """Forget what belongs to one log only."""
        for state in self._touched:
            state.num_taken = 0
            state.progress = None
        self._touched.clear()
        self._num_progress = 0

    def _forget(self) -> None:
        """Start again, except for what this log needs: frequent lines are soon known again."""
        needed = {id(state) for state in self._touched}
        self.known = {shape: state for shape, state in self.known.items() if id(state) in needed}
        self._num_bytes = sum(map(len, self.known))


MAX_EVENTS = 50_000
MAX_FRAME_LINES = 20_000  # first and last lines of all logs; of further logs few are kept
_MAX_KNOWN = 64
_MAX_KNOWN_OF_ONE = 2  # in a log whose name says which rank has written it
_RAISES = ("Error", "Exception", "Exit", "Warning")  # before the colon of an exception's last line
_HEADER_LINES = 200
_LAST_LINES = 30
_SCAN_FEW_LINES = 10
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
    r"^(?:rank|attempt|slurm|job|log|out|err|std|stacks|part|epoch|run|train|e|o)[-_]?\d+",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Log:
    """What is known about one source after it has been read.

    Attributes:
        last: Its last lines, newest last.
        last_progress: The last progress of each writer.
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
    """Everything that was read from the logs."""

    events: list[LogEvent] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    num_lines: int = 0


def read_sources(
    sources: Iterable[LogSource], *, year: int, notes: Notes | None = None
) -> LogRecord:
    """Read open logs and return their events."""
    record = LogRecord(notes=notes or Notes())
    scanner = _Scanner(record, year)
    for source in sources:
        scanner.read(source)
    if len(record.logs) == 1:
        _forget_host_of_name(record)
    return record


def _forget_host_of_name(record: LogRecord) -> None:
    """Drop the host from a single file's name, unless it looks like one or the log mentions it."""
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
    """Return the writer of a log by its name: `rank-3.log`, `n1.log`, `attempt_0/3/stderr.log`."""
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
    """The place of a line in a log; a part that ends with a carriage return is read separately.

    Attributes:
        order: Counts lines and parts, to tell what comes first.
        number: Counts newlines only, as editors do.
        goes_on: The next part belongs to the same line.
    """

    order: int
    number: int
    goes_on: bool = False


class _Scanner:
    """Reads one source after the other; what it learns from one serves for all."""

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
        self.rows = RowReader()
        self.order = self.num_read
        self.at = _Place(source.num_before, source.num_before)
        is_full = self.num_frame_lines > MAX_FRAME_LINES
        self.header_lines = _SCAN_FEW_LINES if is_full else _HEADER_LINES
        last_block = b""
        first = self.at
        for block in source.blocks:
            first = self.at
            self._read_block(block)
            last_block = block
        self._judge_rows()
        self._close_tracebacks()
        self._keep_progress()
        self._keep_last(last_block, first, _SCAN_FEW_LINES if is_full else _LAST_LINES)
        self.table.end_log()
        self.num_frame_lines += len(self.log.header) + len(self.log.last)
        self.record.logs.append(self.log)
        self.record.num_lines += self.log.num_lines
        self.num_read += self.at.order

    def _read_block(self, block: bytes) -> None:
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
        """Return whether the next line may belong to something that earlier lines have begun."""
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
            if self._handle_traceback(line):
                return
        if state is None:
            may = self._may_mean_something(raw, shape)
            state = self.table.learn(shape, is_meaningful=may)
        if state.is_progress:
            self.table.keep_progress(state, place.order, place.number, raw)
        elif state.is_meaningful and state.num_taken <= MAX_EVENTS_OF_A_SHAPE:
            self._judge(line or self._line(raw, place), state, raw)

    def _may_mean_something(self, raw: bytes, shape: bytes) -> bool:
        if self.words.has_no_meaning(shape):
            return False
        return patterns.may_mean_something(prefix.clean(raw))

    def _handle_traceback(self, line: LogLine) -> bool:
        """Handle a line of a traceback; return whether it is one, and so means nothing else."""
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
            found = patterns.match(line.text) or patterns.LOGGED_AS_ERROR
            self._add(LogEvent(kind=found.kind, role=found.role, line=line, fields=found.fields))

    def _judge(self, line: LogLine, state: Shape, raw: bytes) -> None:
        if self.tracebacks.begin_if_start(line) or self.tracebacks.record_announcement(line):
            return
        if self.rows.begins(line):
            return
        thrown = self.tracebacks.read_cpp_exception(line, self.thrown.get(line.who, ""))
        if thrown is not None:
            self.thrown.pop(line.who, None)
            self._add(thrown)
            return
        found = patterns.match(line.text, is_raised=line.text.partition(":")[0].endswith(_RAISES))
        if found is None and line.level == "error":
            found = patterns.LOGGED_AS_ERROR
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
            self.thrown[line.who] = found.fields["type"]  # its message is in the next line
        event = LogEvent(kind=found.kind, role=found.role, line=line, fields=found.fields)
        self.crashes.begin(event)
        self._add(event)

    def _keep_progress(self) -> None:
        """Record the progress of each writer, from the last lines of each shape."""
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
            if is_drawn(said.text):
                return said._replace(text=undrawn(said.text))
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
