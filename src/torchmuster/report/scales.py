"""Axes of plots: where a value lies, and round numbers for its ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.report.words import figure, span

_LARGEST = 1e300  # so that a difference of two values stays finite
_LOG_FROM = 100.0  # greatest by least, above which an axis is logarithmic
_TIMES = (
    *(
        0.001,
        0.002,
        0.005,
        0.01,
        0.02,
        0.05,
        0.1,
        0.2,
        0.5,
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
    ),
    *(1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432800, 864000, 2592000, 31536000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From values to pixels."""

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
    """Return a value that can be drawn."""
    return min(max(value, -_LARGEST), _LARGEST)


def value_scale(
    values: Sequence[float], begin: float, end: float, *, from_zero: bool = False
) -> Scale:
    """Return a scale for values with a little room, logarithmic where they are all positive and far apart."""
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
    """Return (value, text) of round numbers on a scale."""
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
    """Return (seconds, text) of round times on a scale of seconds."""
    width = max(scale.high - scale.low, 1e-9)
    step = next((one for one in _TIMES if width / one <= count), width / count)
    if width < _TIMES[0]:
        step = width / count
    first = math.ceil(scale.low / step)
    values = [(first + n) * step for n in range(count + 2)]
    return [(v, span(v) if v else "0") for v in values if v <= scale.high]
