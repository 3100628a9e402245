"""The story of a training, from `training.jsonl`, and of its ranks over time, from `samples.jsonl`."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.model.codec import moment_of
from torchmuster.core.model.text import place_of
from torchmuster.launcher.model.run import (
    MOST_POINTS,
    MOST_REDONE,
    MOST_SAVES,
    LibraryStart,
    Series,
    TrainingState,
    number,
    text,
    thinned,
    whole,
)
from torchmuster.report import story

MAX_SERIES = 40


def when_reached(state: TrainingState, start: LibraryStart, step: int) -> float | None:
    """Return when an attempt reached a step, by its snapshots or metrics; None if it never did."""
    if step <= start.step:
        return start.at
    saved = next((save.at for save in reversed(state.saves) if save.step == step), None)
    reached = next((at for one, at in start.reached if one >= step), None)
    if saved is not None and (reached is None or saved <= reached) and saved >= start.at:
        return saved
    return reached


def training_story(state: TrainingState) -> story.TrainingStory | None:
    """Return the story of a training; None if the library has recorded no start."""
    if not state.starts:
        return None
    first = list(state.metrics.by_name)[:MAX_SERIES]
    epochs = sorted(state.epochs, key=lambda one: one.epoch)
    saves = sorted(state.saves, key=lambda one: one.step)
    return story.TrainingStory(
        step=state.starts[-1].last_step,
        steps_done=state.steps_done,
        is_finished=state.is_finished,
        series=tuple(
            _series(name, state.metrics.by_name[name]) for name in sorted(first, key=place_of)
        ),
        step_time=_series("step time", state.times) if state.times.points else None,
        epochs=tuple(
            story.EpochStory(
                epoch=one.epoch,
                step=one.step,
                elapsed_s=one.elapsed_s,
                values=_numbers_of(one.values),
                samples=one.samples,
                lost=one.lost,
                twice=one.twice,
                is_whole=one.is_whole,
            )
            for one in epochs
        ),
        num_epochs=state.num_epochs,
        saves=tuple(
            story.SaveStory(step=one.step, at=one.at, blocked_s=one.blocked_s, done_at=one.done_at)
            for one in saves[-MOST_SAVES:]
            if one.at is not None
        ),
        num_saves=state.num_saves,
        blocked_s=state.blocked_s,
        order=tuple((text(name, 80), text(value, 200)) for name, value in state.order.items()),
        folder=text(state.folder),
        num_dropped=state.num_dropped,
    )


def _numbers_of(values: Mapping[str, float]) -> tuple[tuple[str, float | None], ...]:
    return tuple((text(name, 80), number(value)) for name, value in [*values.items()][:MAX_SERIES])


def _series(name: str, series: Series) -> story.SeriesStory:
    kept, again = thinned(series.points, MOST_POINTS), thinned(series.redone, MOST_REDONE)
    since = series.since if series.points else None
    return story.SeriesStory(
        name=text(name, 80),
        steps=tuple(step for step, _ in kept),
        values=tuple(number(value) for _, value in kept),
        num_points=series.num_points,
        redone_steps=tuple(step for step, _ in again),
        redone_values=tuple(number(value) for _, value in again),
        not_finite=tuple((step, _word(value)) for step, value in series.not_finite),
        num_not_finite=series.num_not_finite,
        bad_since=(since, _word(series.newest[1])) if since is not None else None,
    )


def _word(value: float) -> str:
    return "nan" if math.isnan(value) else f"{value:+.0f}"


# `samples.jsonl`: what each rank did in total, and over time in a limited number of spans.
#
# The file may have any number of lines. The spans double in width when there are too many, so one
# pass and little memory are enough.


MAX_SPANS = 240
MAX_RANKS = 4096
_LEAST_WIDTH_S = 10.0  # the head does not write more often
_PHASES = ("data_s", "forward_s", "rest_s", "wait_s", "save_s", "evaluate_s")
_GAUGES = ("cpus", "rss_mib", "gpu_percent", "gpu_mib")
_BANDS = (
    ("cpus", "processors used by a rank", ""),
    ("rss_mib", "memory of a rank", "MiB"),
    ("gpu_percent", "GPU utilization", "%"),
    ("gpu_mib", "GPU memory in use", "MiB"),
)

_NUMBERS = (int, float)  # compared by type: a boolean is not a number
_MOST = 1e15

Column = list[float]
Known = list[float | None]


@dataclass(slots=True)
class _Span:
    """Sums over the samples in a time span, by rank; gauges keep the maximum (memory) or mean."""

    num_ranks: int
    sums: dict[str, Column] = field(default_factory=dict)
    steps: Column = field(default_factory=list)
    phased_steps: Column = field(default_factory=list)  # steps whose phases are known
    gauges: dict[str, Known] = field(default_factory=dict)
    over_s: dict[str, float] = field(default_factory=dict)
    since: float = math.inf  # when the time of its samples began, which may be in earlier spans

    def add(self, sums: Mapping[str, Column], steps: Column, phased_steps: Column) -> None:
        for name, column in sums.items():
            self.sums[name] = _added(self.sums.get(name, []), column)
        self.steps = _added(self.steps, steps)
        self.phased_steps = _added(self.phased_steps, phased_steps)

    def gauge(self, name: str, column: Known, over_s: float) -> None:
        before = self.gauges.get(name)
        if before is None:
            self.gauges[name], self.over_s[name] = column, over_s
        else:
            had_s = self.over_s[name]
            mean = name in ("cpus", "gpu_percent")
            self.gauges[name] = (
                _joined(before, column, had_s, over_s) if mean else _greater(before, column)
            )
            self.over_s[name] = had_s + over_s

    def take(self, other: "_Span") -> None:
        self.since = min(self.since, other.since)
        self.num_ranks = max(self.num_ranks, other.num_ranks)
        self.add(other.sums, other.steps, other.phased_steps)
        for name, column in other.gauges.items():
            self.gauge(name, column, other.over_s[name])


@dataclass(slots=True)
class SampleRecord:
    """Sums over `samples.jsonl`; `summary` returns them as an immutable value."""

    began: float | None = None
    width_s: float = _LEAST_WIDTH_S
    num_samples: int = 0
    num_bad: int = 0
    has_phases: bool = False
    _spans: dict[int, _Span] = field(default_factory=dict)
    _attempt: int | None = None
    _steps_before: Known = field(default_factory=list)
    _nodes: list[str] = field(default_factory=list)
    _nodes_before: list[Any] = field(default_factory=list)

    def take(self, line: Mapping[str, Any]) -> None:
        """Add a line: a `RankSample`, possibly of another version."""
        at, nodes = moment_of(line.get("time")), line.get("nodes")
        if at is None or not isinstance(nodes, list) or not 0 < len(nodes) <= MAX_RANKS:
            self.num_bad += 1
            return
        self.num_samples += 1
        size, over_s = len(nodes), number(line.get("over_s")) or 0.0
        if self.began is None:
            self.began = at - over_s
        if nodes != self._nodes_before:
            self._nodes_before = nodes
            self._nodes[:size] = [text(node, 80) for node in nodes]
        steps, is_known = self._steps(line, size)
        sums = {name: _zeros(line.get(name), size) for name in _PHASES}
        sums = {name: _where_known(column, is_known) for name, column in sums.items() if column}
        phased_steps = _where_known(steps, is_known)
        self.has_phases = self.has_phases or bool(sums)
        if io := _zeros(line.get("io_mib"), size):
            sums["io_mib"] = io
        span = self._span(at, size)
        span.since = min(span.since, at - over_s)
        span.add(sums, steps, phased_steps)
        for name in _GAUGES:
            column = _knowns(line.get(name), size)
            if column is not None and name == "rss_mib":
                column = [one or None for one in column]  # nothing: the process is gone
            if column is not None:
                span.gauge(name, column, max(over_s, 1e-3))

    def _steps(self, line: Mapping[str, Any], size: int) -> tuple[Column, list[bool]]:
        """Return each rank's steps since the previous sample, and whether their phases are known.

        They are not known in the first sample with steps of a rank, because the record does not say
        with which step its phases began.
        """
        now = _knowns(line.get("steps_here"), size) or [None] * size
        rest = _knowns(line.get("rest_s"), size) or [None] * size
        attempt = whole(line.get("attempt"))
        before = self._steps_before if attempt == self._attempt else []
        before = before if len(before) == size else [None] * size
        self._attempt, self._steps_before = attempt, now
        steps = [max(0.0, (a or 0.0) - (b or 0.0)) for a, b in zip(now, before, strict=True)]
        is_known = [bool(b) and r is not None for b, r in zip(before, rest, strict=True)]
        return steps, is_known

    def _span(self, at: float, size: int) -> _Span:
        place = max(0, int((at - (self.began or at)) / self.width_s))
        while place >= MAX_SPANS:
            self._widen()
            place //= 2
        span = self._spans.setdefault(place, _Span(num_ranks=size))
        span.num_ranks = max(span.num_ranks, size)
        return span

    def _widen(self) -> None:
        self.width_s *= 2
        spans: dict[int, _Span] = {}
        for place in sorted(self._spans):
            if place // 2 in spans:
                spans[place // 2].take(self._spans[place])
            else:
                spans[place // 2] = self._spans[place]
        self._spans = spans

    def summary(self) -> story.RanksStory | None:
        """Return the summary; None without samples."""
        if self.began is None or not self._spans:
            return None
        num_spans = max(self._spans) + 1
        spans = self._filled_spans(num_spans)
        own = [_own_ms(span) if span is not None else [] for span in spans]
        size = len(self._nodes)
        return story.RanksStory(
            began=self.began,
            width_s=self.width_s,
            num_spans=num_spans,
            num_samples=self.num_samples,
            has_phases=self.has_phases,
            totals=self._totals(),
            own_ms=tuple(
                tuple(column[rank] if rank < len(column) else None for column in own)
                for rank in range(size)
            )
            if self.has_phases
            else (),
            bands=tuple(band for row in _BANDS if (band := _band(spans, *row)) is not None),
        )

    def _filled_spans(self, num_spans: int) -> list[_Span | None]:
        """Return all spans; a sample that covers several spans is in each of them."""
        found: list[_Span | None] = [self._spans.get(place) for place in range(num_spans)]
        following: _Span | None = None
        for place in range(num_spans - 1, -1, -1):
            if found[place] is not None:
                following = found[place]
            elif (
                following is not None
                and following.since < (self.began or 0.0) + (place + 1) * self.width_s
            ):
                found[place] = following
        return found

    def _totals(self) -> tuple[story.RankTotals, ...]:
        whole_run = _Span(num_ranks=len(self._nodes))
        for span in self._spans.values():
            whole_run.take(span)
        own = _own_ms(whole_run) if self.has_phases else []
        known = [value for value in own if value is not None]
        median = statistics.median(known) if known else 0.0
        return tuple(
            _total(rank, node, whole_run, own, median) for rank, node in enumerate(self._nodes)
        )


def _total(rank: int, node: str, span: _Span, own: Known, median: float) -> story.RankTotals:
    def summed(name: str) -> float:
        column = span.sums.get(name, [])
        return round(column[rank], 3) if rank < len(column) else 0.0

    def gauged(name: str) -> float | None:
        column = span.gauges.get(name, [])
        return column[rank] if rank < len(column) else None

    own_ms = own[rank] if rank < len(own) else None
    rss, gpu_mib, percent, cpus = (gauged(n) for n in ("rss_mib", "gpu_mib", "gpu_percent", "cpus"))
    return story.RankTotals(
        rank=rank,
        node=node,
        steps=int(span.steps[rank]) if rank < len(span.steps) else 0,
        phased_steps=int(span.phased_steps[rank]) if rank < len(span.phased_steps) else 0,
        data_s=summed("data_s"),
        forward_s=summed("forward_s"),
        after_s=round(max(0.0, summed("rest_s") - summed("wait_s")), 3),
        wait_s=summed("wait_s"),
        save_s=summed("save_s"),
        evaluate_s=summed("evaluate_s"),
        own_s=round(own_ms / 1000, 6) if own_ms is not None else None,
        over_median=round(own_ms / median - 1, 4) if own_ms is not None and median > 0 else None,
        cpus=round(cpus, 2) if cpus is not None else None,
        rss_mib=int(rss) if rss is not None else None,
        io_mib=summed("io_mib") if "io_mib" in span.sums else None,
        gpu_percent=round(percent, 1) if percent is not None else None,
        gpu_mib=int(gpu_mib) if gpu_mib is not None else None,
    )


def _own_ms(span: _Span) -> Known:
    """Return each rank's own work per step in ms; None for ranks without steps."""
    zeros = [0.0] * span.num_ranks
    data, forward, rest, wait = (
        _filled(span.sums.get(n, zeros), span.num_ranks) for n in _PHASES[:4]
    )
    steps = _filled(span.phased_steps, span.num_ranks)
    return [
        round(1000 * max(0.0, d + f + r - w) / n, 3) if n > 0 else None
        for d, f, r, w, n in zip(data, forward, rest, wait, steps, strict=True)
    ]


def _band(spans: Sequence[_Span | None], key: str, name: str, unit: str) -> story.Band | None:
    rows: list[tuple[float, float, float] | None] = []
    for span in spans:
        known = [v for v in (span.gauges.get(key, []) if span is not None else []) if v is not None]
        rows.append((min(known), statistics.median(known), max(known)) if known else None)
    if not any(rows):
        return None
    least, median, most = (tuple(round(r[i], 3) if r else None for r in rows) for i in range(3))
    return story.Band(name=name, unit=unit, least=least, median=median, most=most)


def _knowns(value: object, size: int) -> Known | None:
    """Return a column of numbers; None if it is missing, of another length, or has no number."""
    if not isinstance(value, list) or len(value) != size:
        return None
    found = [
        one if type(one) in _NUMBERS and -_MOST < one < _MOST else number(one) for one in value
    ]
    return found if any(one is not None for one in found) else None


def _zeros(value: object, size: int) -> Column:
    found = _knowns(value, size)
    return [one if one is not None and one > 0 else 0.0 for one in found] if found else []


def _where_known(column: Column, is_known: Sequence[bool]) -> Column:
    return [one if known else 0.0 for one, known in zip(column, is_known, strict=True)]


def _filled(column: Sequence[float], size: int) -> Sequence[float]:
    return column if len(column) == size else [*column[:size], *[0.0] * (size - len(column))]


def _added(one: Column, other: Column) -> Column:
    if len(one) < len(other):
        one, other = other, one
    return [a + b for a, b in zip(one, other, strict=False)] + one[len(other) :]


def _joined(one: Known, other: Known, one_s: float, other_s: float) -> Known:
    """Return the means by rank, weighted by the two durations."""
    longer = one if len(one) >= len(other) else other
    total = one_s + other_s
    means = [
        b if a is None else a if b is None else (a * one_s + b * other_s) / total
        for a, b in zip(one, other, strict=False)
    ]
    return means + longer[len(means) :]


def _greater(one: Known, other: Known) -> Known:
    longer = one if len(one) >= len(other) else other
    both = [
        b if a is None else a if b is None else max(a, b) for a, b in zip(one, other, strict=False)
    ]
    return both + longer[len(both) :]


def read_samples(lines: Iterable[Mapping[str, Any]]) -> SampleRecord:
    """Return the summary of all lines of a record."""
    record = SampleRecord()
    for line in lines:
        record.take(line)
    return record
