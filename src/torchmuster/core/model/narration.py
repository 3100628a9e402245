"""What a terminal shows of a run: sentences for its events, and each traceback only once.

Two tracebacks are the same if frames and exception type are; the last line, which may differ, is
always shown. Repetitions by one rank within an attempt, e.g. logged exceptions, stay. Logs keep
everything.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torchmuster.core.model.events import AttemptFailedEvent, RecordEvent
from torchmuster.core.model.verdict import Report, Result


def narrate(event: RecordEvent, shown: "ShownOutput | None" = None) -> str | None:
    """Return the sentence for an event; None for one that is only recorded.

    Args:
        event: The event.
        shown: What the terminal already shows and need not repeat.
    """
    said = event.narration()
    if not isinstance(event, AttemptFailedEvent) or event.restarts_left is None:
        return said
    cause = event.cause
    if cause is None:
        return said
    traceback = cause.error.traceback if cause.error is not None else ""
    ranks = shown.ranks if shown is not None else {0}
    is_new = cause.rank not in ranks and not (shown is not None and shown.has(traceback))
    lines = cause.tail if is_new else ()
    if shown is not None and 0 < len(traceback.splitlines()) <= len(lines):
        shown.note(traceback)
    return f"{said}" + "".join(f"\n  [rank {cause.rank}] {line}" for line in lines)


_HEADER = "Traceback (most recent call last):"
_FIRST = re.compile(rf'{re.escape(_HEADER)}$|  File ".*", line \d+$')  # the second: SyntaxError
_BETWEEN = (
    "",
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's own hook prefixes each line
_MAX_KNOWN, _MAX_LINES = 256, 500
_LEAST_LINES, _MAX_LAST_LINES = 4, 6

_Block = tuple[str, ...]  # the frames, and the type of the exception


@dataclass(slots=True)
class _Stream:
    """The state of one stream of one rank."""

    is_within: bool = False  # in a line of which a part was passed on
    line: str = ""  # the incomplete line, while lines are examined
    block: list[str] | None = None  # the traceback so far
    held: list[str] = field(default_factory=list)  # possible repetition
    holds: bool = False


@dataclass(slots=True)
class ShownOutput:
    """Tracks the output that goes to a terminal."""

    ranks: set[int] = field(default_factory=set)
    _known: dict[_Block, set[int]] = field(default_factory=dict)  # ranks that raised it
    _streams: dict[tuple[int, int], _Stream] = field(default_factory=dict)

    def begin_attempt(self) -> None:
        """Forget which rank raised what: in a new attempt every repetition is shortened."""
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
        """Return the unfinished text held back: (rank, stream, text)."""
        held = [
            (*key, "".join([*state.held, state.line]))
            for key, state in self._streams.items()
            if state.holds
        ]
        self._streams.clear()
        return [entry for entry in held if entry[2].strip()]

    def has(self, traceback: str) -> bool:
        """Return whether the terminal has shown this traceback."""
        block = _last_block(traceback)
        return block is not None and block in self._known

    def note(self, traceback: str) -> None:
        """Record a traceback that was printed in a message."""
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
        """Return the text to show after this complete line."""
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
        state.held.clear()  # keep holding: the chain may continue
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


def shortened(report: Report, result: Result, shown: ShownOutput) -> Report:
    """Return the report with only the end of its traceback if the terminal already shows it."""
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
    """Return the last traceback of a chain; None if the text is not a traceback."""
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
