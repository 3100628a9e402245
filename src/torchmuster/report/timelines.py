"""Bars over time: the attempts of a run, its ranks or nodes, the tasks of a workflow."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.model.record.run import RankEnd
from torchmuster.report import plots
from torchmuster.report.charts import PlotSheet
from torchmuster.report.plots import Labels, PlotBar, PlotPiece
from torchmuster.report.story import AttemptTold, Story
from torchmuster.report.words import span

_WELL = "exit code 0"
_ROWS_OF_PLOT = 24
_MOST_RANKS = 16  # of more the nodes have a lane each
_MOST_TELLING = 20  # attempts whose evidence is shown


@dataclass(frozen=True, slots=True)
class _Stay:
    """A rank or a node in one attempt, and what ended there by itself."""

    attempt: AttemptTold
    node: str
    ends: tuple[RankEnd, ...]


def timeline_of_attempts(story: Story, prefix: str) -> PlotSheet | None:
    """Return a bar for each attempt, of very many the first and the last; None where there was none."""
    if not story.attempts or story.began is None:
        return None
    shown = _few(story.attempts)
    end = story.ended or story.made
    rows = [_attempt_bar(one, story.began, end) for one in shown]
    left = story.num_attempts - len(shown)
    words = "A bar for each attempt: its start, the training that counts, and the training that was lost. A cross: a failure ended it."
    words += f" {left} attempts between are left out." if left else ""
    labels = Labels(
        key=f"{prefix}timeline-plot",
        title="Attempts over time",
        words=words,
        x="since the start of the run",
    )
    return PlotSheet(
        key=labels.key,
        title=labels.title,
        words=words,
        svg=plots.bars(labels, rows, is_time=True, left=150),
        is_wide=True,
    )


def _few(attempts: Sequence[AttemptTold]) -> Sequence[AttemptTold]:
    """Return as many as a plot has rows, the first and the last."""
    if len(attempts) <= _ROWS_OF_PLOT:
        return attempts
    return (*attempts[:4], *attempts[4 - _ROWS_OF_PLOT :])


def telling_attempts(attempts: Sequence[AttemptTold]) -> tuple[AttemptTold, ...]:
    """Return the attempts whose evidence is not that of the one before; of very many the last."""
    found: list[AttemptTold] = []
    for one in attempts:
        if one.has_failed and (not found or one.evidence != found[-1].evidence):
            found.append(one)
    return tuple(one for one in found[-_MOST_TELLING:] if one.evidence or one.num_ends > 1)


def _attempt_bar(one: AttemptTold, began: float, end: float) -> PlotBar:
    over = max(one.ended if one.ended is not None else end, one.began)
    trains = min(one.training_at or one.workers_at or over, over)
    counts = (
        over
        if not one.has_failed and one.kept_at is None
        else max(trains, min(one.kept_at or trains, over))
    )
    if not one.has_failed and one.ended_by == "all workers ended well":
        counts = over
    parts = [
        (one.began, trains, "t-start", "start"),
        (trains, counts, "t-kept", "training that counts"),
    ]
    parts.append((counts, over, "t-lost", "training that was lost"))
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


def lanes_of_ranks(story: Story, prefix: str) -> PlotSheet | None:
    """Return a lane for each rank, of many for each node; None where an attempt alone says as much."""
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
    key = f"{prefix}lanes-plot"
    labels = Labels(
        key=key,
        title=f"{what.capitalize()}s over time",
        words=words,
        x="since the start of the run",
    )
    svg = plots.bars(labels, kept, is_time=True, left=150)
    return PlotSheet(key=key, title=labels.title, words=words, svg=svg, is_wide=True)


def _rank_lanes(story: Story, shown: Sequence[AttemptTold]) -> list[PlotBar]:
    lanes: dict[int, list[_Stay]] = {}
    for one in shown:
        ends = {end.rank: end for end in one.ends}
        for node in one.nodes:
            for rank in _ranks_in(node.ranks):
                own = ends.get(rank)
                lanes.setdefault(rank, []).append(_Stay(one, node.node, (own,) if own else ()))
    return [
        _lane(story, f"rank {rank} on {stays[-1].node}"[:22], stays)
        for rank, stays in sorted(lanes.items())
    ]


def _node_lanes(story: Story, shown: Sequence[AttemptTold]) -> list[PlotBar]:
    lanes: dict[str, list[_Stay]] = {}
    for one in shown:
        for node in one.nodes:
            ends = tuple(end for end in one.ends if end.node == node.node)
            lanes.setdefault(node.node, []).append(_Stay(one, node.node, ends))
    return [_lane(story, node[:22], stays) for node, stays in lanes.items()]


def _lane(story: Story, name: str, stays: Sequence["_Stay"]) -> PlotBar:
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
    """Return the ranks of `0-7,16`; of another form none."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return []
        found += range(int(first), min(int(last or first), int(first) + _MOST_RANKS) + 1)
    return found


def timeline_of_tasks(story: Story) -> PlotSheet | None:
    """Return a bar for each task of a workflow; None where none has begun."""
    tasks = [task for group in story.groups for task in group.tasks if task.began is not None]
    if not tasks or story.began is None:
        return None
    began, end = story.began, story.ended or story.made
    rows = []
    for task in tasks[:60]:
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
    labels = Labels(
        key="timeline-plot",
        title="Tasks over time",
        words=words,
        x="since the start of the workflow",
    )
    return PlotSheet(
        key=labels.key,
        title=labels.title,
        words=words,
        svg=plots.bars(labels, rows, is_time=True, left=170),
        is_wide=True,
    )
