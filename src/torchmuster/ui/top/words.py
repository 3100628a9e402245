"""Numbers, times and curves in the few columns of a live view; what is not known is a dash."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_DAY_S = 86400
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=+*#"
DASH = "-"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a line; `style` is one of `bold`, `dim`, `warn`, `bad`, `good`, `title`, `chosen`, or empty."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the screen."""

    spans: tuple[Span, ...] = field(default=())

    @property
    def text(self) -> str:
        """Return it without styles."""
        return "".join(span.text for span in self.spans)


def line(*parts: "str | Span") -> Line:
    """Return a line of these pieces."""
    return Line(tuple(Span(part) if isinstance(part, str) else part for part in parts))


def show_time(seconds: float | None) -> str:
    """Return `45 s`, `12:41`, `1:12:41` or `3 d 04:00`."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    whole = int(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if whole < 3600:
        return f"{minutes}:{rest:02}"
    hours, minutes = divmod(minutes, 60)
    if whole < _DAY_S:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{whole // _DAY_S} d {hours % 24:02}:{minutes:02}"


def show_number(value: float | None, digits: int = 3) -> str:
    """Return a number in a few characters; nan and infinities by their names."""
    if value is None:
        return DASH
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def show_mib(mib: float | None) -> str:
    """Return `265M` or `12.3G`."""
    if mib is None:
        return DASH
    return f"{mib:.0f}M" if mib < 1000 else f"{mib / 1024:.1f}G"


def show_bytes(size: float | None) -> str:
    """Return `12 KiB`, `1.2 GiB`."""
    if size is None or not math.isfinite(size):
        return DASH
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    index = 0
    while size >= 1000 and index < len(units) - 1:
        size, index = size / 1024, index + 1
    return f"{size:.3g} {units[index]}"


def show_share(share: float | None) -> str:
    """Return `31%`."""
    return DASH if share is None or not math.isfinite(share) else f"{share * 100:.0f}%"


def curve(values: Sequence[float], width: int, *, unicode: bool) -> str:
    """Return a curve of one row: each column the mean of its values, an `x` where one is nan or infinite."""
    if not values or width < 1:
        return ""
    columns = [
        values[at * len(values) // width : (at + 1) * len(values) // width] for at in range(width)
    ]
    if len(values) < width:
        columns = [[value] for value in values]
    means = [
        sum(column) / len(column) if all(map(math.isfinite, column)) else None
        for column in columns
        if column
    ]
    finite = [mean for mean in means if mean is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    span = high - low
    return "".join(
        "x"
        if mean is None
        else blocks[min(int((mean - low) / span * len(blocks)), len(blocks) - 1) if span else 0]
        for mean in means
    )
