"""Rows below the output of a terminal, under a progress bar that is drawn again and again, too. Text in, text out.

They are drawn when all output is written, and taken away before more is; afterwards the cursor stands where the output has
left it, so no other program notices them. Below a prompt there are none: what is typed would run into them.
"""

from dataclasses import dataclass, replace
from typing import Self

from torchmuster.model.display.lines import LineJoiner

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
