"""The output of `muster plan`: tables, bars for the terminal, and the bars as SVG."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from torchmuster.diagnose.plan.advice import JobChange, Layout
from torchmuster.diagnose.plan.scaling import NetworkLink, Prediction
from torchmuster.launcher.ui.table import render_table

BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"
_COMPUTES, _WAITS = "#4c78a8", "#e45756"


def format_seconds(seconds: float) -> str:
    """Return a time for people: `470 ms`, `4.78 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    return ""


def say_bytes(size_bytes: float) -> str:
    """Return a size in decimal units, as networks count: `2.6 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def say_link(link: NetworkLink) -> str:
    """Return a link for people: `2.75 GB/s, 50 us a hop`."""
    return f"{say_bytes(link.bytes_per_s)}/s, {format_seconds(link.latency_s)} a hop"


def prediction_table(predictions: Sequence[Prediction]) -> str:
    """Return the predictions as a table; times are for one step."""
    header = ["NODES", "WORKERS", "STEP", "ALL-REDUCE", "WAITING", "EFFICIENCY", "AS FAST AS"]
    rows = [
        [
            str(one.num_nodes),
            str(one.num_workers),
            format_seconds(one.step_s),
            format_seconds(one.communication_s) if one.num_workers > 1 else "-",
            format_seconds(waits_s(one)) if one.num_workers > 1 else "-",
            f"{one.efficiency:.0%}",
            f"{one.speed_up:.3g} workers" if one.speed_up != 1 else "1 worker",
        ]
        for one in predictions
    ]
    return render_table(header, rows)


def waits_s(prediction: Prediction) -> float:
    """Return the time that a step takes in addition to that of a single worker."""
    return prediction.exposed_s + prediction.cost_s + prediction.skew_s


def prediction_bars(predictions: Sequence[Prediction]) -> str:
    """Return one bar for each prediction: computing is solid, waiting is shaded."""
    longest = max(one.step_s for one in predictions)
    width = max(len(str(one.num_nodes)) for one in predictions)
    lines = []
    for one in predictions:
        whole = one.step_s / longest * BAR
        computing = _full(whole * one.efficiency)
        waiting = "░" * max(0, round(whole) - len(computing))
        lines.append(
            f"{one.num_nodes:>{width}} {(computing + waiting):<{BAR}} {one.efficiency:.0%}"
        )
    legend = (
        f"{'':>{width}} █ computes  ░ waits; the longest bar is {format_seconds(longest)} a step"
    )
    return "\n".join([*lines, legend]) + "\n"


def _full(length: float) -> str:
    part = int(length % 1 * 8)
    return "█" * int(length) + (_EIGHTHS[part] if part else "")


def layout_sentences(found: Sequence[Layout]) -> list[str]:
    """Return a comparison of the same workers on few nodes and on many."""
    if len(found) < 2:
        return []
    lines = [
        f"  {_nodes(one.num_nodes)} with {one.per_node}: {format_seconds(one.prediction.step_s)} a step, "
        f"efficiency {one.prediction.efficiency:.0%}"
        for one in found
    ]
    few, many = found[0], found[-1]
    times = many.prediction.step_s / few.prediction.step_s
    if times >= 1.02:
        verdict = (
            f"{_nodes(few.num_nodes)} is {times:.3g} times as fast as {_nodes(many.num_nodes)}"
        )
    elif times <= 0.98:
        verdict = (
            f"{_nodes(many.num_nodes)} are {1 / times:.3g} times as fast as {_nodes(few.num_nodes)}"
        )
    else:
        verdict = "no difference: the all-reduces overlap with the backward pass either way"
    workers = few.per_node * few.num_nodes
    return [f"the same {workers} workers: {verdict}", *lines]


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def change_lines(changes: Sequence[JobChange], num_nodes: int) -> list[str]:
    """Return the changes that would help, the best first."""
    if not changes:
        return [f"on {_nodes(num_nodes)} no change would bring more than 2 %"]
    lines = [f"what would help most on {_nodes(num_nodes)}:"]
    for change in changes:
        note = f" ({change.note})" if change.note else ""
        step = f"{format_seconds(change.step_s)} a step"
        lines.append(f"  {change.gain:.2f} times the work: {change.what}, {step}{note}")
    return lines


def render_svg(predictions: Sequence[Prediction], title: str) -> str:
    """Return the bars as an SVG image."""
    row, left, width = 28, 90, 460
    longest = max(one.step_s for one in predictions)
    height = 56 + row * len(predictions) + 30
    size = f'width="{left + width + 170}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, one in enumerate(predictions):
        y = 44 + row * number
        computes = width * one.efficiency * one.step_s / longest
        waits = width * (1 - one.efficiency) * one.step_s / longest
        end = left + computes + waits + 8
        parts += [
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{_nodes(one.num_nodes)}</text>',
            f'<rect x="{left}" y="{y}" width="{computes:.1f}" height="20" fill="{_COMPUTES}"/>',
            f'<rect x="{left + computes:.1f}" y="{y}" width="{waits:.1f}" height="20" fill="{_WAITS}"/>',
            f'<text x="{end:.1f}" y="{y + 15}">{format_seconds(one.step_s)}, {one.efficiency:.0%}</text>',
        ]
    y = 44 + row * len(predictions) + 20
    parts += [
        f'<text x="{left}" y="{y}" fill="{_COMPUTES}">computes</text>',
        f'<text x="{left + 80}" y="{y}" fill="{_WAITS}">waits for the all-reduce</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
