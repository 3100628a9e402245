"""What lines that differ in their numbers only are worth, learnt once for all logs, in bounded memory.

Every digit of a line becomes 0: that is its shape. Most lines of a training log have a shape that means nothing.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_EVENTS_OF_A_SHAPE = (
    1024  # of one source; of progress lines only so many last ones are looked at
)
MAX_MISSES = 64  # then lines of this shape mean nothing, whatever their numbers are
_MAX_SHAPES = 200_000
_MAX_TABLE_BYTES = 48 << 20
_MAX_SHAPE_BYTES = 4096
MAX_PROGRESS_BYTES = 1000  # of a line of progress: the number stands near its beginning
_DEEP_SHAPES = 64  # so many shapes of progress keep many lines, others few
_MAX_PROGRESS_SHAPES = 2048
_FEW_LINES = 64


@dataclass(slots=True)
class Shape:
    """What lines that differ in their numbers only are worth.

    Attributes:
        num_taken: How many became events in this log.
        num_missed: How many meant nothing after all, in all logs.
        progress: The last lines of this log, if they say how far somebody got: place, number and text.
    """

    is_meaningful: bool
    was_taken: bool = False
    num_taken: int = 0
    num_missed: int = 0
    is_progress: bool = False
    progress: deque[tuple[int, int, bytes]] | None = None

    def miss(self) -> None:
        """Note that a line meant nothing after all."""
        self.num_missed += 1
        self.is_meaningful = self.was_taken or self.num_missed < MAX_MISSES


@dataclass(slots=True)
class ShapeTable:
    """All shapes that are known, of all logs.

    Attributes:
        known: By the bytes of a shape; a scanner looks into it directly, for speed.
    """

    known: dict[bytes, Shape] = field(default_factory=dict)
    _touched: list[Shape] = field(default_factory=list)
    _num_bytes: int = 0
    _num_progress: int = 0

    def learn(self, shape: bytes, *, is_meaningful: bool) -> Shape:
        """Return a new shape; it is kept if it is of a usual length."""
        state = Shape(is_meaningful)
        if len(shape) > _MAX_SHAPE_BYTES:
            return state
        if len(self.known) >= _MAX_SHAPES or self._num_bytes > _MAX_TABLE_BYTES:
            self._forget()
        self.known[shape] = state
        self._num_bytes += len(shape)
        return state

    def take(self, state: Shape) -> None:
        """Note that a line became an event."""
        if state.num_taken == 0:
            self._touched.append(state)
        state.num_taken += 1
        state.was_taken = True

    def keep_progress(self, state: Shape, order: int, number: int, raw: bytes) -> None:
        """Remember a line that says how far somebody got; the oldest of its shape goes."""
        if state.progress is None:
            if self._num_progress >= _MAX_PROGRESS_SHAPES:
                return
            deep = self._num_progress < _DEEP_SHAPES
            state.progress = deque(maxlen=MAX_EVENTS_OF_A_SHAPE if deep else _FEW_LINES)
            self._num_progress += 1
            self._touched.append(state)
        state.progress.append((order, number, raw[:MAX_PROGRESS_BYTES]))

    def progress(self) -> Iterator[deque[tuple[int, int, bytes]]]:
        """Yield the last lines of progress of this log, for each shape."""
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
        """Begin anew, but for what this log still needs: lines that come often are soon known again."""
        needed = {id(state) for state in self._touched}
        self.known = {shape: state for shape, state in self.known.items() if id(state) in needed}
        self._num_bytes = sum(map(len, self.known))
