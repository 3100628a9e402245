"""Plain tables, and numbers and curves for narrow columns: as wide as their widest cell, no lines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.core.model.text import in_one_line


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table with a newline at the end of every row."""
    table = [list(header), *[[in_one_line(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join(lines) + "\n"


# Numbers, times and curves for the narrow columns of a live view; unknown values are a dash.


_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=+*#"
DASH = "-"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a line.

    Its `style` is `bold`, `dim`, `warn`, `bad`, `good`, `title`, `chosen` or empty.
    """

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the screen."""

    spans: tuple[Span, ...] = field(default=())

    @property
    def text(self) -> str:
        """The text without styles."""
        return "".join(span.text for span in self.spans)


def line(*parts: "str | Span") -> Line:
    """Join pieces into a line."""
    return Line(tuple(Span(part) if isinstance(part, str) else part for part in parts))


def show_number(value: float | None, digits: int = 3) -> str:
    """Format a number in a few characters; nan and infinities by name."""
    if value is None:
        return DASH
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def show_mib(mib: float | None) -> str:
    """Format MiB: `265M` or `12.3G`."""
    if mib is None:
        return DASH
    return f"{mib:.0f}M" if mib < 1000 else f"{mib / 1024:.1f}G"


def show_bytes(size: float | None) -> str:
    """Format bytes: `12 KiB`, `1.2 GiB`."""
    if size is None or not math.isfinite(size):
        return DASH
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    index = 0
    while size >= 1000 and index < len(units) - 1:
        size, index = size / 1024, index + 1
    return f"{size:.3g} {units[index]}"


def show_share(share: float | None) -> str:
    """Format a share: `31%`."""
    return DASH if share is None or not math.isfinite(share) else f"{share * 100:.0f}%"


def curve(values: Sequence[float], width: int, *, unicode: bool) -> str:
    """Draw a one-row curve of column means; `x` marks a column with a nan or an infinity."""
    means = _columns(values, width)
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


def curve_range(values: Sequence[float], width: int) -> str:
    """Return the highest and lowest column, the earlier first: `0.59 > 0.004`, `0.5 < 0.99`."""
    finite = [mean for mean in _columns(values, width) if mean is not None]
    if not finite or min(finite) == max(finite):
        return ""
    first, second = sorted((min(finite), max(finite)), key=finite.index)
    return f"{show_number(first)} {'>' if first > second else '<'} {show_number(second)}"


def _columns(values: Sequence[float], width: int) -> list[float | None]:
    """Return the means of up to `width` parts of the values; None for a part that is not finite."""
    num_columns = min(len(values), max(width, 0))
    parts = [
        values[at * len(values) // num_columns : (at + 1) * len(values) // num_columns]
        for at in range(num_columns)
    ]
    means = (sum(part) / len(part) for part in parts)
    return [mean if math.isfinite(mean) else None for mean in means]
