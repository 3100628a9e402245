"""Make plots as SVG, without a library and without anything to load.

Colours are classes of the page's style sheet, so that a plot follows the theme and prints.
`Markup.format` escapes all text.
"""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from torchmuster.core.model.text import span
from torchmuster.launcher.model.run import thinned
from torchmuster.report.story import figure

# Heat maps as PNG with a palette: 512 ranks by 240 time spans are one image, not 100,000 shapes.


# Cividis, which colour-blind people see alike; dark is low, light is high. Source: Nunez, Anderton,
# Renslow, PLOS ONE 13(7), 2018; sampled at 9 points.
PALETTE = (
    *((0, 34, 78), (18, 53, 112), (59, 73, 108), (87, 93, 109), (112, 113, 115)),
    *((138, 134, 120), (165, 156, 116), (195, 179, 105), (254, 232, 56)),
)
NUM_LEVELS = 64


def heatmap_png(rows: Sequence[Sequence[float | None]], low: float, high: float) -> str:
    """Return an image as a `data:` URI: one pixel for each value, transparent where there is none.

    Args:
        rows: The rows from top to bottom; shorter ones are padded.
        low: The value of the darkest colour.
        high: The value of the lightest colour.
    """
    height, width = len(rows), max(map(len, rows), default=0)
    reach = high - low or 1.0
    packed = bytearray()
    for row in rows:
        packed.append(0)  # no filter
        for value in row:
            level = (
                0
                if value is None
                else 1 + round(min(max((value - low) / reach, 0.0), 1.0) * (NUM_LEVELS - 1))
            )
            packed.append(level)
        packed.extend(bytes(width - len(row)))
    colours = bytes((0, 0, 0)) + b"".join(
        bytes(colour_of(n / (NUM_LEVELS - 1))) for n in range(NUM_LEVELS)
    )
    parts = [
        _chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 3, 0, 0, 0)),
        _chunk(b"PLTE", colours),
        _chunk(b"tRNS", b"\0"),
        _chunk(b"IDAT", zlib.compress(bytes(packed), 9)),
        _chunk(b"IEND", b""),
    ]
    picture = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def colour_of(share: float) -> tuple[int, int, int]:
    """Return the (red, green, blue) colour at a position in the palette, 0 to 1."""
    place = min(max(share, 0.0), 1.0) * (len(PALETTE) - 1)
    number = min(int(place), len(PALETTE) - 2)
    rest = place - number
    one, other = PALETTE[number], PALETTE[number + 1]
    red, green, blue = (round(a + (b - a) * rest) for a, b in zip(one, other, strict=True))
    return red, green, blue


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# Axes: the position of a value, and round numbers for ticks.


_LARGEST = 1e300  # so that a difference of two values stays finite
_LOG_FROM = 100.0  # the ratio of greatest to least above which an axis is logarithmic
_TIMES = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900),
    *(1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432800, 864000, 2592000, 31536000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A mapping from values to pixels."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False
    is_constant: bool = False  # there is one value, in the middle

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, here = self.low, self.high, clipped(value)
        if self.is_log:
            low, high, here = math.log10(low), math.log10(high), math.log10(max(here, self.low))
        share = (here - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)


def clipped(value: float) -> float:
    """Return the value, limited to a range in which differences stay finite."""
    return min(max(value, -_LARGEST), _LARGEST)


def value_scale(
    values: Sequence[float], begin: float, end: float, *, from_zero: bool = False
) -> Scale:
    """Return a scale with a margin; logarithmic if all values are positive and far apart."""
    low, high = min(map(clipped, values), default=0.0), max(map(clipped, values), default=1.0)
    if not from_zero and low > 0 and high / low > _LOG_FROM:
        return Scale(low=low / 1.1, high=high * 1.1, begin=begin, end=end, is_log=True)
    if from_zero:
        low = min(low, 0.0)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    bottom = low if from_zero and low == 0 else low - room
    is_constant = low == high
    return Scale(low=bottom, high=high + room, begin=begin, end=end, is_constant=is_constant)


def ticks(scale: Scale, count: int = 5) -> list[tuple[float, str]]:
    """Return ticks at round numbers on a scale, as (value, text)."""
    if scale.is_log:
        return _log_ticks(scale, count)
    if scale.is_constant:
        value = (scale.low + scale.high) / 2
        return [(value, figure(value))]
    width = scale.high - scale.low
    if width <= 0 or not math.isfinite(width):
        return [(scale.low, figure(scale.low))]
    rough = width / count
    unit = 10 ** math.floor(math.log10(rough))
    step = next((unit * m for m in (1, 2, 2.5, 5) if unit * m >= rough), unit * 10)
    first = math.ceil(scale.low / step)
    values = [(first + n) * step for n in range(count * 2 + 1)]
    return [(v, figure(0.0 if abs(v) < step / 1e6 else v)) for v in values if v <= scale.high]


def _log_ticks(scale: Scale, count: int) -> list[tuple[float, str]]:
    low, high = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    every = max(1, (high - low) // count)
    values = [10.0**power for power in range(max(low, -300), min(high, 300) + 1, every)]
    return [(v, figure(v)) for v in values if scale.low <= v <= scale.high]


def time_ticks(scale: Scale, count: int = 7) -> list[tuple[float, str]]:
    """Return ticks at round times on a scale of seconds, as (seconds, text)."""
    width = max(scale.high - scale.low, 1e-9)
    step = next((one for one in _TIMES if width / one <= count), width / count)
    if width < _TIMES[0]:
        step = width / count
    first = math.ceil(scale.low / step)
    values = [(first + n) * step for n in range(count + 2)]
    return [(v, span(v) if v else "0") for v in values if v <= scale.high]


WIDTH, HEIGHT = 640, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 26, 12, 36
_POINTS = 1200  # of a line: about two for each pixel of its width
_ROW = 24  # of a bar
_BAR = 14


_NOTHING = Markup("")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """A series to draw; `style` is a class of the style sheet."""

    name: str
    points: Sequence[tuple[float, float | None]]
    style: str = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """The area between two series over the same x values."""

    xs: Sequence[float]
    least: Sequence[float | None]
    most: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotPiece:
    """A part of a bar."""

    begin: float
    end: float
    style: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotBar:
    """A bar of several pieces with its name, signs (crosses), and words at its end."""

    name: str
    pieces: Sequence[PlotPiece]
    words: str = ""
    signs: Sequence[float] = ()
    is_marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLabels:
    """The texts of a plot: a short title, a sentence that says what it shows, and its axes."""

    key: str
    title: str
    words: str
    x: str = ""
    y: str = ""


def _svg(
    labels: PlotLabels, width: float, height: float, body: Sequence[Markup], more: Markup = _NOTHING
) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {w:.0f} {h:.0f}" role="img" aria-labelledby="{key}-t {key}-d"{more}>'
        '<title id="{key}-t">{title}</title><desc id="{key}-d">{words}</desc>{body}</svg>'
    ).format(
        w=width,
        h=height,
        key=labels.key,
        title=labels.title,
        words=labels.words,
        body=_NOTHING.join(body),
        more=more,
    )


def _x_axis(
    scale: Scale, marks: Sequence[tuple[float, str]], top: float, bottom: float, label: str
) -> Markup:
    parts = []
    for value, words in marks:
        x = scale.at(value)
        parts.append(
            Markup(
                '<path class="grid" d="M{x:.1f} {a:.1f}V{b:.1f}"/><text x="{x:.1f}" y="{c:.1f}" text-anchor="middle">{t}</text>'
            ).format(x=x, a=top, b=bottom, c=bottom + 15, t=words)
        )
    middle = (scale.begin + scale.end) / 2
    parts.append(
        Markup('<text class="axis" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>').format(
            middle, bottom + 31, label
        )
    )
    return _NOTHING.join(parts)


def _y_axis(scale: Scale, left: float, right: float, label: str) -> Markup:
    parts = [
        Markup(
            '<path class="grid" d="M{a:.1f} {y:.1f}H{b:.1f}"/><text x="{c:.1f}" y="{d:.1f}" text-anchor="end">{t}</text>'
        ).format(a=left, b=right, y=scale.at(value), c=left - 6, d=scale.at(value) + 4, t=words)
        for value, words in ticks(scale)
    ]
    return _NOTHING.join((*parts, _y_label((scale.begin + scale.end) / 2, label)))


def _y_label(middle: float, label: str) -> Markup:
    return Markup(
        '<text class="axis" transform="translate(13 {:.1f}) rotate(-90)" text-anchor="middle">{}</text>'
    ).format(middle, label)


def line_plot(
    labels: PlotLabels,
    lines: Sequence[PlotLine],
    *,
    areas: Sequence[Area] = (),
    marks: Sequence[tuple[float, str, str]] = (),
    from_zero: bool = False,
    is_time: bool = False,
) -> Markup:
    """Return a plot of lines over steps or seconds; thinning keeps extremes and gaps.

    Args:
        labels: The texts of the plot.
        lines: The lines; arrow keys read out the first.
        areas: Areas below the lines.
        marks: Vertical marks, as (x, style, title).
        from_zero: Whether the y axis begins at zero.
        is_time: Whether x values are seconds.
    """
    xs = [x for line in lines for x, _ in line.points] or [0.0, 1.0]
    values = [v for line in lines for _, v in line.points if v is not None]
    values += [
        v for area in areas for column in (area.least, area.most) for v in column if v is not None
    ]
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    low, high = min(xs), max(xs)
    across = Scale(low=low, high=high if high > low else low + 1, begin=_LEFT, end=right)
    up = value_scale(values, bottom, _TOP, from_zero=from_zero)
    label = f"{labels.y} (log scale)" if up.is_log else labels.y
    places = (
        time_ticks(across)
        if is_time
        else [(v, f"{v:,.0f}") for v, _ in ticks(across, 6) if v == int(v)]
    )
    body = [_x_axis(across, places, _TOP, bottom, labels.x), _y_axis(up, _LEFT, right, label)]
    band = Markup('<path class="band" d="{}"/>')
    body += [band.format(_area(area, across, up)) for area in areas]
    mark = Markup('<path class="{}" d="M{:.1f} {}V{}"><title>{}</title></path>')
    body += [mark.format(style, across.at(x), _TOP, bottom, title) for x, style, title in marks]
    way = Markup('<path class="{}" d="{}"{}><title>{}</title></path>')
    for number, line in enumerate(lines):
        more = Markup(" data-read=1") if number == 0 else _NOTHING
        body.append(way.format(line.style, _way(line, across, up), more, line.name))
    body.append(
        Markup(
            '<g class="cursor" visibility="hidden"><path d="M0 {}V{}"/><circle r="4"/></g>'
        ).format(_TOP, bottom)
    )
    data = Markup(
        ' data-x="{:.9g} {:.9g} {} {}" data-y="{:.9g} {:.9g} {} {} {}" data-axes="{}|{}"'
    ).format(
        across.low,
        across.high,
        _LEFT,
        right,
        up.low,
        up.high,
        bottom,
        _TOP,
        int(up.is_log),
        labels.x,
        labels.y,
    )
    return _svg(labels, WIDTH, HEIGHT, body, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A single point; `style` is a class of the style sheet."""

    x: float
    y: float
    title: str
    style: str = "dot"


def dot_plot(labels: PlotLabels, dots: Sequence[Dot], names: Sequence[str] = ()) -> Markup:
    """Return a plot of points.

    Args:
        labels: The texts of the plot.
        dots: The points; the last one is drawn on top.
        names: The names of the x values 0, 1, ..., if these are categories.
    """
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    across = value_scale([dot.x for dot in dots], _LEFT + 8, right)
    if names:
        across = Scale(low=-0.5, high=len(names) - 0.5, begin=_LEFT, end=right)
    up = value_scale([dot.y for dot in dots], bottom, _TOP)
    places = [(float(at), name) for at, name in enumerate(names)] or ticks(across, 6)
    x, y = (
        f"{label} (log scale)" if scale.is_log else label
        for label, scale in ((labels.x, across), (labels.y, up))
    )
    body = [_x_axis(across, places, _TOP, bottom, x), _y_axis(up, _LEFT, right, y)]
    circle = Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="4.5"><title>{}</title></circle>')
    body += [circle.format(d.style, across.at(d.x), up.at(d.y), d.title) for d in dots]
    return _svg(labels, WIDTH, HEIGHT, body)


def _way(line: PlotLine, across: Scale, up: Scale) -> str:
    """Return the path of a line, with gaps where there is no value."""
    parts: list[str] = []
    is_open = False
    for x, value in thinned(line.points, _POINTS):
        if value is None:
            is_open = False
            continue
        here = f"{across.at(x):.1f} {up.at(value):.1f}"
        parts.append(f"{'L' if is_open else 'M'}{here}")
        is_open = True
    if len(parts) == 1:  # a single point is drawn too
        parts.append("h.1")
    return "".join(parts)


def _area(area: Area, across: Scale, up: Scale) -> str:
    parts: list[str] = []
    stretch: list[tuple[float, float, float]] = []

    def close() -> None:
        if stretch:
            there = "L".join(f"{x:.1f} {b:.1f}" for x, _, b in stretch)
            back = "L".join(f"{x:.1f} {a:.1f}" for x, a, _ in reversed(stretch))
            parts.append(f"M{there}L{back}z")
            stretch.clear()

    for x, least, most in zip(area.xs, area.least, area.most, strict=True):
        if least is None or most is None:
            close()
        else:
            stretch.append((across.at(x), up.at(least), up.at(most)))
    close()
    return "".join(parts)


def bar_plot(
    labels: PlotLabels,
    rows: Sequence[PlotBar],
    *,
    is_time: bool,
    left: float = 150,
) -> Markup:
    """Return a plot of horizontal bars, such as attempts over time or phases of ranks."""
    high = max((piece.end for row in rows for piece in row.pieces), default=1.0)
    across = Scale(low=0.0, high=high if high > 0 else 1.0, begin=left, end=1000 - _RIGHT)
    bottom = 8 + _ROW * len(rows)
    places = time_ticks(across, 8) if is_time else ticks(across, 6)
    bars = (_bar(row, across, 8 + _ROW * number, left) for number, row in enumerate(rows))
    parts = [_x_axis(across, places, 4, bottom, labels.x), *bars]
    return _svg(labels, 1000, bottom + 36, parts)


def _bar(row: PlotBar, across: Scale, top: float, left: float) -> Markup:
    y = top + (_ROW - _BAR) / 2 - 2
    style = "name strong" if row.is_marked else "name"
    parts = [
        Markup('<text class="{}" x="{:.0f}" y="{:.1f}" text-anchor="end">{}</text>').format(
            style, left - 8, y + 11, row.name
        )
    ]
    for piece in row.pieces:
        x, end = across.at(piece.begin), across.at(piece.end)
        parts.append(
            Markup(
                '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}"><title>{}</title></rect>'
            ).format(piece.style, x, y, max(end - x, 0.6), _BAR, piece.title)
        )
    for sign in row.signs:
        x, middle = across.at(sign), y + _BAR / 2
        parts.append(
            Markup('<path class="sign" d="M{:.1f} {:.1f}l10 10m0 -10l-10 10"/>').format(
                x - 5, middle - 5
            )
        )
    if row.words:
        last = max((across.at(piece.end) for piece in row.pieces), default=left)
        room_right = across.end - last
        is_right = room_right >= last - left
        x = last + 10 if is_right else min(across.at(piece.begin) for piece in row.pieces) - 8
        room = (room_right if is_right else x - left) / 6.4
        words = row.words if len(row.words) <= room else row.words[: max(int(room) - 1, 0)] + "…"
        anchor = "start" if is_right else "end"
        if room > 12:
            parts.append(
                Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
                    x, y + 11, anchor, words
                )
            )
    return _NOTHING.join(parts)


def columns(
    labels: PlotLabels, names: Sequence[str], layers: Sequence[tuple[str, Sequence[float]]]
) -> Markup:
    """Return a plot of stacked columns, one for each rank, with a single path for each layer.

    Args:
        labels: The texts of the plot.
        names: The names of the columns.
        layers: The layers from the bottom, as (style, value of each column).
    """
    count, right = len(names), 1000 - _RIGHT
    totals = [sum(values[n] for _, values in layers) for n in range(count)]
    bottom = HEIGHT - _BOTTOM
    up = value_scale(totals, bottom, _TOP, from_zero=True)
    across = Scale(low=0, high=max(count, 1), begin=_LEFT, end=right)
    gap = 0.15 if count <= 128 else 0.0
    places = [
        (v + 0.5, names[int(v)])
        for v, _ in ticks(Scale(low=0, high=max(count - 1, 1), begin=0, end=1), 10)
        if v == int(v) < count
    ]
    parts = [_x_axis(across, places, _TOP, bottom, labels.x), _y_axis(up, _LEFT, right, labels.y)]
    base = [0.0] * count
    for style, values in layers:
        pieces = []
        for n, value in enumerate(values):
            if value > 0:
                x, end = across.at(n + gap / 2), across.at(n + 1 - gap / 2)
                top, foot = up.at(base[n] + value), up.at(base[n])
                pieces.append(f"M{x:.1f} {foot:.1f}V{top:.1f}H{end:.1f}V{foot:.1f}z")
            base[n] += value
        parts.append(Markup('<path class="{}" d="{}"/>').format(style, "".join(pieces)))
    return _svg(labels, 1000, HEIGHT, parts)


def heat_plot(
    labels: PlotLabels,
    rows: Sequence[Sequence[float | None]],
    *,
    span_s: float | None,
    unit: str,
) -> Markup:
    """Return a heat map of ranks (downwards) over time, or of nodes by nodes.

    The scale ends at the 99th percentile, so that one spike does not hide the rest, and covers at
    least 20 % on each side of its middle.

    Args:
        labels: The texts of the plot.
        rows: A row for each rank or node; None where there is no value.
        span_s: The seconds of one column; None if columns are counted.
        unit: The unit of the values.
    """
    known = sorted(value for row in rows for value in row if value is not None)
    low = known[0] if known else 0.0
    high = known[min(len(known) - 1, int(len(known) * 0.99))] if known else 1.0
    middle = (low + high) / 2  # values that differ by less than a fifth of it look alike
    low, high = min(low, 0.8 * middle), max(high, 1.2 * middle)
    high = high if high > low else low + 1
    height = min(max(len(rows) * 3, 90), 420)
    num_spans = max(map(len, rows), default=1)
    across = Scale(low=0, high=num_spans * (span_s or 1), begin=_LEFT, end=1000 - 110)
    along = time_ticks(across) if span_s is not None else _whole_ticks(across)
    bottom = _TOP + height
    count = len(rows)
    places = _whole_ticks(Scale(low=0, high=max(count - 1, 1), begin=0, end=1))
    parts = [
        Markup(
            '<image href="{}" x="{}" y="{}" width="{:.1f}" height="{}" preserveAspectRatio="none"/>'
        ).format(heatmap_png(rows, low, high), _LEFT, _TOP, across.end - _LEFT, height),
        _x_axis(across, along, bottom, bottom + 4, labels.x),
    ]
    for value, words in places:
        y = _TOP + (value + 0.5) * height / max(count, 1)
        parts.append(
            Markup('<text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
                _LEFT - 6, y + 4, words
            )
        )
    parts += [_y_label(_TOP + height / 2, labels.y), _colour_key(low, high, unit, height)]
    return _svg(labels, 1000, bottom + 40, parts)


def _whole_ticks(scale: Scale) -> list[tuple[float, str]]:
    return [(value, f"{value:.0f}") for value, _ in ticks(scale, 6) if value == int(value)]


def _colour_key(low: float, high: float, unit: str, height: float) -> Markup:
    """Return the colour key next to a heat map."""
    left, num = 1000 - 92, 16
    step = (height - 4) / num
    parts = []
    for n in range(num):
        red, green, blue = colour_of((n + 0.5) / num)
        y = _TOP + height - step * (n + 1)
        parts.append(
            Markup(
                '<rect x="{}" y="{:.1f}" width="14" height="{:.1f}" fill="rgb({},{},{})"/>'
            ).format(left, y, step + 0.5, red, green, blue)
        )
    for share in (0.0, 0.5, 1.0):
        y = _TOP + height - (height - 4) * share
        sign = "≥ " if share == 1 else ""
        words = f"{sign}{figure(low + (high - low) * share)} {unit}"
        parts.append(
            Markup('<text x="{}" y="{:.1f}">{}</text>').format(left + 19, max(y, _TOP + 9), words)
        )
    return _NOTHING.join(parts)
