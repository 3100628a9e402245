"""Put the output of many ranks on one terminal: whole lines, prefixed once more than one prints.

While a single rank prints, its text passes as it is, half lines and carriage returns included, so a
progress bar moves and a debugger's prompt appears. From the first text of a second rank on, every line
carries its rank and no line is torn.
"""

from dataclasses import dataclass, field

_MAX_HALF_LINE = 64 << 10


@dataclass(slots=True)
class LineJoiner:
    """Turns (rank, stream, text) into what the terminal gets, in order."""

    prefix_always: bool = False
    names: dict[int, str] = field(default_factory=dict)  # instead of `rank N`, e.g. of tasks
    _ranks: set[int] = field(default_factory=set)
    _half: dict[tuple[int, int], str] = field(default_factory=dict)
    _open_line: int | None = None  # the stream on which a raw half line stands

    def add(self, rank: int, stream: int, text: str, left_out: int = 0) -> list[tuple[int, str]]:
        """Return the pieces to write now, each with its stream."""
        self._ranks.add(rank)
        out: list[tuple[int, str]] = []
        if left_out:
            out += self.interject()
            out.append(
                (
                    2,
                    f"[{self._name(rank)}: {left_out} lines are not shown here; its log has them]\n",
                )
            )
        if len(self._ranks) == 1 and not self.prefix_always:
            if text:
                out.append((stream, text))
                self._open_line = None if text.endswith("\n") else stream
            return out
        out += self.interject()
        return out + self._whole_lines(rank, stream, text)

    def interject(self) -> list[tuple[int, str]]:
        """Return what ends a half line, before something else is printed."""
        if self._open_line is None:
            return []
        stream, self._open_line = self._open_line, None
        return [(stream, "\n")]

    def rest(self) -> list[tuple[int, str]]:
        """Return the half lines that nobody will end any more."""
        out = [
            (stream, f"{self._prefix(rank)}{text}\n")
            for (rank, stream), text in self._half.items()
            if text
        ]
        self._half.clear()
        return out

    def _whole_lines(self, rank: int, stream: int, text: str) -> list[tuple[int, str]]:
        lines = (self._half.pop((rank, stream), "") + text).split("\n")
        half = lines.pop()
        if len(half) > _MAX_HALF_LINE:
            lines.append(half)
            half = ""
        self._half[rank, stream] = half
        prefix = self._prefix(rank)
        # Of a line that was drawn again and again only the last state is worth a line.
        last = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        joined = "".join(f"{prefix}{line}\n" for line in last)
        return [(stream, joined)] if joined else []

    def _prefix(self, rank: int) -> str:
        return f"[{self._name(rank)}] "

    def _name(self, rank: int) -> str:
        return self.names.get(rank) or f"rank {rank}"
