"""Merge the output of many ranks on one terminal: whole lines, prefixed once several ranks print.

While a single rank prints, its text passes unchanged, including unfinished lines and carriage
returns, so a progress bar moves and a debugger's prompt appears. From the first text of a second
rank on, every line has a prefix with its rank, and lines are not mixed: an unfinished line waits
briefly for its end (`HALF_LINE_S`), is then shown as it is, and is shown again with its end if
another rank has printed in between.
"""

from dataclasses import dataclass, field, replace
from typing import Self

HALF_LINE_S = 0.1  # lines that arrive in pieces are usually complete by then
_MAX_HALF_LINE = 64 << 10
_MAX_WHOLE_LINE = 16 << 20

_Key = tuple[int, int]  # rank, stream


@dataclass(frozen=True, slots=True)
class _OpenLine:
    """The unfinished last line of the terminal."""

    stream: int
    key: _Key | None = None  # None: raw text of the only rank
    half: str = ""  # the part of its line that is shown
    width: int = 0  # of everything drawn
    is_redrawn: bool = False  # raw text that redraws its line, as a progress bar does

    @property
    def is_bar(self) -> bool:
        return "\r" in self.half


@dataclass(slots=True)
class LineJoiner:
    """Turns (rank, stream, text) into the text to write to the terminal, in order."""

    prefix_always: bool = False
    names: dict[int, str] = field(default_factory=dict)  # instead of `rank N`, e.g. of tasks
    prefixes: dict[int, str] = field(default_factory=dict)  # instead of `[rank N] `
    lacks_logs: bool = False  # a disk has lost lines
    whole: frozenset[int] = frozenset()  # file or pipe streams: a line is written when it ends
    is_apart: bool = False  # standard output is a separate file or pipe: only output of ranks
    _ranks: set[int] = field(default_factory=set)
    _half: dict[_Key, str] = field(default_factory=dict)
    _unseen: dict[_Key, None] = field(default_factory=dict)  # half lines with unseen text, in order
    _ended: dict[_Key, str] = field(default_factory=dict)  # half lines cut off by other output
    _open: _OpenLine | None = None

    def add(self, rank: int, stream: int, text: str, left_out: int = 0) -> list[tuple[int, str]]:
        """Return the pieces to write now, each with its stream; unfinished lines wait."""
        self._ranks.add(rank)
        out: list[tuple[int, str]] = []
        if left_out:
            out += self.interject()
            # A full disk may be reported only later: don't promise that a log has them.
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
        """Return complete lines and keep the rest, so that the other stream does not tear it."""
        text = self._half.pop(key, "") + text
        size = max(text.rfind("\n"), text.rfind("\r")) + 1
        self._unseen.pop(key, None)
        if half := text[size:]:
            self._half[key] = half
            self._unseen[key] = None
        return text[:size]

    @property
    def has_open_line(self) -> bool:
        """Return whether the cursor is after unfinished text."""
        return self._open is not None

    @property
    def has_open_bar(self) -> bool:
        """Return whether the open line is a progress bar rather than, say, a prompt."""
        return self._open is not None and (self._open.is_bar or self._open.is_redrawn)

    @property
    def waits(self) -> bool:
        """Return whether some half lines are not shown yet."""
        return bool(self._unseen)

    def show_halves(self) -> list[tuple[int, str]]:
        """Return the pieces that show the unfinished lines that have waited long enough."""
        keys, self._unseen = list(self._unseen), {}
        return [piece for key in keys for piece in self._draw(key)]

    def interject(self) -> list[tuple[int, str]]:
        """Return the text that ends an unfinished line before other output."""
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
        if "\r" in half:  # of a redrawn line only the last state counts
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
        if self._ended.pop(key, None) == lines[0]:  # it is already there
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
            # Bars of several ranks take turns on one line: a line per state would flood the
            # terminal.
            out = [(before.stream, "\r"), (stream, text.ljust(before.width))]
        else:
            out = [*self.interject(), (stream, text)]
        self._open = now
        return out

    def _go_on(self, before: _OpenLine, line: str, prefix: str) -> str:
        """Return the text that completes the open line, which already shows a part of it."""
        if "\r" not in line.rstrip("\r"):
            return line.rstrip("\r").removeprefix(before.half)
        return "\r" + f"{prefix}{last_state(line)}".ljust(before.width)

    def _prefix(self, rank: int) -> str:
        own = self.prefixes.get(rank)
        return line_prefix(self._name(rank)) if own is None else own

    def _name(self, rank: int) -> str:
        return self.names.get(rank) or f"rank {rank}"


def line_prefix(name: str) -> str:
    """Return the prefix for lines of a rank or task when several print."""
    return f"[{name}] "


def last_state(line: str) -> str:
    """Return the final text of a line that was redrawn several times."""
    return line.rstrip("\r").rpartition("\r")[2]


_MIN_COLUMNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The terminal that shows output: which standard streams (1, 2) are connected, and its size."""

    streams: frozenset[int]
    columns: int
    rows: int

    def to_word(self) -> str:
        """Return the value as one command-line argument."""
        return f"{','.join(map(str, sorted(self.streams)))}:{self.columns}x{self.rows}"

    @classmethod
    def from_word(cls, word: str) -> Self:
        """Inverse of `to_word`."""
        streams, _, size = word.partition(":")
        columns, _, rows = size.partition("x")
        numbers = frozenset(int(number) for number in streams.split(","))
        return cls(streams=numbers, columns=int(columns), rows=int(rows))

    def behind(self, prefix: str) -> Self:
        """Return the terminal without the columns that a prefix needs."""
        return replace(self, columns=max(self.columns - len(prefix), _MIN_COLUMNS))


# Source: xterm's control sequences. `ESC D` moves down, scrolls at the end of the screen, and keeps
# the column.
_NO_WRAP, _WRAP, _SAVE, _RESTORE = "\x1b[?7l", "\x1b[?7h", "\x1b7", "\x1b8"
_DOWN_OR_SCROLL, _DOWN, _CLEAR_BELOW, _CLEAR_ROW = "\x1bD", "\x1b[1B", "\x1b[J", "\x1b[K"


@dataclass(slots=True)
class StatusBelow:
    """Status rows below the output of a terminal, also below a progress bar; returns text to write.

    The rows are drawn when all output is written, and removed before more output; the cursor
    returns to where the output left it, so no other program notices them. At a prompt there are
    none: typed text would run into them.

    Attributes:
        joiner: Knows where the output left the cursor.
        wanted: The rows to show; empty for no status.
    """

    joiner: LineJoiner
    wanted: tuple[str, ...] = ()
    _drawn: tuple[str, ...] = ()
    _is_below_bar: bool = False

    @property
    def is_drawn(self) -> bool:
        """Say whether rows are on the terminal."""
        return bool(self._drawn)

    def is_due(self, *, may_draw: bool) -> bool:
        """Say whether the drawn rows differ from the wanted ones.

        Args:
            may_draw: The terminal is ours.
        """
        return self._now_wanted(may_draw) != self._drawn

    def draw(self, *, may_draw: bool) -> str:
        """Return the text that replaces the drawn rows by the wanted ones."""
        covering, rows = self.cover(), self._now_wanted(may_draw)
        if not rows:
            return covering
        self._drawn, self._is_below_bar = rows, self.joiner.has_open_line
        if self._is_below_bar:
            room = _DOWN_OR_SCROLL * len(rows) + _up(len(rows))
            text = room + _SAVE + "".join(f"{_DOWN}\r{row}{_CLEAR_ROW}" for row in rows) + _RESTORE
        else:  # the cursor is in an empty row, the first of them
            below = "\r\n".join(f"{row}{_CLEAR_ROW}" for row in rows)
            text = f"\r{below}{_up(len(rows) - 1)}\r"
        return f"{covering}{_NO_WRAP}{text}{_WRAP}"

    def cover(self) -> str:
        """Return the text that removes the drawn rows."""
        if not self._drawn:
            return ""
        self._drawn = ()
        if self._is_below_bar:
            return f"{_SAVE}{_DOWN}\r{_CLEAR_BELOW}{_RESTORE}"
        return f"\r{_CLEAR_BELOW}"  # also if Enter has moved the cursor down

    def _now_wanted(self, may_draw: bool) -> tuple[str, ...]:
        at_prompt = self.joiner.has_open_line and not self.joiner.has_open_bar
        return self.wanted if may_draw and not at_prompt else ()


def _up(num_rows: int) -> str:
    return f"\x1b[{num_rows}A" if num_rows else ""
