"""Merges the output of many ranks on one terminal: complete lines, with a prefix once several ranks print.

While a single rank prints, its text passes unchanged, including unfinished lines and carriage returns, so a
progress bar moves and a debugger's prompt appears. From the first text of a second rank on, every line
has a prefix with its rank, and lines are not mixed: an unfinished line waits a moment for its end (`HALF_LINE_S`),
is then shown as it is, and is shown again with its end if another rank has printed in between.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torchmuster.model.display.text import few_of
from torchmuster.model.network import significant
from torchmuster.model.record import events
from torchmuster.model.record.events import RecordEvent
from torchmuster.model.verdict import Report, Result

# Remembers what a terminal has shown, so that a traceback appears once, however many ranks and attempts raise it.
#
# The same traceback is the same frames and the same type of exception; its last line, which may differ, is always shown.
# Repetitions by one rank within an attempt, e.g. logged exceptions, are not removed. Logs keep everything.


_HEADER = "Traceback (most recent call last):"
_FIRST = re.compile(rf'{re.escape(_HEADER)}$|  File ".*", line \d+$')  # the second: SyntaxError
_BETWEEN = (
    "",
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's own hook puts it before each line
_MAX_KNOWN, _MAX_LINES = 256, 500
_LEAST_LINES, _MAX_LAST_LINES = 4, 6

_Block = tuple[str, ...]  # the frames, and the type of the exception


@dataclass(slots=True)
class _Stream:
    """The state of one stream of one rank."""

    is_within: bool = False  # a line, some of which has been passed on
    line: str = ""  # as much of a line as has come, while lines are looked at
    block: list[str] | None = None  # the traceback that it is in
    held: list[str] = field(default_factory=list)  # what may turn out to be a repetition
    holds: bool = False


@dataclass(slots=True)
class Shown:
    """Follows the output that goes to a terminal."""

    ranks: set[int] = field(default_factory=set)
    _known: dict[_Block, set[int]] = field(default_factory=dict)  # who raised it in this attempt
    _streams: dict[tuple[int, int], _Stream] = field(default_factory=dict)

    def begin_attempt(self) -> None:
        """Forget which rank raised what: in a new attempt every repetition counts."""
        for ranks in self._known.values():
            ranks.clear()

    def filter(self, rank: int, stream: int, text: str) -> str:
        """Return the part of a text to show; a repeated traceback becomes one line."""
        self.ranks.add(rank)
        state = self._streams.setdefault((rank, stream), _Stream())
        if state.block is None and not state.holds and "\n" not in text:
            state.is_within = True
            return text
        return "".join(
            part
            for piece in text.splitlines(keepends=True)
            for part in self._take(rank, state, piece)
        )

    def rest(self) -> list[tuple[int, int, str]]:
        """Return the unfinished text that was held back: (rank, stream, text)."""
        held = [
            (*key, "".join([*state.held, state.line]))
            for key, state in self._streams.items()
            if state.holds
        ]
        self._streams.clear()
        return [entry for entry in held if entry[2].strip()]

    def has(self, traceback: str) -> bool:
        """Return whether the terminal shows this traceback."""
        block = _last_block(traceback)
        return block is not None and block in self._known

    def note(self, traceback: str) -> None:
        """Note a traceback that was printed in a message."""
        block = _last_block(traceback)
        if block is not None:
            self._known.setdefault(block, set())

    def _take(self, rank: int, state: _Stream, piece: str) -> list[str]:
        ends = piece.endswith("\n")
        looks = state.holds or state.block is not None or (ends and not state.is_within)
        if not looks:
            state.is_within = not ends
            return [piece]
        now = [] if state.holds else [piece]
        state.line += piece
        if not ends:
            return now
        line, state.line = state.line, ""
        after = self._line(rank, state, line)
        return after if not now else now if after == [line] else after

    def _line(self, rank: int, state: _Stream, line: str) -> list[str]:
        """Return the text to show now that this line is complete."""
        bare = _bare(line)
        if state.block is None:
            return self._outside(state, line, bare)
        if bare[:1] in (" ", "\t") and len(state.block) < _MAX_LINES:
            state.block.append(bare)
            if not state.holds:
                return [line]
            state.held.append(line)
            size = len(state.block)
            if any(list(known[:size]) == state.block for known in self._known):
                return []
            return _release(state)
        block = _key(state.block, bare)
        state.block = None
        ranks = self._known.setdefault(block, {rank})
        is_new = rank in ranks or len(self._known) > _MAX_KNOWN
        ranks.add(rank)
        if not state.holds or is_new:
            return [*_release(state), line]
        state.held.clear()  # it goes on holding: another traceback of the same chain may follow
        return [f"{bare} (the same traceback as before)\n"]

    def _outside(self, state: _Stream, line: str, bare: str) -> list[str]:
        if _FIRST.match(bare):
            state.block = [] if bare == _HEADER else [bare]
            state.holds = state.holds or bool(self._known)
            if not state.holds:
                return [line]
            state.held.append(line)
            return []
        if state.holds and bare in _BETWEEN:
            state.held.append(line)
            return []
        return [*_release(state), line]


def shortened(report: Report, result: Result, shown: Shown) -> Report:
    """Return the report with only the end of its traceback if the terminal shows all of it already."""
    error = result.cause.error if result.cause is not None else None
    lines = error.traceback.rstrip().splitlines() if error is not None else []
    start = _position(lines, report.because)
    if error is None or start is None or not shown.has(error.traceback):
        return report
    last = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=0)
    end = lines[last:][:_MAX_LAST_LINES]
    because = list(report.because)
    because[start : start + len(lines)] = ["the traceback above, which ends:", *end]
    return replace(report, because=tuple(because))


def _position(lines: Sequence[str], within: Sequence[str]) -> int | None:
    size = len(lines)
    starts = range(len(within) - size + 1) if size > _LEAST_LINES else ()
    return next((i for i in starts if list(within[i : i + size]) == list(lines)), None)


def _release(state: _Stream) -> list[str]:
    held, state.held, state.holds = state.held, [], False
    return held


def _bare(line: str) -> str:
    return _TORCH_PREFIX.sub("", line.rstrip("\r\n"))


def _key(frames: Sequence[str], last: str) -> _Block:
    return (*frames, last.partition(":")[0])


def _last_block(traceback: str) -> _Block | None:
    """Return the last of a chain of tracebacks; None if the text is not a traceback."""
    frames: list[str] | None = None
    found: _Block | None = None
    for line in traceback.splitlines():
        bare = _bare(line)
        if frames is not None and bare[:1] in (" ", "\t"):
            frames.append(bare)
        elif frames is not None:
            found, frames = _key(frames, bare), None
        elif _FIRST.match(bare):
            frames = [] if bare == _HEADER else [bare]
    return found


# Events in words: turns events of a record into sentences for people.


def narrate(event: RecordEvent, shown: "Shown | None" = None) -> str | None:
    """Return the sentence for an event; None for one that is only recorded.

    Args:
        event: Of a record.
        shown: What the terminal shows already and need not be repeated.
    """
    match event:
        case events.AttemptFailedEvent():
            return _attempt_failed(event, shown)
        case events.AttemptStartedEvent(attempt=attempt):
            return _attempt_started(event) if attempt else None
        case events.WaitingEvent():
            return _waiting(event)
        case events.NoticeEvent(text=text):
            return text or None
        case (
            events.StoppingEvent(text=text)
            | events.HangEvent(text=text)
            | events.StartWaitEvent(text=text)
            | events.StragglerEvent(text=text)
            | events.WaitingForEndEvent(text=text)
        ):
            return text
        case events.AgentRefusedEvent(host=host, why=why):
            return f"refused an agent from {host}: {why}; the run continues"
        case events.NodeLostEvent(node=node, why=why):
            return f"{node} was lost: {why}"
        case events.NodeLeftOutEvent(node=node, rank=rank):
            why = f"its rank {rank} has computed something else than the others"
            return f"{node} gets no ranks again: {why}"
        case events.NewcomerEvent(node=node):
            return f"{node} has joined; it takes part from the next attempt on"
        case events.SpareJoinedEvent(node=node):
            return f"{node} has joined as a spare node"
        case events.SpareLostEvent(node=node, why=why):
            return f"the spare {node} was lost: {why}"
        case events.SpareTakenEvent(node=node, before=before):
            return f"the spare {node} takes the place of {before}"
        case events.HeadReplacedEvent(node=node, before=before, attempt=attempt):
            what = f"the head on {before} was lost"
            return f"{what}: {node} takes its place with attempt {attempt}"
        case events.ShrunkEvent(num_nodes=num_nodes, wanted=wanted):
            return f"the world shrinks to {num_nodes} of {wanted} nodes"
        case events.EarlyEndEvent():
            return _early_end(event)
        case events.LeftRunningEvent(node=node, processes=processes):
            names = few_of([f"{one.name} (pid {one.pid})" for one in processes], 8)
            return f"left running on {node}, in sessions of their own: {names}"
        case events.DebuggerWaitsEvent(node=node, rank=rank, tool=tool):
            return f"rank {rank} on {node} waits for {tool.partition(':')[0]}"
        case events.NetworkEvent():
            return _network(event)
        case events.PreflightEvent():
            return _preflight(event)
    return None


def wait_in(event: RecordEvent, age_s: float) -> str | None:
    """Return what a run waits for, with the remaining time.

    Args:
        event: The newest that says so.
        age_s: For how long it has stood at the end of the record.
    """
    if isinstance(event, events.WaitingEvent):
        return _waiting(event, max(0.0, event.left_s - max(0.0, age_s)))
    return narrate(event)


def _waiting(event: events.WaitingEvent, left_s: float | None = None) -> str:
    missing, num, left = (
        event.missing,
        event.num_missing,
        event.left_s if left_s is None else left_s,
    )
    if event.hint:
        names = few_of([one.node for one in missing], 8, num)
        return f"waiting for {names}: {missing[0].why if missing else ''}; {event.hint}; {left:.0f} s left"
    what = few_of([f"{one.node} ({one.why})" for one in missing], 8, num)
    return f"waiting for {num} of {event.wanted} nodes: {what}; {left:.0f} s left"


def _attempt_started(event: events.AttemptStartedEvent) -> str:
    nodes = "node" if event.num_nodes == 1 else "nodes"
    workers = "worker" if event.world_size == 1 else "workers"
    where = f"{event.world_size} {workers} on {event.num_nodes} {nodes}"
    return f"attempt {event.attempt}: {where} ({event.why})"


def _attempt_failed(event: events.AttemptFailedEvent, shown: "Shown | None") -> str:
    left, cause = event.restarts_left, event.cause
    what = f"attempt {event.attempt} ended: {event.what}"
    if left is None:
        return what  # the verdict follows
    told = ""
    if cause is not None:
        traceback = cause.error.traceback if cause.error is not None else ""
        ranks = shown.ranks if shown is not None else {0}
        is_new = cause.rank not in ranks and not (shown is not None and shown.has(traceback))
        lines = cause.tail if is_new else ()
        if shown is not None and 0 < len(traceback.splitlines()) <= len(lines):
            shown.note(traceback)
        told = "".join(f"\n  [rank {cause.rank}] {line}" for line in lines)
    return f"{what}; {left} restart{'s' if left != 1 else ''} left{told}"


def _early_end(event: events.EarlyEndEvent) -> str:
    ranks = f"rank{'' if event.ranks.isdecimal() else 's'} {event.ranks}"
    others = f"{event.num_running} other{'s run' if event.num_running > 1 else ' runs'}"
    return f"{ranks} ended with exit code 0 while {others}"


def _network(event: events.NetworkEvent) -> str:
    parts = [f"{event.interface} ({event.subnet})", f"{event.num_nodes} nodes"]
    if event.gbit_per_s is not None:
        parts.append(f"{event.gbit_per_s} Gbit/s")
    if event.latency_s is not None:
        parts.append(f"{significant(event.latency_s * 1000)} ms")
    unused = [f"{one.name} ({one.why})" for one in event.unused[:8]]
    if len(event.unused) > 8:
        unused.append(f"{len(event.unused) - 8} more")
    return f"network: {', '.join(parts)}" + (f"; not used: {', '.join(unused)}" if unused else "")


def _preflight(event: events.PreflightEvent) -> str | None:
    """Return the sentence for failures and warnings; `muster doctor` shows all findings itself."""
    if event.form == "long":
        return None
    lines = [_finding(finding) for finding in event.findings if finding.get("level") != "note"]
    return "\n".join(lines) or None


def _finding(finding: Mapping[str, Any]) -> str:
    reasons = finding.get("because")
    because = "; ".join(map(str, reasons[:2] if isinstance(reasons, list) else ()))
    hint = finding.get("hint")
    text = f"preflight {finding.get('level')}: {finding.get('error')}"
    text += f" ({because})" if because else ""
    return text + (f"; {hint}" if hint else "")


HALF_LINE_S = 0.1  # so many short lines that come in pieces are still written in one
_MAX_HALF_LINE = 64 << 10
_MAX_WHOLE_LINE = 16 << 20

_Key = tuple[int, int]  # rank, stream


@dataclass(frozen=True, slots=True)
class _OpenLine:
    """The unfinished last line of the terminal."""

    stream: int
    key: _Key | None = None  # None: raw text of the only rank
    half: str = ""  # as much of its half line as is shown
    width: int = 0  # of all that is drawn
    is_redrawn: bool = False  # raw text that begins its line again, as a progress bar does

    @property
    def is_bar(self) -> bool:
        return "\r" in self.half


@dataclass(slots=True)
class LineJoiner:
    """Turns (rank, stream, text) into the text to write to the terminal, in order."""

    prefix_always: bool = False
    names: dict[int, str] = field(default_factory=dict)  # instead of `rank N`, e.g. of tasks
    prefixes: dict[int, str] = field(default_factory=dict)  # instead of `[rank N] `
    lacks_logs: bool = False  # a disk has not taken all lines
    whole: frozenset[int] = (
        frozenset()
    )  # streams into a file or pipe: a line is written when it ends
    is_apart: bool = (
        False  # standard output is such a one, of its own: what ranks print, and no more
    )
    _ranks: set[int] = field(default_factory=set)
    _half: dict[_Key, str] = field(default_factory=dict)
    _unseen: dict[_Key, None] = field(default_factory=dict)  # half lines with news, in their order
    _ended: dict[_Key, str] = field(default_factory=dict)  # halves that others' words have ended
    _open: _OpenLine | None = None

    def add(self, rank: int, stream: int, text: str, left_out: int = 0) -> list[tuple[int, str]]:
        """Return the pieces to write now, each with its stream; unfinished lines wait."""
        self._ranks.add(rank)
        out: list[tuple[int, str]] = []
        if left_out:
            out += self.interject()
            # A full disk may be told of only later: a log is not promised to have them.
            where = "not all are in its log" if self.lacks_logs else "see its log"
            out.append((2, f"[{self._name(rank)}: {left_out} lines are not shown here; {where}]\n"))
        if self._is_raw:
            if stream in self.whole and not self.is_apart:
                text = self._ended_part((rank, stream), text)
            if text:
                out.append((stream, text))
                before, last = self._open, text.rpartition("\n")[2]
                goes_on = before is not None and before.is_redrawn and "\n" not in text
                is_redrawn = goes_on or "\r" in last
                is_open = last and not (stream == 1 and self.is_apart)
                self._open = _OpenLine(stream, is_redrawn=is_redrawn) if is_open else None
            return out
        return out + self._whole_lines((rank, stream), text)

    @property
    def _is_raw(self) -> bool:
        return len(self._ranks) == 1 and not self.prefix_always

    def _ended_part(self, key: _Key, text: str) -> str:
        """Return the text without its half line, which waits: what the other stream prints shall not tear it."""
        text = self._half.pop(key, "") + text
        size = max(text.rfind("\n"), text.rfind("\r")) + 1
        self._unseen.pop(key, None)
        if half := text[size:]:
            self._half[key] = half
            self._unseen[key] = None
        return text[:size]

    @property
    def has_open_line(self) -> bool:
        """Return whether the cursor stands behind unfinished text."""
        return self._open is not None

    @property
    def has_open_bar(self) -> bool:
        """Return whether that is a progress bar; else it may be a prompt."""
        return self._open is not None and (self._open.is_bar or self._open.is_redrawn)

    @property
    def waits(self) -> bool:
        """Return whether there are half lines that are not shown."""
        return bool(self._unseen)

    def show_halves(self) -> list[tuple[int, str]]:
        """Return the pieces that show the unfinished lines that have waited long enough."""
        keys, self._unseen = list(self._unseen), {}
        return [piece for key in keys for piece in self._draw(key)]

    def interject(self) -> list[tuple[int, str]]:
        """Return the text that ends an unfinished line before something else is printed."""
        if self._open is None:
            return []
        before, self._open = self._open, None
        if before.key is not None and not before.is_bar:
            self._ended[before.key] = before.half
        return [(before.stream, "\n")]

    def rest(self) -> list[tuple[int, str]]:
        """Return the unfinished lines at the end of the output."""
        self._unseen.update((key, None) for key in self._half if key[1] in self.whole)
        out = self.show_halves()
        if self._open is not None and self._open.key is not None:
            out += self.interject()
        self._half.clear()
        return out

    def _whole_lines(self, key: _Key, text: str) -> list[tuple[int, str]]:
        lines = (self._half.pop(key, "") + text).split("\n")
        half = lines.pop()
        if "\r" in half:  # of a line that is drawn again and again only the last state counts
            half = f"\r{last_state(half)}"
        is_whole = key[1] in self.whole
        if len(half) > (_MAX_WHOLE_LINE if is_whole else _MAX_HALF_LINE):
            lines.append(half)
            half = ""
        if half:
            self._half[key] = half
        self._unseen.pop(key, None)
        out = self._end_lines(key, lines) if lines else []
        is_news = self._open is None or self._open.key != key or self._open.half != half
        if half and is_news and not is_whole:
            self._unseen[key] = None
        return out

    def _end_lines(self, key: _Key, lines: list[str]) -> list[tuple[int, str]]:
        prefix, stream = self._prefix(key[0]), key[1]
        out: list[tuple[int, str]] = []
        if self._ended.pop(key, None) == lines[0]:  # it stands there
            lines = lines[1:]
        elif self._open is not None and self._open.key == key:
            out.append((stream, self._go_on(self._open, lines.pop(0), prefix) + "\n"))
            self._open = None
        joined = "".join(f"{prefix}{last_state(line)}\n" for line in lines)
        return [*out, *self.interject(), (stream, joined)] if joined else out

    def _draw(self, key: _Key) -> list[tuple[int, str]]:
        half, stream, before = self._half[key], key[1], self._open
        if self._is_raw:
            del self._half[key]
            self._open = _OpenLine(stream)
            return [(stream, half)]
        text = f"{self._prefix(key[0])}{last_state(half)}"
        now = _OpenLine(stream, key, half, len(text))
        if before is not None and before.key == key:
            out = [(stream, self._go_on(before, half, self._prefix(key[0])))]
        elif before is not None and before.is_bar and now.is_bar and stream not in self.whole:
            # Bars of several ranks take turns on one line: a line for each state would be a flood.
            out = [(before.stream, "\r"), (stream, text.ljust(before.width))]
        else:
            out = [*self.interject(), (stream, text)]
        self._open = now
        return out

    def _go_on(self, before: _OpenLine, line: str, prefix: str) -> str:
        """Return the text that completes the open line, which shows a part of this one."""
        if "\r" not in line.rstrip("\r"):
            return line.rstrip("\r").removeprefix(before.half)
        return "\r" + f"{prefix}{last_state(line)}".ljust(before.width)

    def _prefix(self, rank: int) -> str:
        own = self.prefixes.get(rank)
        return line_prefix(self._name(rank)) if own is None else own

    def _name(self, rank: int) -> str:
        return self.names.get(rank) or f"rank {rank}"


def line_prefix(name: str) -> str:
    """Return the prefix of the lines of a rank or task, for when several print."""
    return f"[{name}] "


def last_state(line: str) -> str:
    """Return the final text of a line that was redrawn several times."""
    return line.rstrip("\r").rpartition("\r")[2]


# Rows below the output of a terminal, under a progress bar that is drawn again and again, too. Text in, text out.
#
# They are drawn when all output is written, and taken away before more is; afterwards the cursor stands where the output has
# left it, so no other program notices them. Below a prompt there are none: what is typed would run into them.


# The properties of the user's terminal that the ranks shown on it need.


_MIN_COLUMNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """Which of the standard streams (1, 2) of the process that shows output are a terminal, and its size."""

    streams: frozenset[int]
    columns: int
    rows: int

    def to_word(self) -> str:
        """Return the value as one word of a command line."""
        return f"{','.join(map(str, sorted(self.streams)))}:{self.columns}x{self.rows}"

    @classmethod
    def from_word(cls, word: str) -> Self:
        """Inverse of `to_word`."""
        streams, _, size = word.partition(":")
        columns, _, rows = size.partition("x")
        numbers = frozenset(int(number) for number in streams.split(","))
        return cls(streams=numbers, columns=int(columns), rows=int(rows))

    def behind(self, prefix: str) -> Self:
        """Return the terminal without the columns of this prefix."""
        return replace(self, columns=max(self.columns - len(prefix), _MIN_COLUMNS))


# Source: xterm's control sequences. `ESC D` moves down and scrolls at the end of the screen, and keeps the column.
_NO_WRAP, _WRAP, _SAVE, _RESTORE = "\x1b[?7l", "\x1b[?7h", "\x1b7", "\x1b8"
_DOWN_OR_SCROLL, _DOWN, _CLEAR_BELOW, _CLEAR_ROW = "\x1bD", "\x1b[1B", "\x1b[J", "\x1b[K"


@dataclass(slots=True)
class StatusBelow:
    """The rows that are wanted, and those that are drawn.

    Attributes:
        joiner: Knows where the output has left the cursor.
        wanted: The rows; none for no status.
    """

    joiner: LineJoiner
    wanted: tuple[str, ...] = ()
    _drawn: tuple[str, ...] = ()
    _is_below_bar: bool = False

    @property
    def is_drawn(self) -> bool:
        """Say whether rows stand on the terminal."""
        return bool(self._drawn)

    def is_due(self, *, may_draw: bool) -> bool:
        """Say whether something else should stand there than does.

        Args:
            may_draw: The terminal is ours.
        """
        return self._now_wanted(may_draw) != self._drawn

    def draw(self, *, may_draw: bool) -> str:
        """Return what puts the wanted rows there in place of those that are drawn."""
        covering, rows = self.cover(), self._now_wanted(may_draw)
        if not rows:
            return covering
        self._drawn, self._is_below_bar = rows, self.joiner.has_open_line
        if self._is_below_bar:
            room = _DOWN_OR_SCROLL * len(rows) + _up(len(rows))
            text = room + _SAVE + "".join(f"{_DOWN}\r{row}{_CLEAR_ROW}" for row in rows) + _RESTORE
        else:  # the cursor is in an empty row, where they begin
            text = (
                "\r" + "\r\n".join(f"{row}{_CLEAR_ROW}" for row in rows) + _up(len(rows) - 1) + "\r"
            )
        return f"{covering}{_NO_WRAP}{text}{_WRAP}"

    def cover(self) -> str:
        """Return what takes the drawn rows away."""
        if not self._drawn:
            return ""
        self._drawn = ()
        if self._is_below_bar:
            return f"{_SAVE}{_DOWN}\r{_CLEAR_BELOW}{_RESTORE}"
        return f"\r{_CLEAR_BELOW}"  # also of a row below, where Enter may have put the cursor

    def _now_wanted(self, may_draw: bool) -> tuple[str, ...]:
        at_prompt = self.joiner.has_open_line and not self.joiner.has_open_bar
        return self.wanted if may_draw and not at_prompt else ()


def _up(num_rows: int) -> str:
    return f"\x1b[{num_rows}A" if num_rows else ""
