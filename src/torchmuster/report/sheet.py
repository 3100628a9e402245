"""Prepare a story for the page: the answers on top, plots, and tables of a readable length."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.core.model.text import loss_of, span
from torchmuster.launcher.model.run import RankEnd, several, since_suffix
from torchmuster.report import charts, plots
from torchmuster.report.plots import PlotBar, PlotLabels, PlotPiece
from torchmuster.report.story import (
    AttemptStory,
    RankTotals,
    SeriesStory,
    Story,
    SweepStory,
    TrainingStory,
    figure,
    node_time,
    percent,
)

# Bars over time: attempts, ranks or nodes, tasks.


_WELL = "exit code 0"
_ROWS_OF_PLOT = 24
_MOST_RANKS = 16  # with more, each node gets a lane instead
_MOST_TASKS = 60
_MOST_TELLING = 20  # attempts whose evidence is shown


@dataclass(frozen=True, slots=True)
class _LanePart:
    """A rank or a node in one attempt, and the ranks that ended there by themselves."""

    attempt: AttemptStory
    node: str
    ends: tuple[RankEnd, ...]


def attempts_plot(story: Story, prefix: str) -> charts.PlotSheet | None:
    """Return a plot with a bar per attempt (the first and last of many); None without attempts."""
    if not story.attempts or story.began is None:
        return None
    shown = _few(story.attempts)
    end = story.ended or story.made
    rows = [_attempt_bar(one, story.began, end) for one in shown]
    left = story.num_attempts - len(shown)
    words = "A bar for each attempt: its start, the training that counts, and the training that was lost. A cross: a failure ended it."
    words += f" {left} attempts between are left out." if left else ""
    labels = PlotLabels(
        key=f"{prefix}timeline-plot",
        title="Attempts over time",
        words=words,
        x="since the start of the run",
    )
    return charts.PlotSheet(
        labels=labels,
        svg=plots.bar_plot(labels, rows, is_time=True),
        is_wide=True,
    )


def _few(attempts: Sequence[AttemptStory]) -> Sequence[AttemptStory]:
    """Return the first and the last attempts, as many as a plot has rows."""
    if len(attempts) <= _ROWS_OF_PLOT:
        return attempts
    return (*attempts[:4], *attempts[4 - _ROWS_OF_PLOT :])


def attempts_with_new_evidence(attempts: Sequence[AttemptStory]) -> tuple[AttemptStory, ...]:
    """Return failed attempts with other evidence than the one before; the last of very many.

    Those without evidence and with one end only are left out.
    """
    found: list[AttemptStory] = []
    for one in attempts:
        if one.has_failed and (not found or one.evidence != found[-1].evidence):
            found.append(one)
    return tuple(one for one in found[-_MOST_TELLING:] if one.evidence or one.num_ends > 1)


def _attempt_bar(one: AttemptStory, began: float, end: float) -> PlotBar:
    over = max(one.ended if one.ended is not None else end, one.began)
    trains = min(one.training_at or one.workers_at or over, over)
    counts_until = (
        over
        if not one.has_failed and one.kept_at is None
        else max(trains, min(one.kept_at or trains, over))
    )
    if not one.has_failed and one.ended_by == "all workers ended well":
        counts_until = over
    parts = (
        (one.began, trains, "t-start", "start"),
        (trains, counts_until, "t-kept", "training that counts"),
        (counts_until, over, "t-lost", "training that was lost"),
    )
    pieces = [
        PlotPiece(
            begin=a - began,
            end=b - began,
            style=style,
            title=f"attempt {one.number}: {what}, {span(b - a)}",
        )
        for a, b, style, what in parts
        if b > a
    ]
    if not pieces:
        pieces = [
            PlotPiece(
                begin=one.began - began,
                end=over - began,
                style="t-start",
                title=f"attempt {one.number}",
            )
        ]
    return PlotBar(
        name=f"attempt {one.number}",
        pieces=pieces,
        words=one.ended_by or "runs",
        signs=(over - began,) if one.has_failed else (),
        is_marked=one.has_failed,
    )


def rank_lanes_plot(story: Story, prefix: str) -> charts.PlotSheet | None:
    """Return a plot with a lane per rank, or per node if many; None if it would add nothing."""
    shown = _few(story.attempts)
    if story.began is None or not any(one.nodes for one in shown):
        return None
    num_ranks = max(one.world_size for one in shown)
    if num_ranks < 2 or (num_ranks > _MOST_RANKS and max(one.num_nodes for one in shown) < 2):
        return None
    by_rank = num_ranks <= _MOST_RANKS
    rows = _rank_lanes(story, shown) if by_rank else _node_lanes(story, shown)
    few = sorted(rows, key=lambda row: not row.is_marked)[:_ROWS_OF_PLOT]
    kept = [row for row in rows if row in few]
    what = "rank" if by_rank else "node"
    words = f"A lane for each {what}: when its workers ran. A cross: a rank failed there by itself; the others were stopped for it."
    left = len(rows) - len(kept)
    words += f" {left} more, where nothing failed, are left out." if left else ""
    labels = PlotLabels(
        key=f"{prefix}lanes-plot",
        title=f"{what.capitalize()}s over time",
        words=words,
        x="since the start of the run",
    )
    svg = plots.bar_plot(labels, kept, is_time=True)
    return charts.PlotSheet(labels=labels, svg=svg, is_wide=True)


def _rank_lanes(story: Story, shown: Sequence[AttemptStory]) -> list[PlotBar]:
    lanes: dict[int, list[_LanePart]] = {}
    for one in shown:
        ends = {end.rank: end for end in one.ends}
        for node in one.nodes:
            for rank in _ranks_in(node.ranks):
                own = ends.get(rank)
                lanes.setdefault(rank, []).append(_LanePart(one, node.node, (own,) if own else ()))
    return [
        _lane(story, f"rank {rank} on {stays[-1].node}"[:22], stays)
        for rank, stays in sorted(lanes.items())
    ]


def _node_lanes(story: Story, shown: Sequence[AttemptStory]) -> list[PlotBar]:
    lanes: dict[str, list[_LanePart]] = {}
    for one in shown:
        for node in one.nodes:
            ends = tuple(end for end in one.ends if end.node == node.node)
            lanes.setdefault(node.node, []).append(_LanePart(one, node.node, ends))
    return [_lane(story, node[:22], stays) for node, stays in lanes.items()]


def _lane(story: Story, name: str, stays: Sequence["_LanePart"]) -> PlotBar:
    began, pieces, signs, words = story.began or 0.0, [], [], ""
    for stay in stays:
        one = stay.attempt
        over = one.ended if one.ended is not None else (story.ended or story.made)
        first = min(one.workers_at or one.began, over)
        failed = [end for end in stay.ends if one.has_failed and end.what != _WELL]
        ended = ", ".join(f"rank {end.rank}: {end.what}" for end in failed[:4])
        title = f"attempt {one.number} on {stay.node}, {span(over - first)}"
        pieces.append(
            PlotPiece(
                begin=first - began,
                end=over - began,
                style="t-kept" if not failed else "t-lost",
                title=f"{title}; {ended}" if ended else title,
            )
        )
        signs += [min(end.at, over) - began for end in failed]
        words = ended or words
    return PlotBar(name=name, pieces=pieces, words=words, signs=signs, is_marked=bool(signs))


def _ranks_in(text: str) -> list[int]:
    """Return the ranks in a text like `0-7,16`, of a range the first 17; empty for another form."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return []
        found += range(int(first), min(int(last or first), int(first) + _MOST_RANKS) + 1)
    return found


def tasks_plot(story: Story) -> charts.PlotSheet | None:
    """Return a plot with a bar for each task of a workflow; None if no task has begun."""
    tasks = [task for group in story.groups for task in group.tasks if task.began is not None]
    if not tasks or story.began is None:
        return None
    began, end = story.began, story.ended or story.made
    rows = []
    for task in tasks[:_MOST_TASKS]:
        first, last = task.began or began, task.ended or end
        failed = task.state.startswith("FAILED")
        piece = PlotPiece(
            begin=first - began,
            end=last - began,
            style="t-lost" if failed else "t-kept",
            title=f"{task.name}: {task.state}, {span(last - first)}",
        )
        rows.append(
            PlotBar(
                name=task.name[:22],
                pieces=[piece],
                words=task.why or task.state,
                signs=(last - began,) if failed else (),
                is_marked=failed,
            )
        )
    words = (
        "A bar for each task, from the start of its first attempt to its end. A cross: it failed."
    )
    left = len(tasks) - len(rows)
    words += f" {left} more tasks are left out." if left else ""
    labels = PlotLabels(
        key="timeline-plot",
        title="Tasks over time",
        words=words,
        x="since the start of the workflow",
    )
    return charts.PlotSheet(
        labels=labels,
        svg=plots.bar_plot(labels, rows, is_time=True, left=170),
        is_wide=True,
    )


MAX_METRICS = 16
_OWN_STEP_TIME = "perf/step_seconds"  # the library's metric; better than times between records
_NOTEWORTHY = 0.05  # a rank counts as slow if it is slower than the median rank by this share


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question with which people open the page, a short answer, and one line of detail."""

    question: str
    answer: str
    more: str = ""
    tone: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """All that the page shows in addition to the story itself.

    Attributes:
        telling: Failed attempts with other evidence than the one before; the last of very many.
    """

    prefix: str
    answers: tuple[Answer, ...]
    timeline: charts.PlotSheet | None
    lanes: charts.PlotSheet | None
    telling: tuple[AttemptStory, ...]
    metrics: tuple[charts.PlotSheet, ...]
    num_metrics_left_out: int
    phases: charts.PlotSheet | None
    over_time: charts.PlotSheet | None
    step_time: charts.PlotSheet | None
    bands: tuple[charts.PlotSheet, ...]
    slowest: tuple[RankTotals, ...]
    cost: charts.PlotSheet | None
    matrix: tuple[tuple[tuple[str, str], ...], ...]
    pairs: charts.PlotSheet | None
    parameters: tuple[charts.PlotSheet, ...] = ()
    inner: "tuple[tuple[str, Story, Sheet], ...]" = ()


def sheet_of(story: Story, prefix: str = "") -> Sheet:
    """Return the sheet of a story; `prefix` makes element ids unique if a page has several."""
    inner = tuple(
        (name, one, sheet_of(one, f"t{number}-"))
        for number, (name, one) in enumerate(story.trainings)
    )
    series = story.training.series if story.training else ()
    return Sheet(
        prefix=prefix,
        answers=tuple(_answers(story, prefix)),
        timeline=tasks_plot(story) if story.groups else attempts_plot(story, prefix),
        lanes=rank_lanes_plot(story, prefix),
        telling=attempts_with_new_evidence(story.attempts),
        metrics=tuple(
            charts.metric_plot(story, one, prefix, n) for n, one in enumerate(series[:MAX_METRICS])
        ),
        num_metrics_left_out=max(0, len(series) - MAX_METRICS),
        phases=charts.phases_plot(story.ranks, prefix),
        over_time=charts.rank_heat_plot(story.ranks, prefix),
        step_time=None
        if any(s.name == _OWN_STEP_TIME for s in series)
        else charts.step_time_plot(story, prefix),
        bands=tuple(
            charts.band_plot(story.ranks, one, prefix, n) for n, one in enumerate(story.ranks.bands)
        )
        if story.ranks
        else (),
        slowest=charts.slowest_of(story.ranks),
        cost=charts.cost_plot(story, prefix),
        matrix=charts.matrix_of(story),
        pairs=charts.network_heat_plot(story, prefix),
        parameters=charts.parameter_plots(story, prefix),
        inner=inner,
    )


# The answers on top.


def _answer_of_sweep(sweep: SweepStory, prefix: str) -> list[Answer]:
    """Return the answer that names the best member; empty without a metric."""
    best = next((one for one in sweep.members if one.number == sweep.best), None)
    if best is None or best.metric is None:
        return []
    values = ", ".join(
        f"{name} {value}" for name, value in zip(sweep.names, best.values, strict=False)
    )
    return [
        Answer(
            question="Which member is the best?",
            answer=f"{best.number}: {values}",
            more=f"{sweep.metric} {figure(best.metric)}",
            tone="good",
            link=f"{prefix}timeline",
        )
    ]


def _answer_of_bad_loss(training: TrainingStory, prefix: str) -> list[Answer]:
    """Return an answer if the run's loss is not finite any more; otherwise empty."""
    last = {one.name: one for one in training.series if one.num_points}
    name = loss_of(last)
    if name is None or last[name].bad_since is None:
        return []
    return [
        Answer(
            question="Has it learned?",
            answer=_last_value(last[name]),
            more='on_nan="stop" ends such a run at its first step',
            tone="bad",
            link=f"{prefix}metrics",
        )
    ]


def _last_value(series: SeriesStory) -> str:
    if series.bad_since is not None:
        since, word = series.bad_since
        return f"last {series.name} {word}{since_suffix(since)}"
    value = next((v for v in reversed(series.values) if v is not None), None)
    return f"last {series.name} {figure(value)}"


def _answers(story: Story, prefix: str) -> list[Answer]:
    ending, found = story.ending, []
    tones = {"succeeded": "good", "running": "", "waiting": "", "starting": ""}
    tone = tones.get(ending.state, "bad")
    why = ending.sentence if ending.is_final else "it has not ended"
    if story.training is not None:
        found += _answer_of_bad_loss(story.training, prefix)
    if story.sweep is not None:
        found += _answer_of_sweep(story.sweep, prefix)
    found.append(
        Answer(
            question="How did it end?" if ending.is_final else "Where does it stand?",
            answer=ending.state,
            more=why,
            tone=tone,
            link=f"{prefix}end",
        )
    )
    took = "How long did it take?" if ending.is_final else "How long has it run?"
    found.append(
        Answer(
            question=took,
            answer=span(ending.elapsed_s),
            more=node_time(story.cost.held_s) if story.cost.held_s else "",
            link=f"{prefix}cost",
        )
    )
    if story.groups:
        return [*found, _tasks_answer(story)]
    last = next((one for one in reversed(story.attempts) if one.has_failed), None)
    if story.num_attempts:
        more = f"attempt {last.number} ended: {last.ended_by}" if last else "none failed"
        answer = several(story.num_attempts, "attempt")
        found.append(
            Answer(
                question="Was it started again?", answer=answer, more=more, link=f"{prefix}timeline"
            )
        )
    if story.training is not None:
        found.append(_steps_answer(story, story.training, prefix))
    if story.slowest is not None:
        found.append(_slowest_answer(story, story.slowest, prefix))
    has_trained = story.training is not None and story.training.steps_done > 0
    if story.cost.goodput is not None and (has_trained or story.cost.kept_s > 0):
        found.append(_goodput_answer(story, prefix))
    return found


def _tasks_answer(story: Story) -> Answer:
    tasks = [task for group in story.groups for task in group.tasks]
    done = sum(task.state == "COMPLETED" for task in tasks)
    return Answer(
        question="How many tasks?",
        answer=str(len(tasks)),
        more=f"{done} completed",
        link="timeline",
    )


def _steps_answer(story: Story, training: TrainingStory, prefix: str) -> Answer:
    again = training.steps_done - training.step
    if story.attempts and story.attempts[0].first_step:  # it resumed from another run's snapshot
        again = training.steps_done - (training.step - story.attempts[0].first_step)
    last = next((one for one in training.series if one.num_points), None)
    parts = [_last_value(last)] if last is not None else []
    parts += [f"{several(again, 'step')} done twice"] if again > 0 else []
    return Answer(
        question="How far did it come?",
        answer=f"step {training.step:,}",
        more="; ".join(parts),
        link=f"{prefix}metrics",
    )


def _slowest_answer(story: Story, slowest: RankTotals, prefix: str) -> Answer:
    share = slowest.over_median or 0.0
    where = f"rank {slowest.rank} on {slowest.node}"
    is_even = share < _NOTEWORTHY
    even = f"{where} by {percent(share, 1)}: the ranks are even"
    slow = f"{percent(share)} slower than the median rank: {_slow_part(story, slowest)}"
    return Answer(
        question="Which rank is the slowest?",
        answer="none stands out" if is_even else where,
        more=even if is_even else slow,
        tone="" if is_even else "warn",
        link=f"{prefix}ranks",
    )


def _slow_part(story: Story, slowest: RankTotals) -> str:
    """Return a phrase about the phase in which the slowest rank exceeds the others' median most."""
    totals = story.ranks.totals if story.ranks else ()
    found = []
    for name, _, key in charts.PHASES[:3]:
        others = sorted(
            getattr(t, key) / t.phased_steps
            for t in totals
            if t.phased_steps and t.rank != slowest.rank
        )
        own = getattr(slowest, key) / max(slowest.phased_steps, 1)
        usual = others[len(others) // 2] if others else 0.0
        found.append((own - usual, name, own, usual))
    _, name, own, usual = max(found)
    return f"{name} takes {span(own)} a step, the others {span(usual)}"


def _goodput_answer(story: Story, prefix: str) -> Answer:
    cost = story.cost
    least, most = percent(cost.goodput), percent(cost.most_goodput)
    words = f"{node_time(cost.lost_s)} lost to failures, {node_time(cost.restarting_s)} to restarts"
    answer = least if least == most else f"{least} to {most}"
    return Answer(
        question="How much of it counts?",
        answer=f"goodput {answer}",
        more=words,
        link=f"{prefix}cost",
    )
