"""Make a long series short without losing its extremes: 100,000 steps keep their spikes on a plot of 900 pixels."""

from collections.abc import Sequence
from math import isfinite
from typing import TypeVar

Point = TypeVar("Point", bound=tuple[float, float | None])


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most about `most` points: of each stretch its first, its least, its greatest, and one of those that are missing.

    Args:
        points: (step, value) by step; None or not finite where a value was not.
        most: At least 8.
    """
    if len(points) <= most:
        return list(points)
    num_stretches = max(most // 4, 1)
    size = len(points) / num_stretches
    found: list[Point] = []
    for stretch in range(num_stretches):
        part = points[round(stretch * size) : round((stretch + 1) * size)]
        if part:
            found += _telling(part)
    if found[-1] != points[-1]:
        found.append(points[-1])
    return found


def _telling(part: Sequence[Point]) -> list[Point]:
    known = [p for p, (_, value) in enumerate(part) if value is not None and isfinite(value)]
    places = {0}
    if known:
        places |= {
            min(known, key=lambda p: part[p][1] or 0.0),
            max(known, key=lambda p: part[p][1] or 0.0),
        }
    if len(known) < len(part):
        places.add(next(p for p, (_, v) in enumerate(part) if v is None or not isfinite(v)))
    return [part[place] for place in sorted(places)]
