"""The properties of the user's terminal that the ranks shown on it need."""

from dataclasses import dataclass, replace
from typing import Self

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
