"""Metrics by name: the values of each, the newest one, and since which step that is not finite."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeVar

from torchmuster.model.display.text import printable

# Make a long series short without losing its extremes: 100,000 steps keep their spikes on a plot of 900 pixels.


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


# Take values from a record that may be of another version, half written or made to deceive: by type, bounded, printable.


MAX_TEXT = 2000


def text(value: object, most: int = MAX_TEXT) -> str:
    """Return a text without control characters, cut; empty where it is none."""
    if not isinstance(value, str):
        return ""
    cut = value if len(value) <= most else f"{value[:most]} ..."
    return printable(cut.encode(errors="replace").decode())


def lines(value: object, most_lines: int = 60) -> tuple[str, ...]:
    """Return the lines of a text, or of a list of texts; of very many the first and the last."""
    parts = value.splitlines() if isinstance(value, str) else listed(value)
    found = [text(part, 500) for part in parts if isinstance(part, str)]
    if len(found) > most_lines:
        half = most_lines // 2
        left = len(found) - 2 * half
        found = [*found[:half], f"... {left} lines ...", *found[-half:]]
    return tuple(found)


def number(value: object) -> float | None:
    """Return a finite number; None where it is none."""
    if type(value) is float:  # nearly all
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: object) -> int | None:
    """Return a whole number that is not negative; None where it is none."""
    if type(value) is int and 0 <= value < 2**53:  # nearly all
        return value
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**53 else None


def listed(value: object) -> list[Any]:
    """Return a list; empty where it is none."""
    return value if isinstance(value, list) else []


def mapped(value: object) -> Mapping[str, Any]:
    """Return an object; empty where it is none."""
    return value if isinstance(value, dict) else {}


def several(count: int, one: str, many: str | None = None) -> str:
    """Return `1 line`, `3 lines`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def ends_of(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Return the least and the most of the known values; None where none is known."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


MOST_POINTS = 2000  # of a series, once it has twice as many
MOST_REDONE = 500
MOST_NOT_FINITE = 5
_MOST_SERIES, _LONGEST_NAME = 100, 200
T = TypeVar("T")


def place_of(name: str) -> int:
    """Return where views show a metric: `loss`, then other losses, then the rest, each in its order."""
    return 0 if name == "loss" else 1 if "loss" in name.lower() else 2


def loss_of(names: Iterable[str]) -> str | None:
    """Return the name of a training's loss: a run whose loss is not finite learns nothing, while a score may be undefined."""
    first = min(names, key=place_of, default="")
    return first if place_of(first) < 2 else None


def bad_loss(values: Mapping[str, float], not_finite: Mapping[str, int]) -> str:
    """Return `loss nan (since step 100)`; empty where the loss is finite, or where there is none."""
    name = loss_of(values)
    if name is None or name not in not_finite:
        return ""
    return f"{name} {values[name]}{since_words(not_finite[name])}"


def since_words(step: int | None) -> str:
    """Return what follows a value that is not finite: ` (since step 100)`; nothing after one that is."""
    return f" (since step {step})" if step is not None else ""


def bad_since(points: Sequence[tuple[int, float | None]]) -> int | None:
    """Return the step since which no value is finite; None where the last one is."""
    since = None
    for step, value in reversed(points):
        if value is not None and math.isfinite(value):
            break
        since = step
    return since


def with_later(means: Mapping[str, T], later: Mapping[str, T]) -> dict[str, T]:
    """Return the means of an epoch with what was logged after its last step, which replaces none of them."""
    return {**means, **later, **means}


def numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, finite or not."""
    return {
        str(name): float(value)
        for name, value in values.items()
        if type(value) is float or number(value) is not None
    }


@dataclass(slots=True)
class Series:
    """The values of one metric: bounded, of very many the extremes of each stretch are kept.

    Attributes:
        points: Steps and values that count.
        newest: The last of all of them.
        since: The step since which none is finite; None while the newest is.
        num_points: How many count; of very many about.
        redone: Those of steps that a later attempt did again.
        not_finite: The first that are not finite, done again or not.
        num_not_finite: How many there are of these.
    """

    points: list[tuple[int, float]] = field(default_factory=list)
    newest: tuple[int, float] = (0, 0.0)
    since: int | None = None
    num_points: int = 0
    redone: list[tuple[int, float]] = field(default_factory=list)
    not_finite: list[tuple[int, float]] = field(default_factory=list)
    num_not_finite: int = 0

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        self.newest = (step, value)
        if math.isfinite(value):
            self.since = None
        else:
            self.since = step if self.since is None else self.since
            self.num_not_finite += 1
            if self.num_not_finite <= MOST_NOT_FINITE:
                self.not_finite.append(self.newest)
        self.num_points += 1
        self.points.append(self.newest)
        if len(self.points) > 2 * MOST_POINTS:
            self.points = thinned(self.points, MOST_POINTS)

    def go_back(self, step: int) -> None:
        """Take the values after a step as those of steps that are done again."""
        kept = [point for point in self.points if point[0] <= step]
        self.redone += [point for point in self.points if point[0] > step]
        if len(self.redone) > 2 * MOST_REDONE:
            self.redone = thinned(self.redone, MOST_REDONE)
        self.num_points = round(self.num_points * len(kept) / max(len(self.points), 1))
        self.points = kept
        if self.newest[0] > step:
            self.since = bad_since(kept)
            self.newest = kept[-1] if kept else self.newest


@dataclass(slots=True)
class Metrics:
    """All metrics of a record."""

    by_name: dict[str, Series] = field(default_factory=dict)

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """Take a line of the record; what is no number is left out."""
        for name, value in numbers_in(values).items():
            key = name[:_LONGEST_NAME]
            series = self.by_name.get(key)
            if series is None and len(self.by_name) >= _MOST_SERIES:
                continue
            if (
                series is None or not series.points
            ):  # what counts is in the order of its first value
                self.by_name.pop(key, None)
                self.by_name[key] = series = series or Series()
            series.add(step, value)

    def go_back(self, step: int) -> None:
        """Forget what was logged after a step: an attempt goes on from there."""
        for series in self.by_name.values():
            series.go_back(step)

    def series(self) -> dict[str, Series]:
        """Return the series that count by name, in the order in which views show them."""
        # All steps of one may be done again.
        names = [name for name, series in self.by_name.items() if series.points]
        return {name: self.by_name[name] for name in sorted(names, key=place_of)}

    def values(self) -> dict[str, float]:
        """Return the newest value of each metric."""
        return {name: series.newest[1] for name, series in self.series().items()}

    def not_finite(self) -> dict[str, int]:
        """Return the metrics whose newest value is not finite, and the step since which that is so."""
        found = {name: series.since for name, series in self.series().items()}
        return {name: since for name, since in found.items() if since is not None}
