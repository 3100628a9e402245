"""Metrics by name: the values of each, the newest one, and since which step that is not finite."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

_MOST_POINTS = 2000  # of a series; then every second one is left out
_MOST_SERIES = 100
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


@dataclass(slots=True)
class Series:
    """The values of one metric.

    Attributes:
        points: Steps and values; of very many some are left out.
        newest: The last of all of them.
        since: The step since which none is finite; None while the newest is.
    """

    points: list[tuple[int, float]] = field(default_factory=list)
    newest: tuple[int, float] = (0, 0.0)
    since: int | None = None
    _every: int = 1
    _num_points: int = 0

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        self.newest = (step, value)
        if math.isfinite(value):
            self.since = None
        elif self.since is None:
            self.since = step
        self._num_points += 1
        if self._num_points % self._every == 0:
            self.points.append(self.newest)
        if len(self.points) > _MOST_POINTS:
            self.points, self._every = self.points[::2], self._every * 2

    def go_back(self, step: int) -> None:
        """Forget the values after a step: those steps are done again."""
        self.points = [point for point in self.points if point[0] <= step]
        if self.newest[0] > step and self.points:
            self.newest, self.since = self.points[-1], bad_since(self.points)


class Metrics:
    """All metrics of a record."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """Take a line of the record."""
        numbers = {str(name): float(value) for name, value in values.items()}
        for name, number in numbers.items():
            if name in self._series or len(self._series) < _MOST_SERIES:
                self._series.setdefault(name, Series()).add(step, number)

    def go_back(self, step: int) -> None:
        """Forget what was logged after a step: an attempt goes on from there."""
        for name, series in list(self._series.items()):
            series.go_back(step)
            if series.newest[0] > step:
                del self._series[name]

    def series(self) -> dict[str, Series]:
        """Return the series by name, in the order in which views show them."""
        return {name: self._series[name] for name in sorted(self._series, key=place_of)}

    def values(self) -> dict[str, float]:
        """Return the newest value of each metric."""
        return {name: series.newest[1] for name, series in self.series().items()}

    def not_finite(self) -> dict[str, int]:
        """Return the metrics whose newest value is not finite, and the step since which that is so."""
        found = {name: series.since for name, series in self.series().items()}
        return {name: since for name, since in found.items() if since is not None}
