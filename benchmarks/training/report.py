"""Tables, what became of each goal, and the file that programs read."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launching.report import MetricSummary, Sample, aligned, losses
from launching.sides import COMMON_ENVIRONMENT, TORCHRUN_ENVIRONMENT, TORCHRUN_OPTIONS
from training.cases import OURS, Case, Goal

WORDS = {
    "more": ("% more than", 1),
    "share": ("% of", 0),
    "times": ("times the speed of", 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalVerdict:
    """Ours beside others, from figures that were taken next to each other in time."""

    case: str
    goal: Goal
    median: float
    lowest: float
    highest: float
    num_pairs: int


def judge(cases: Mapping[str, Case], samples: Sequence[Sample]) -> list[GoalVerdict]:
    """Return what became of each goal; one without any pair of figures is left out."""
    verdicts = []
    for name, case in cases.items():
        for goal in case.goals:
            of_row = [s for s in samples if s.metric.case == name and s.metric.name == goal.row]
            if values := pair_up(goal, of_row):
                verdict = GoalVerdict(
                    case=name,
                    goal=goal,
                    median=statistics.median(values),
                    lowest=min(values),
                    highest=max(values),
                    num_pairs=len(values),
                )
                verdicts.append(verdict)
    return verdicts


def pair_up(goal: Goal, samples: Sequence[Sample]) -> list[float]:
    """Return one figure for each time at which both sides were measured."""
    by_time: dict[int, dict[str, float]] = {}
    for sample in samples:
        if sample.value is not None:
            by_time.setdefault(sample.round, {})[sample.side] = sample.value
    figures = []
    for values in by_time.values():
        others = [values[side] for side in goal.others if side in values]
        if others and OURS in values:
            figures.append(_compare(goal.kind, values[OURS], max(others)))
    return figures


def _compare(kind: str, ours: float, other: float) -> float:
    if kind == "times":
        return other / ours
    return 100 * ours / other - (100 if kind == "more" else 0)


def tables(
    cases: Mapping[str, Case],
    summaries: Sequence[MetricSummary],
    verdicts: Sequence[GoalVerdict],
    samples: Sequence[Sample],
) -> str:
    """Return for each case a Markdown table, a line for each comparison, and why something was lost."""
    texts = []
    for name, case in cases.items():
        of_case = [summary for summary in summaries if summary.metric.case == name]
        if of_case:
            lines = [_line(verdict) for verdict in verdicts if verdict.case == name]
            table = f"{_table(of_case)}{losses(samples, name)}"
            texts.append("\n\n".join([f"{name}: {case.title}", table, "\n".join(lines)]))
    return "\n\n".join(texts)


def _table(summaries: Sequence[MetricSummary]) -> str:
    by_key = {(summary.metric, summary.side): summary for summary in summaries}
    sides = list(dict.fromkeys(summary.side for summary in summaries))
    columns = [*[side for side in sides if side != OURS], OURS]
    rows = [["", *columns]]
    for metric in dict.fromkeys(summary.metric for summary in summaries):
        cells = [_cell(by_key.get((metric, side))) for side in columns]
        rows.append([f"{metric.name}, {metric.unit}", *cells])
    return aligned(rows)


def _line(verdict: GoalVerdict) -> str:
    goal = verdict.goal
    words, digits = WORDS[goal.kind]
    spread = f"({verdict.lowest:.{digits}f}..{verdict.highest:.{digits}f})"
    others = " or ".join(goal.others)
    if len(goal.others) > 1:
        others = f"the highest of {others}"
    wanted = f"; goal: {goal.text}" if goal.text else ""
    return f"- {goal.row}: {verdict.median:.{digits}f} {spread} {words} {others}{wanted}"


def _cell(summary: MetricSummary | None) -> str:
    """Return `median (lowest..highest)`, and how many rounds were lost."""
    if summary is None:
        return "-"
    if summary.median is None or summary.lowest is None or summary.highest is None:
        return f"lost {summary.num_lost} of {summary.num_rounds}"
    figures = [_digits(v) for v in (summary.median, summary.lowest, summary.highest)]
    text = f"{figures[0]} ({figures[1]}..{figures[2]})" if summary.num_rounds > 1 else figures[0]
    return f"{text}, lost {summary.num_lost}" if summary.num_lost else text


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"


def document(
    machine: Mapping[str, str | int | float],
    samples: Sequence[Sample],
    summaries: Sequence[MetricSummary],
    verdicts: Sequence[GoalVerdict],
) -> dict[str, Any]:
    """Return machine, settings, medians, comparisons and every sample."""
    return {
        "machine": dict(machine),
        "settings": {
            "environment": COMMON_ENVIRONMENT,
            "torchrun environment": TORCHRUN_ENVIRONMENT,
            "torchrun options": TORCHRUN_OPTIONS,
        },
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "summaries": [asdict(summary) for summary in summaries],
        "samples": [asdict(sample) for sample in samples],
    }
