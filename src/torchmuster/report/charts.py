"""The plots of a run with texts and tables: metrics, step time, phases, memory, cost, network."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from torchmuster.core.model.text import span
from torchmuster.launcher.model.run import several
from torchmuster.report import plots
from torchmuster.report.plots import Area, Dot, PlotBar, PlotLabels, PlotLine, PlotPiece
from torchmuster.report.story import (
    Band,
    MemberStory,
    RanksStory,
    RankTotals,
    SeriesStory,
    Story,
    SweepStory,
    figure,
    node_time,
    percent,
)

_BARS_UP_TO = 24  # ranks; more are drawn as columns
_SLOWEST = 8
_POINTS_OF_TABLE = 24
_MATRIX_UP_TO = 24
_MOST_PARAMETERS, _MOST_OF_NAME = 8, 12
# For each phase: its name, its style, its field in `RankTotals`.
PHASES = (
    ("data", "p-data", "data_s"),
    ("forward", "p-forward", "forward_s"),
    ("after forward", "p-after", "after_s"),
    ("wait for others", "p-wait", "wait_s"),
    ("save", "p-save", "save_s"),
    ("evaluate", "p-evaluate", "evaluate_s"),
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotSheet:
    """A plot with its texts, and the same data as a table: head and rows."""

    labels: PlotLabels
    svg: Markup
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    is_wide: bool = False


# Metrics.


def metric_plot(story: Story, series: SeriesStory, prefix: str, number: int) -> PlotSheet:
    """Return the plot of a metric over the steps, with redone steps and the starts of attempts."""
    known = [(v, s) for v, s in zip(series.values, series.steps, strict=True) if v is not None]
    words = "No finite value was recorded."
    if known:
        (low, low_at), (high, high_at) = min(known), max(known)
        words = f"From {figure(known[0][0])} to {figure(known[-1][0])}; least {figure(low)} at step {low_at:,}, greatest {figure(high)} at step {high_at:,}."
    if series.num_not_finite:
        first = ", ".join(f"{word} at step {step:,}" for step, word in series.not_finite)
        words += f" {several(series.num_not_finite, 'value')} not finite: {first}."
    lines = [PlotLine(name=series.name, points=[*zip(series.steps, series.values, strict=True)])]
    if series.redone_steps:
        redone = _split([*zip(series.redone_steps, series.redone_values, strict=True)])
        lines.append(PlotLine(name="done again later", points=redone, style="line again"))
    marks = [
        (float(step), "mark bad", f"{series.name} is {word} at step {step}")
        for step, word in series.not_finite
    ]
    marks += [
        (float(one.first_step), "mark", f"attempt {one.number} began at step {one.first_step}")
        for one in story.attempts[-40:]
        if one.first_step and one.number
    ]
    labels = PlotLabels(
        key=f"{prefix}m{number}", title=series.name, words=words, x="step", y=series.name[:40]
    )
    return PlotSheet(
        labels=labels,
        svg=plots.line_plot(labels, lines, marks=marks),
        head=("step", series.name),
        rows=tuple(
            (f"{step:,}", figure(value) if value is not None else "not finite")
            for step, value in _few(series.steps, series.values)
        ),
    )


def parameter_plots(story: Story, prefix: str) -> tuple[PlotSheet, ...]:
    """Return a plot for each parameter that a sweep has varied: the members' metric against it."""
    sweep = story.sweep
    if sweep is None or not sweep.metric:
        return ()
    members = [one for one in sweep.members if one.metric is not None]
    if len(members) < 2:
        return ()
    varied = [at for at in range(len(sweep.names)) if len({one.values[at] for one in members}) > 1]
    return tuple(_parameter_plot(sweep, members, at, prefix) for at in varied[:_MOST_PARAMETERS])


def _parameter_plot(
    sweep: SweepStory, members: Sequence[MemberStory], at: int, prefix: str
) -> PlotSheet:
    name, values = sweep.names[at], [one.values[at] for one in members]
    numbers = [_as_number(value) for value in values]
    known = [value for value in numbers if value is not None]
    names = () if len(known) == len(values) else tuple(dict.fromkeys(sorted(values)))
    dots = [
        Dot(
            x=x if not names and x is not None else float(names.index(value)),
            y=one.metric or 0.0,
            title=f"member {one.number}: {name} {value}, {sweep.metric} {figure(one.metric)}",
            style="dot best" if one.number == sweep.best else "dot",
        )
        for one, value, x in zip(members, values, numbers, strict=True)
    ]
    best = dots[0].title  # members are sorted
    labels = PlotLabels(
        key=f"{prefix}p{at}",
        title=f"{sweep.metric} against {name}",
        words=f"The best: {best}.",
        x=name[:60],
        y=sweep.metric[:40],
    )
    return PlotSheet(
        labels=labels,
        svg=plots.dot_plot(labels, dots[::-1], [shown[:_MOST_OF_NAME] for shown in names]),
    )


def _as_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _split(points: Sequence[tuple[int, float | None]]) -> list[tuple[float, float | None]]:
    """Return the points with a gap where the steps go back, at the start of the next attempt."""
    found: list[tuple[float, float | None]] = []
    for step, value in points:
        if found and step <= found[-1][0]:
            found.append((step, None))
        found.append((step, value))
    return found


def _few(*columns: Sequence[T]) -> list[tuple[T, ...]]:
    """Return the rows of these columns; if they are many, some at equal distances."""
    rows = [*zip(*columns, strict=True)]
    if len(rows) <= _POINTS_OF_TABLE:
        return rows
    last = len(rows) - 1
    return [rows[round(n * last / (_POINTS_OF_TABLE - 1))] for n in range(_POINTS_OF_TABLE)]


def step_time_plot(story: Story, prefix: str) -> PlotSheet | None:
    """Return the plot of the time per step; None without data."""
    series = story.training.step_time if story.training else None
    if series is None:
        return None
    known = sorted(v for v in series.values if v is not None)
    median = known[len(known) // 2] if known else None
    words = f"The time from one record of metrics to the next, by steps: saves and evaluations are in it. Median {span(median)}."
    in_ms = [v * 1000 if v is not None else None for v in series.values]
    lines = [PlotLine(name="a step", points=[*zip(series.steps, in_ms, strict=True)])]
    labels = PlotLabels(
        key=f"{prefix}steptime", title="Time of a step", words=words, x="step", y="ms"
    )
    rows = tuple((f"{step:,}", span(value)) for step, value in _few(series.steps, series.values))
    return PlotSheet(
        labels=labels,
        svg=plots.line_plot(labels, lines),
        head=("step", "time"),
        rows=rows,
    )


# Ranks.


def phases_plot(ranks: RanksStory | None, prefix: str) -> PlotSheet | None:
    """Return a plot of each rank's phases in a step, as bars or columns; None without data."""
    if ranks is None or not ranks.has_phases:
        return None
    totals = [one for one in ranks.totals if one.phased_steps]
    if not totals:
        return None
    slow = slowest_of(ranks)[0].rank if slowest_of(ranks) else -1
    words = "The mean step of each rank by what it did. Time spent waiting for other ranks is the others' time: the rank that waits least is the one they wait for."
    has_bars = len(totals) <= _BARS_UP_TO
    labels = PlotLabels(
        key=f"{prefix}phases",
        title="A step of each rank, by phase",
        words=words,
        x="milliseconds a step" if has_bars else "rank",
        y="ms a step",
    )
    if has_bars:
        rows = [_phase_bar(one, is_marked=one.rank == slow) for one in totals]
        svg = plots.bar_plot(labels, rows, is_time=False)
    else:
        layers = [
            (style, [1000 * getattr(t, key) / t.phased_steps for t in totals])
            for _, style, key in PHASES
        ]
        svg = plots.columns(labels, [str(t.rank) for t in totals], layers)
    return PlotSheet(labels=labels, svg=svg, is_wide=True)


def _phase_bar(one: RankTotals, *, is_marked: bool) -> PlotBar:
    pieces, begin = [], 0.0
    for name, style, key in PHASES:
        each = 1000 * getattr(one, key) / one.phased_steps
        pieces.append(
            PlotPiece(
                begin=begin,
                end=begin + each,
                style=style,
                title=f"rank {one.rank}: {name} {figure(each)} ms",
            )
        )
        begin += each
    name = f"rank {one.rank} on {one.node}"
    return PlotBar(
        name=name if len(name) <= 22 else f"rank {one.rank}",
        pieces=[p for p in pieces if p.end > p.begin],
        is_marked=is_marked,
    )


def rank_heat_plot(ranks: RanksStory | None, prefix: str) -> PlotSheet | None:
    """Return a heat map of each rank's own work over time; None without data."""
    if ranks is None or len(ranks.own_ms) < 2:
        return None
    if not any(v is not None for row in ranks.own_ms for v in row):
        return None
    words = f"A step's own work of each rank in spans of {span(ranks.width_s)}: a bright row is a rank that is slow all the time, a bright column a moment that was slow for all."
    labels = PlotLabels(
        key=f"{prefix}heat",
        title="Own work of each rank over time",
        words=words,
        x="since the first sample",
        y="rank",
    )
    svg = plots.heat_plot(labels, ranks.own_ms, span_s=ranks.width_s, unit="ms")
    return PlotSheet(labels=labels, svg=svg, is_wide=True)


def band_plot(ranks: RanksStory, band: Band, prefix: str, number: int) -> PlotSheet:
    """Return the plot of a quantity over time: its median and range over all ranks."""
    xs = [(n + 0.5) * ranks.width_s for n in range(ranks.num_spans)]
    most = max((v for v in band.most if v is not None), default=None)
    middle = sorted(v for v in band.median if v is not None)
    usual = middle[len(middle) // 2] if middle else None
    title = band.name[:1].upper() + band.name[1:]
    words = f"The median rank and, shaded, from the least to the most of all. Median {figure(usual)} {band.unit}, at most {figure(most)} {band.unit}.".replace(
        " ,", ","
    ).replace(" .", ".")
    labels = PlotLabels(
        key=f"{prefix}b{number}",
        title=title,
        words=words,
        x="since the first sample",
        y=band.unit or "processors",
    )
    area = Area(xs=xs, least=band.least, most=band.most)
    lines = [PlotLine(name="median rank", points=[*zip(xs, band.median, strict=True)])]
    svg = plots.line_plot(labels, lines, areas=[area], from_zero=True, is_time=True)
    rows = tuple(
        (span(at), *map(figure, numbers))
        for at, *numbers in _few(xs, band.least, band.median, band.most)
    )
    return PlotSheet(
        labels=labels,
        svg=svg,
        head=("after", "least", "median", "most"),
        rows=rows,
    )


def slowest_of(ranks: RanksStory | None) -> tuple[RankTotals, ...]:
    """Return the ranks with the most own work per step, the slowest first."""
    known = [one for one in (ranks.totals if ranks else ()) if one.own_s is not None]
    if len(known) < 2:
        return ()
    return tuple(sorted(known, key=lambda one: -(one.own_s or 0.0))[:_SLOWEST])


# Cost and network.


def cost_plot(story: Story, prefix: str) -> PlotSheet | None:
    """Return the plot of what the node time was used for; None if no node was held."""
    cost = story.cost
    if cost.held_s <= 0:
        return None
    parts = (
        ("starting", "t-start", cost.starting_s),
        ("training that counts", "t-kept", cost.kept_s),
        ("training that was lost", "t-lost", cost.lost_s),
        ("restarting", "t-again", cost.restarting_s),
    )
    begin, pieces, rows = 0.0, [], []
    for name, style, seconds in parts:
        share = seconds / cost.held_s
        if seconds > 0:
            pieces.append(
                PlotPiece(
                    begin=begin,
                    end=begin + share * 100,
                    style=style,
                    title=f"{name}: {percent(share, 1)}",
                )
            )
        rows.append((name, node_time(seconds), percent(share, 1)))
        begin += share * 100
    rows.append(("all", node_time(cost.held_s), "100 %"))
    words = "Every node second between the start of the run and its end, by what it was for."
    labels = PlotLabels(
        key=f"{prefix}cost-plot",
        title="Where the time of the nodes went",
        words=words,
        x="percent of all node time",
    )
    svg = plots.bar_plot(labels, [PlotBar(name="", pieces=pieces)], is_time=False, left=20)
    return PlotSheet(
        labels=labels,
        svg=svg,
        head=("part", "node time", "share"),
        rows=tuple(rows),
        is_wide=True,
    )


def matrix_of(story: Story) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the matrix of node pairs, as rows of (text, style); empty if unknown or too large."""
    network = story.network
    if network is None or not network.pairs or not 1 < len(network.nodes) <= _MATRIX_UP_TO:
        return ()
    cells = {(pair.source, pair.target): pair for pair in network.pairs}
    rates = sorted(pair.mb_per_s for pair in network.pairs if pair.mb_per_s is not None)
    half = rates[len(rates) // 2] / 2 if rates else 0.0
    rows = []
    for source in range(len(network.nodes)):
        row = []
        for target in range(len(network.nodes)):
            pair = cells.get((source, target))
            if pair is None:
                row.append(("" if source == target else "·", ""))
            elif pair.why:
                row.append((pair.why, "bad"))
            else:
                rate = f"{figure(pair.mb_per_s)} MB/s" if pair.mb_per_s is not None else ""
                delay = f"{figure(pair.latency_us)} µs" if pair.latency_us is not None else ""
                slow = pair.mb_per_s is not None and pair.mb_per_s < half
                words = " ".join(filter(None, (rate, delay))) or "reached"
                row.append((words, "warn" if slow else ""))
        rows.append(tuple(row))
    return tuple(rows)


def network_heat_plot(story: Story, prefix: str) -> PlotSheet | None:
    """Return a heat map of the rates between nodes, if too many for a table; None without data."""
    network = story.network
    if network is None or len(network.nodes) <= _MATRIX_UP_TO:
        return None
    count = len(network.nodes)
    rows: list[list[float | None]] = [[None] * count for _ in range(count)]
    for pair in network.pairs:
        if pair.source < count and pair.target < count:
            rows[pair.source][pair.target] = pair.mb_per_s
    rates = sorted(rate for row in rows for rate in row if rate is not None)
    if not rates:
        return None
    words = (
        f"What one connection moved between {count} nodes: {len(rates)} pairs, median {figure(rates[len(rates) // 2])} MB/s,"
        f" least {figure(rates[0])} MB/s. A dark row or column is a node that is slow to all others; empty: not measured."
    )
    labels = PlotLabels(
        key=f"{prefix}pairs",
        title="Rates between nodes",
        words=words,
        x="to node",
        y="from node",
    )
    svg = plots.heat_plot(labels, rows, span_s=None, unit="MB/s")
    return PlotSheet(labels=labels, svg=svg, is_wide=True)
