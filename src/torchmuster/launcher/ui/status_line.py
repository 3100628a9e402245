"""The status of a run in one or two rows below its output. Pure: a run in, rows out."""

import math
from statistics import median

from torchmuster.core.files.layout import short_id
from torchmuster.core.model.text import in_minutes, in_one_line
from torchmuster.launcher.model.live import LiveRun
from torchmuster.launcher.model.progress import quiet_s
from torchmuster.launcher.model.run import since_suffix
from torchmuster.launcher.ui.ranks import RankRow, rank_rows, slowest
from torchmuster.launcher.ui.run_lines import step_of, time_left_s
from torchmuster.launcher.ui.words import DASH, show_mib, show_number, show_share

_BETWEEN = " | "


def status_rows(run: LiveRun, columns: int, num_rows: int) -> list[str]:
    """Return at most `num_rows` rows that fit into the terminal; none for a run that has ended.

    Args:
        run: The run.
        columns: The width of the terminal.
        num_rows: 1 or 2.
    """
    if run.is_final:
        return []
    rows = rank_rows(run.sample) if run.sample is not None else []
    first = [f"{short_id(run.run_id)} {run.state} {_brief(run.elapsed_s)}", *_waits(run)]
    if not first[1:]:
        first += _progress(run, rows)
    found = [first, _ranks(run, rows)][:num_rows]
    return [_fitting(parts, max(columns - 1, 0)) for parts in found if parts]


def _fitting(parts: list[str], room: int) -> str:
    """Join as many whole parts as fit; cut off one of the first two rather than omit it."""
    text = ""
    for number, part in enumerate(parts):
        longer = f"{text}{_BETWEEN if text else ''}{in_one_line(part)}"
        if len(longer) > room:
            return longer[:room] if number < 2 else text
        text = longer
    return text


def _waits(run: LiveRun) -> list[str]:
    if run.waits or (run.job and run.state == "waiting"):
        return [run.waits or run.job]
    return []


def _progress(run: LiveRun, rows: list[RankRow]) -> list[str]:
    if run.tasks:
        states = [task.state for task in run.tasks]
        counted = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
        return [f"{len(states)} tasks: {', '.join(counted)}"]
    parts = []
    step, left, training, bar = step_of(run, rows), time_left_s(run), run.training, run.bar
    if step is not None:
        total = f"/{training.total_steps}" if training and training.total_steps else ""
        rates = [row.steps_per_s for row in rows if row.steps_per_s]
        speed = f" {show_number(median(rates))} steps/s" if rates else ""
        parts.append(f"step {step}{total}{speed}{f' {_brief(left)} left' if left else ''}")
    elif bar is not None:
        parts.append(" ".join(filter(None, (f"bar {bar.done}/{bar.total}", bar.speed))))
        parts += [f"{bar.left} left"] if bar.left else []
    if run.sample is not None and (still_s := quiet_s(run.sample)):
        parts.append(f"quiet for {_brief(still_s)}")
    if training is not None and training.curve_of:
        value = dict(training.values).get(training.curve_of)
        since = since_suffix(dict(training.not_finite).get(training.curve_of))
        parts.append(f"{training.curve_of} {show_number(value, 4)}{since}")
    if training is not None and training.saved_step is not None:
        age = f" {_brief(run.now - training.saved_at)} ago" if training.saved_at else ""
        parts.append(f"saved {training.saved_step}{age}")
    if run.ends_at is not None:
        parts.append(f"job ends in {_brief(run.ends_at - run.now)}")
    return parts


def _ranks(run: LiveRun, rows: list[RankRow]) -> list[str]:
    if not rows:
        return []
    num_nodes = len({row.node for row in rows})
    parts = [f"{len(rows)} ranks on {num_nodes} node{'s' if num_nodes != 1 else ''}"]
    worst = slowest(rows)
    if worst is not None:
        cost = f"{worst.cost_s * 1000:.0f} ms in {worst.part}"
        parts.append(f"slowest rank {worst.rank} on {worst.node} +{cost}")
    waits = [row.wait for row in rows if row.wait is not None]
    parts += [f"waits {show_share(median(waits))}"] if waits else []
    cpus = [row.cpus for row in rows if row.cpus is not None]
    parts += [f"CPU {sum(cpus):.1f}"] if cpus else []
    memory = [row.rss_mib for row in rows if row.rss_mib is not None]
    parts += [f"MEM {show_mib(sum(memory))}"] if memory else []
    gpus = [row.gpu_percent for row in rows if row.gpu_percent is not None]
    parts += [f"GPU {sum(gpus) // len(gpus)}%"] if gpus else []
    if run.num_attempts > 1:
        parts.append(f"attempt {run.attempts[-1].number}: {run.attempts[-1].why}")
    return parts


def _brief(seconds: float | None) -> str:
    """Return a duration in minutes: a row has no room for seconds as well."""
    return DASH if seconds is None or not math.isfinite(seconds) else in_minutes(seconds)
