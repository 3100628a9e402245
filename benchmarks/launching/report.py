"""Samples, their medians, the tables that people read and the file that programs read."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launching.cases import FLOOR, Case, Metric
from launching.sides import COMMON_ENVIRONMENT, FORK_OPTIONS, TORCHRUN_ENVIRONMENT, TORCHRUN_OPTIONS

OURS = "muster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number of one side in one round.

    Attributes:
        value: None when the job was lost.
        lost: Why it was lost, empty otherwise.
    """

    metric: Metric
    side: str
    round: int
    value: float | None
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """The rounds of one metric on one side; the figures are None when all rounds were lost."""

    metric: Metric
    side: str
    num_rounds: int
    num_lost: int
    median: float | None
    lowest: float | None
    highest: float | None


def beyond_floor(samples: Sequence[Sample]) -> list[Sample]:
    """Return the starts less the `import torch` of the same round, as metrics of their own."""
    floors = {
        (sample.metric, sample.round): sample.value
        for sample in samples
        if sample.side == FLOOR and sample.metric.case == "start"
    }
    return [
        Sample(
            metric=Metric(case="start", name=f"{sample.metric.name}, less the floor", unit="s"),
            side=sample.side,
            round=sample.round,
            value=sample.value - floor,
        )
        for sample in samples
        if sample.side != FLOOR and sample.value is not None
        if (floor := floors.get((sample.metric, sample.round))) is not None
    ]


def summarize(samples: Sequence[Sample]) -> list[MetricSummary]:
    """Return one summary for each metric and side, in the order in which they came."""
    groups: dict[tuple[Metric, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.metric, sample.side), []).append(sample)
    return [_summary(metric, side, group) for (metric, side), group in groups.items()]


def tables(
    cases: Mapping[str, Case],
    summaries: Sequence[MetricSummary],
    sides: Sequence[str],
    samples: Sequence[Sample],
) -> str:
    """Return one Markdown table for each case, aligned for a terminal, and why something was lost."""
    texts = []
    for name, case in cases.items():
        of_case = [summary for summary in summaries if summary.metric.case == name]
        if of_case:
            texts.append(f"{case.title}\n\n{_table(of_case, sides)}{losses(samples, name)}")
    return "\n\n".join(texts)


def losses(samples: Sequence[Sample], case: str) -> str:
    """Return a line for each reason for which something of a case was lost; empty when nothing was."""
    of_case = [sample for sample in samples if sample.metric.case == case and sample.lost]
    lines = (f"lost: {sample.side}, {sample.metric.name}: {sample.lost}" for sample in of_case)
    return "".join(f"\n{line}" for line in dict.fromkeys(lines))


def document(
    machine: Mapping[str, str | int | float],
    samples: Sequence[Sample],
    summaries: Sequence[MetricSummary],
) -> dict[str, Any]:
    """Return machine, settings, medians and every sample."""
    return {
        "machine": dict(machine),
        "settings": {
            "environment": COMMON_ENVIRONMENT,
            "torchrun environment": TORCHRUN_ENVIRONMENT,
            "torchrun options": TORCHRUN_OPTIONS,
            "torchrun-fork options": FORK_OPTIONS,
        },
        "summaries": [asdict(summary) for summary in summaries],
        "samples": [asdict(sample) for sample in samples],
    }


def _summary(metric: Metric, side: str, samples: Sequence[Sample]) -> MetricSummary:
    values = [sample.value for sample in samples if sample.value is not None]
    return MetricSummary(
        metric=metric,
        side=side,
        num_rounds=len(samples),
        num_lost=len(samples) - len(values),
        median=statistics.median(values) if values else None,
        lowest=min(values, default=None),
        highest=max(values, default=None),
    )


def _table(summaries: Sequence[MetricSummary], sides: Sequence[str]) -> str:
    """Return the table of one case: a row for each metric, sides and ratios as columns."""
    by_key = {(summary.metric, summary.side): summary for summary in summaries}
    columns = [side for side in (FLOOR, *sides) if any(s.side == side for s in summaries)]
    others = [side for side in columns if side not in (FLOOR, OURS)] if OURS in columns else []
    rows = [["", *columns, *[f"{other} / {OURS}" for other in others]]]
    for metric in dict.fromkeys(summary.metric for summary in summaries):
        row = {side: by_key.get((metric, side)) for side in columns}
        label = f"{metric.name}, {metric.unit}" if metric.unit else metric.name
        ratios = [_ratio(row[other], row[OURS]) for other in others]
        rows.append([label, *[_cell(row[side]) for side in columns], *ratios])
    return aligned(rows)


def _cell(summary: MetricSummary | None) -> str:
    """Return `median (lowest..highest)`, and how many rounds were lost."""
    if summary is None:
        return "-"
    if summary.median is None or summary.lowest is None or summary.highest is None:
        return f"lost {summary.num_lost} of {summary.num_rounds}"
    digits = 2 if summary.metric.unit in ("s", "%") else 0
    spread = f"({summary.lowest:.{digits}f}..{summary.highest:.{digits}f})"
    lost = f", lost {summary.num_lost} of {summary.num_rounds}" if summary.num_lost else ""
    return f"{summary.median:.{digits}f} {spread}{lost}"


def _ratio(other: MetricSummary | None, ours: MetricSummary | None) -> str:
    """Return how many times ours the other is, where both are quantities above zero."""
    if other is None or ours is None or not other.metric.unit:
        return "-"
    if not other.median or not ours.median or min(other.median, ours.median) < 0:
        return "-"
    return f"{other.median / ours.median:.1f}"


def aligned(rows: list[list[str]]) -> str:
    """Return rows as a Markdown table; the first row is its head."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    rule = [f"{'-' * (widths[0])}", *[f"{'-' * (width - 1)}:" for width in widths[1:]]]
    lines = []
    for row in [rows[0], rule, *rows[1:]]:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join([first, *rest])} |")
    return "\n".join(lines)
