"""One run as lines, the most asked first, or as one or two rows. Pure: the same value gives the same lines."""

import math
import textwrap
import time
from collections.abc import Sequence
from statistics import median

from torchmuster.core.files.layout import short_id
from torchmuster.core.model.text import in_minutes, in_one_line, span
from torchmuster.launcher.model.live import STALE_S, LiveAttempt, LiveRun, LiveTraining, left_s
from torchmuster.launcher.model.progress import quiet_s
from torchmuster.launcher.model.run import since_suffix
from torchmuster.launcher.ui.ranks import HEADER, RankRow, cells, rank_rows, slowest
from torchmuster.launcher.ui.table import (
    DASH,
    Line,
    Span,
    curve,
    curve_range,
    line,
    render_table,
    show_bytes,
    show_mib,
    show_number,
    show_share,
)

_LABEL = 12
_CURVE = 24
_CURVE_LEAVES = 76  # columns of a line for the other values
_VALUE, _RANGE = 8, 24  # columns that a line leaves its own value and range
_BAR, _BAR_FROM = 6, 110  # width of a bar in the table, and from how many columns on there are bars
_SHOWN_ATTEMPTS = 3
_NODE_COLUMNS = 12
_RIGHT = frozenset({"RANK", "STEP", "STEPS/S", "AGE", "CPU", "MEM", "GPU", "GPUMEM", "WAIT"})


def head_lines(
    run: LiveRun, rows: Sequence[RankRow], columns: int, *, unicode: bool, num_curves: int = 1
) -> list[Line]:
    """Return all but the table of ranks: state, time left, the slow ranks, why attempts ended.

    Args:
        run: The run.
        rows: Its ranks.
        columns: The width of the terminal.
        unicode: Whether the terminal can show blocks.
        num_curves: How many metrics get a line with a curve; the others stand behind the first.
    """

    def add_line(label: str, text: str, style: str = "") -> None:
        lines.extend(_wrapped(label, text, columns, style))

    lines = [_title(run, columns)]
    for problem in run.problems:
        add_line("problem", problem, "bad")
    for wait in (run.job, run.waits):
        add_line("waits", wait, "warn")
    if run.sample is not None and not run.is_final and (still_s := quiet_s(run.sample)):
        add_line(
            "quiet", f"for {span(still_s, whole=True)}: no output, no rank uses a processor", "warn"
        )
    lines += _progress(run, rows)
    lines += _metrics(run, columns, num_curves, unicode=unicode)
    lines += _saves(run)
    lines += _slow(run, rows)
    lines += _attempts(run)
    add_line("ended by", run.ended_by, "bad")
    add_line("network", run.network)
    for said in run.said[-2:]:
        add_line("said", said)
    if not run.is_final and run.num_attempts:
        add_line("head", run.unheard, "warn")
    return lines


def table_lines(
    rows: Sequence[RankRow], columns: int, chosen: int | None = None, *, unicode: bool = True
) -> list[Line]:
    """Return the header and a line for each row, without empty columns.

    Args:
        rows: The ranks to show.
        columns: The width of the terminal.
        chosen: The rank to mark.
        unicode: Whether the terminal can show blocks.
    """
    plain = [HEADER, *(cells(row) for row in rows)]
    if columns < _BAR_FROM:
        return _table(plain, rows, columns, chosen)
    lines = _table(_with_bars(plain, rows, unicode=unicode), rows, columns, chosen)
    fits = all(len(one.text) <= columns for one in lines)
    return lines if fits else _table(plain, rows, columns, chosen)


def _with_bars(
    table: Sequence[tuple[str, ...]], rows: Sequence[RankRow], *, unicode: bool
) -> list[tuple[str, ...]]:
    """Return the table with a bar for each rank's processors and GPU."""
    most = max([1.0, *(row.cpus for row in rows if row.cpus is not None)])
    found = [table[0]]
    for row, texts in zip(rows, table[1:], strict=True):
        shares = {"CPU": (row.cpus or 0.0) / most, "GPU": (row.gpu_percent or 0) / 100}
        found.append(
            tuple(
                f"{_bar(shares[name], unicode=unicode)} {text}"
                if name in shares and text != DASH
                else text
                for name, text in zip(HEADER, texts, strict=True)
            )
        )
    return found


def _table(
    table: Sequence[tuple[str, ...]], rows: Sequence[RankRow], columns: int, chosen: int | None
) -> list[Line]:
    used = [
        at
        for at, name in enumerate(HEADER)
        if name in ("RANK", "NODE", "DOES") or any(row[at] != DASH for row in table[1:])
    ]
    widths = {at: max(len(row[at]) for row in table) for at in used}
    widths[1] = min(widths[1], max(_NODE_COLUMNS, columns - 80 + _NODE_COLUMNS))
    lines = []
    for number, row in enumerate(table):
        texts = [_cell(HEADER[at], in_one_line(row[at]), widths[at]) for at in used]
        text, style = "  ".join(texts), "title"
        if number:
            one = rows[number - 1]
            style = "chosen" if one.rank == chosen else "warn" if one.needs_attention else ""
            text = ("> " if one.rank == chosen else "! " if one.needs_attention else "  ") + text
        else:
            text = f"  {text}"
        lines.append(line(Span(text.rstrip(), style)))
    return lines


def _bar(share: float, *, unicode: bool) -> str:
    """Draw a share from 0 to 1."""
    full = min(round(share * _BAR), _BAR)
    return ("█" * full + "░" * (_BAR - full)) if unicode else ("#" * full + "." * (_BAR - full))


def task_lines(run: LiveRun, chosen: int | None = None) -> list[Line]:
    """Return the header and a line per task of a workflow or member of a sweep; mark `chosen`."""
    cells = [(t.group, t.name, t.state, str(t.attempt), t.why) for t in run.tasks]
    header, *rows = render_table(("GROUP", "TASK", "STATE", "ATTEMPT", "WHY"), cells).split("\n")[
        :-1
    ]
    lines = [line(Span(f"  {header}", "title"))]
    for number, (task, row) in enumerate(zip(run.tasks, rows, strict=True)):
        style = "bad" if "failed" in task.state.lower() else ""
        is_chosen = number == chosen
        mark = "> " if is_chosen else "  "
        lines.append(line(Span(mark + row, "chosen" if is_chosen else style)))
    return lines


def time_left_s(run: LiveRun) -> float | None:
    """Return the seconds until the last step at the current speed; None where unknown."""
    return left_s(
        run.training, run.sample, sample_at=run.sample_at, now=run.now, is_final=run.is_final
    )


def step_of(run: LiveRun, rows: Sequence[RankRow]) -> int | None:
    """Return the last known step: ranks report it more often than the record does."""
    if run.training is None:
        return max((row.step for row in rows if row.step is not None), default=None)
    reported_steps = [row.step for row in rows if row.step is not None] if not run.is_final else []
    return max([run.training.step, *reported_steps])


def _title(run: LiveRun, columns: int) -> Line:
    style = {"succeeded": "good", "running": "bold"}.get(
        run.state, "bad" if run.is_final else "warn"
    )
    clock = time.strftime("%H:%M:%S", time.localtime(run.now))
    about = f"  {in_one_line(run.place)}  {span(run.elapsed_s, whole=True)}  "
    name = in_one_line(short_id(run.run_id))
    room = columns - len(name) - len(run.state) - len(about) - len(clock) - 4
    command = in_one_line(run.command)
    short = command if len(command) <= room else "..." + command[-max(room - 3, 0) :]
    return line(
        Span(name, "bold"),
        "  ",
        Span(run.state, style),
        about,
        short.ljust(max(room, 0)),
        "  ",
        clock,
    )


def _labelled(label: str, text: str, style: str = "") -> Line:
    return line(Span(label.ljust(_LABEL), "dim"), Span(in_one_line(text), style))


def _wrapped(label: str, text: str, columns: int, style: str) -> list[Line]:
    """Wrap a text into at most two lines; return none for an empty text."""
    width = max(columns - _LABEL, 20)
    pieces = textwrap.wrap(in_one_line(text), width, max_lines=2, placeholder=" ...")
    labels = [label.ljust(_LABEL), " " * _LABEL]
    return [
        line(Span(name, "dim"), Span(piece, style))
        for name, piece in zip(labels, pieces, strict=False)
    ]


def _progress(run: LiveRun, rows: Sequence[RankRow]) -> list[Line]:
    found = []
    step, training = step_of(run, rows), run.training
    rates = [row.steps_per_s for row in rows if row.steps_per_s]
    if step is not None:
        total = training.total_steps if training is not None else None
        parts = [f"{step} of {total}" if total else str(step)]
        if rates and not run.is_final:
            parts.append(f"{show_number(median(rates))} steps/s")
        left = time_left_s(run)
        if left is not None:
            parts.append(f"{span(left, whole=True)} left")
        found.append(line(Span("step".ljust(_LABEL), "dim"), Span("  ".join(parts), "bold")))
    if run.bar is not None:
        bar = run.bar
        bar_words = [
            f"{bar.done} of {bar.total}",
            bar.speed,
            f"{bar.left} left" if bar.left else "",
        ]
        text = "  ".join(part for part in bar_words if part)
        found.append(_labelled("bar", f"{text}  (rank 0's own words)", "bold"))
    if run.ends_at is not None and not run.is_final:
        found.append(_labelled("job ends", f"in {span(run.ends_at - run.now, whole=True)}"))
    return found


def _metrics(run: LiveRun, columns: int, num_curves: int, *, unicode: bool) -> list[Line]:
    training = run.training
    if training is None or not training.values:
        return []
    since = {name: since_suffix(step) for name, step in training.not_finite}
    shown = {
        name: f"{show_number(value, 4)}{since.get(name, '')}" for name, value in training.values
    }
    drawn = {training.curve_of: training.curve, **dict(training.curves[: max(num_curves - 1, 0)])}
    values = {name: shown.pop(name, DASH) for name in drawn}
    widest = max(map(len, values.values())) if len(values) > 1 else 0
    leaves = _CURVE_LEAVES if shown else _LABEL + max(widest, _VALUE) + _RANGE
    width = max(min(_CURVE, max(columns // 3, 1)), columns - leaves)
    lines = []
    for name, history in drawn.items():
        spans = curve_range(history, width)
        lines.append(
            line(
                Span(in_one_line(name)[: _LABEL - 1].ljust(_LABEL), "dim"),
                Span(f"{values[name].ljust(widest)}  ", "bad" if name in since else ""),
                curve(history, width, unicode=unicode),
                Span(f"  {spans}" if spans else "", "dim"),
                "".join(f"  {in_one_line(other)} {words}" for other, words in shown.items()),
            )
        )
        shown = {}
    return lines


def _saves(run: LiveRun) -> list[Line]:
    training = run.training
    if training is None:
        return []
    if training.saved_step is None:
        text = "nothing yet"
    else:
        age = f" {span(run.now - training.saved_at, whole=True)} ago" if training.saved_at else ""
        size = f", {show_bytes(training.saved_bytes)}" if training.saved_bytes is not None else ""
        text = f"step {training.saved_step}{age if not run.is_final else ''}{size}"
    if training.saving_since is not None:
        text += f"; {_writing(run.now - training.saving_since, training)}"
    return [_labelled("saved", text)]


def _writing(for_s: float, training: LiveTraining) -> str:
    """Return the progress of the snapshot being written; the last one's size predicts its size."""
    step = training.saving_step if training.saving_step is not None else "the next"
    done, whole = training.saving_bytes, training.saved_bytes
    if not done or for_s <= 0:
        return f"writing {step} since {span(for_s, whole=True)}"
    speed = done / for_s
    if whole is None or whole < done:
        return f"writing {step}: {show_bytes(done)} at {show_bytes(speed)}/s"
    left = span((whole - done) / speed, whole=True)
    return f"writing {step}: {show_share(done / whole)} at {show_bytes(speed)}/s, {left} left"


def _slow(run: LiveRun, rows: Sequence[RankRow]) -> list[Line]:
    steps = [row for row in rows if row.step is not None and row.does != "ended"]
    if run.is_final or len(steps) < 2 or any(row.wait is None for row in steps):
        return []  # too few ranks to compare
    worst = slowest(rows)
    if worst is None:
        return [_labelled("slowest", "no rank is more than 10 % slower than the others")]
    others = sum(row.cost_s > 0 for row in rows) - 1
    more = f"; {others} more: f slow" if others else ""
    wait = median(row.wait for row in rows if row.wait is not None)
    text = (
        f"rank {worst.rank} on {worst.node}: {worst.cost_s * 1000:.0f} ms a step more, in"
        f" {worst.part}; ranks wait {wait * 100:.0f} % of a step{more}"
    )
    return [_labelled("slowest", text, "warn")]


def _attempts(run: LiveRun) -> list[Line]:
    if not run.attempts:
        return []
    last = run.attempts[-1]
    lines = []
    if run.num_attempts > 1 or last.ended_at is not None:
        ended = [one for one in run.attempts if one.ended_by]
        shown = ended[-_SHOWN_ATTEMPTS:]
        if len(shown) < run.num_attempts - 1:
            lines.append(_labelled("attempts", f"{run.num_attempts}: all with the key a", "dim"))
        lines += [attempt_line(one, run.now) for one in shown]
    if last.ended_at is None:
        lines.append(attempt_line(last, run.now))
    return lines


def attempt_line(one: LiveAttempt, now: float) -> Line:
    """Return an attempt as a line: its duration and end, or while it lives its size and reason."""
    workers = f"{one.num_workers} worker{'s' if one.num_workers != 1 else ''}"
    nodes = f"{one.num_nodes} node{'s' if one.num_nodes != 1 else ''}"
    end = one.ended_at if one.ended_at is not None else now
    took = span(end - one.began_at, whole=True) if one.began_at is not None else DASH
    label = f"attempt {one.number}"[: _LABEL - 1].ljust(_LABEL)
    if one.ended_at is None:
        why = f", {in_one_line(one.why)}" if one.why != "start" else ""
        return line(Span(label, "dim"), f"{workers} on {nodes} for {took}{why}")
    style = "good" if one.ended_by == "succeeded" else "bad"
    return line(Span(label, "dim"), f"ended after {took}: ", Span(in_one_line(one.ended_by), style))


def stale_note(run: LiveRun) -> str:
    """Return a note on the age of old numbers; empty where they are current."""
    if run.sample_at is None or run.is_final or run.now - run.sample_at < STALE_S:
        return ""
    return f"as of {span(run.now - run.sample_at, whole=True)} ago, from the record"


def _cell(name: str, text: str, width: int) -> str:
    if len(text) > width:  # keep the end: it distinguishes node names
        text = "~" + text[len(text) - width + 1 :]
    return text.rjust(width) if name in _RIGHT else text.ljust(width)


# One or two rows below the output of a run.


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
        first += _brief_progress(run, rows)
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


def _brief_progress(run: LiveRun, rows: list[RankRow]) -> list[str]:
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
