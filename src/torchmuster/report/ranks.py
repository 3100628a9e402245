"""Read `samples.jsonl`: what each rank did in all, and how it stood over time, in a fixed number of spans.

The file may have any number of lines. A span doubles when there are too many, so one pass and little memory are enough.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.model.event import moment_of
from torchmuster.model.record.loose import number, text, whole
from torchmuster.report.story import Band, RanksTold, RankTotals

MAX_SPANS = 240
MAX_RANKS = 4096
_LEAST_WIDTH_S = 10.0  # the head writes no more often
_PHASES = ("data_s", "forward_s", "rest_s", "wait_s", "save_s", "evaluate_s")
_GAUGES = ("cpus", "rss_mib", "gpu_percent", "gpu_mib")
_BANDS = (
    ("cpus", "processors used by a rank", ""),
    ("rss_mib", "memory of a rank", "MiB"),
    ("gpu_percent", "GPU utilization", "%"),
    ("gpu_mib", "GPU memory in use", "MiB"),
)

_NUMBERS = (int, float)  # by type: a boolean is none
_MOST = 1e15

Column = list[float]
Known = list[float | None]


@dataclass(slots=True)
class _Span:
    """Sums over the samples of a span of time, by rank; gauges keep the greatest memory and the mean of the others."""

    num_ranks: int
    sums: dict[str, Column] = field(default_factory=dict)
    steps: Column = field(default_factory=list)
    told_steps: Column = field(default_factory=list)  # those of which phases are known
    gauges: dict[str, Known] = field(default_factory=dict)
    over_s: dict[str, float] = field(default_factory=dict)
    since: float = math.inf  # when the time of its samples began, which may be spans before

    def add(self, sums: Mapping[str, Column], steps: Column, told_steps: Column) -> None:
        for name, column in sums.items():
            self.sums[name] = _added(self.sums.get(name, []), column)
        self.steps = _added(self.steps, steps)
        self.told_steps = _added(self.told_steps, told_steps)

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
        self.add(other.sums, other.steps, other.told_steps)
        for name, column in other.gauges.items():
            self.gauge(name, column, other.over_s[name])


@dataclass(slots=True)
class SampleRecord:
    """What the file says; `told` makes a value of it."""

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
        """Take a line: a `RankSample`, possibly of another version."""
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
        steps, is_told = self._steps(line, size)
        sums = {name: _zeros(line.get(name), size) for name in _PHASES}
        sums = {name: _of_told(column, is_told) for name, column in sums.items() if column}
        told_steps = _of_told(steps, is_told)
        self.has_phases = self.has_phases or bool(sums)
        if io := _zeros(line.get("io_mib"), size):
            sums["io_mib"] = io
        span = self._span(at, size)
        span.since = min(span.since, at - over_s)
        span.add(sums, steps, told_steps)
        for name in _GAUGES:
            column = _knowns(line.get(name), size)
            if column is not None and name == "rss_mib":
                column = [one or None for one in column]  # nothing: the process is gone
            if column is not None:
                span.gauge(name, column, max(over_s, 1e-3))

    def _steps(self, line: Mapping[str, Any], size: int) -> tuple[Column, list[bool]]:
        """Return the steps that each rank did since the sample before, and whether their phases are told.

        In the first sample in which a rank has done a step, its phases begin with some step of it that is not recorded.
        """
        now = _knowns(line.get("steps_here"), size) or [None] * size
        rest = _knowns(line.get("rest_s"), size) or [None] * size
        attempt = whole(line.get("attempt"))
        before = self._steps_before if attempt == self._attempt else []
        before = before if len(before) == size else [None] * size
        self._attempt, self._steps_before = attempt, now
        steps = [max(0.0, (a or 0.0) - (b or 0.0)) for a, b in zip(now, before, strict=True)]
        is_told = [bool(b) and r is not None for b, r in zip(before, rest, strict=True)]
        return steps, is_told

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

    def told(self) -> RanksTold | None:
        """Return the value; None where there is no sample."""
        if self.began is None or not self._spans:
            return None
        num_spans = max(self._spans) + 1
        spans = self._filled_spans(num_spans)
        own = [_own_ms(span) if span is not None else [] for span in spans]
        size = len(self._nodes)
        return RanksTold(
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
        """Return all spans; a sample that stands for several spans of time is in each of them."""
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

    def _totals(self) -> tuple[RankTotals, ...]:
        whole_run = _Span(num_ranks=len(self._nodes))
        for span in self._spans.values():
            whole_run.take(span)
        own = _own_ms(whole_run) if self.has_phases else []
        known = [value for value in own if value is not None]
        median = statistics.median(known) if known else 0.0
        return tuple(
            _total(rank, node, whole_run, own, median) for rank, node in enumerate(self._nodes)
        )


def _total(rank: int, node: str, span: _Span, own: Known, median: float) -> RankTotals:
    def summed(name: str) -> float:
        column = span.sums.get(name, [])
        return round(column[rank], 3) if rank < len(column) else 0.0

    def gauged(name: str) -> float | None:
        column = span.gauges.get(name, [])
        return column[rank] if rank < len(column) else None

    own_ms = own[rank] if rank < len(own) else None
    rss, gpu_mib, percent, cpus = (gauged(n) for n in ("rss_mib", "gpu_mib", "gpu_percent", "cpus"))
    return RankTotals(
        rank=rank,
        node=node,
        steps=int(span.steps[rank]) if rank < len(span.steps) else 0,
        told_steps=int(span.told_steps[rank]) if rank < len(span.told_steps) else 0,
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
    """Return the work of its own that each rank had in a step; None where it did none."""
    zeros = [0.0] * span.num_ranks
    data, forward, rest, wait = (
        _filled(span.sums.get(n, zeros), span.num_ranks) for n in _PHASES[:4]
    )
    steps = _filled(span.told_steps, span.num_ranks)
    return [
        round(1000 * max(0.0, d + f + r - w) / n, 3) if n > 0 else None
        for d, f, r, w, n in zip(data, forward, rest, wait, steps, strict=True)
    ]


def _band(spans: Sequence[_Span | None], key: str, name: str, unit: str) -> Band | None:
    rows: list[tuple[float, float, float] | None] = []
    for span in spans:
        known = [v for v in (span.gauges.get(key, []) if span is not None else []) if v is not None]
        rows.append((min(known), statistics.median(known), max(known)) if known else None)
    if not any(rows):
        return None
    least, median, most = (tuple(round(r[i], 3) if r else None for r in rows) for i in range(3))
    return Band(name=name, unit=unit, least=least, median=median, most=most)


def _knowns(value: object, size: int) -> Known | None:
    """Return a column of numbers; None where it is missing or of another length."""
    if not isinstance(value, list) or len(value) != size:
        return None
    found = [
        one if type(one) in _NUMBERS and -_MOST < one < _MOST else number(one) for one in value
    ]
    return found if any(one is not None for one in found) else None


def _zeros(value: object, size: int) -> Column:
    found = _knowns(value, size)
    return [one if one is not None and one > 0 else 0.0 for one in found] if found else []


def _of_told(column: Column, is_told: Sequence[bool]) -> Column:
    return [one if told else 0.0 for one, told in zip(column, is_told, strict=True)]


def _filled(column: Sequence[float], size: int) -> Sequence[float]:
    return column if len(column) == size else [*column[:size], *[0.0] * (size - len(column))]


def _added(one: Column, other: Column) -> Column:
    if len(one) < len(other):
        one, other = other, one
    return [a + b for a, b in zip(one, other, strict=False)] + one[len(other) :]


def _joined(one: Known, other: Known, one_s: float, other_s: float) -> Known:
    """Return the means over both times, by rank."""
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
    """Return what the lines of a record say."""
    record = SampleRecord()
    for line in lines:
        record.take(line)
    return record
