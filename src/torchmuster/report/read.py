"""Read the story of a run from its directory; tolerate missing, torn, older or hostile files."""

import math
import os
import pwd
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torchmuster
from torchmuster.core import plugs
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.codec import moment_of
from torchmuster.core.model.events import AttemptNode
from torchmuster.core.model.failure import RanCode, WorkerEnd
from torchmuster.core.model.narration import narrate
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import HIDDEN, hide_in_arguments, hide_secrets, is_secret_name
from torchmuster.core.owner.record import DAMAGED
from torchmuster.errors import MusterError
from torchmuster.launcher.model.run import (
    WHOLE_FIRST,
    WHOLE_LAST,
    AttemptRecord,
    LibraryStart,
    RunRecord,
    TrainingState,
    frequent_causes,
    lines,
    listed,
    mapped,
    number,
    several,
    text,
    whole,
)
from torchmuster.launcher.owner.origin import CodeVersion, Origin
from torchmuster.launcher.views.account import account_of, how_to_go_on
from torchmuster.launcher.views.run_view import RunView
from torchmuster.launcher.views.training import TrainingReader
from torchmuster.report.loose import TolerantRecord, object_in
from torchmuster.report.story import (
    AttemptStory,
    Band,
    Cost,
    Ending,
    NetworkStory,
    NodePair,
    RanksStory,
    RankTotals,
    Story,
    WhatRan,
)
from torchmuster.report.training import training_story, when_reached

# The attempts of a training run: the head's record joined with the training library's.


_MAX_NODES = 64
_MAX_NETWORK, _MAX_PAIRS = 256, 4096


def attempt_stories(
    record: RunRecord,
    attempts: Sequence[AttemptRecord],
    training: TrainingState | None,
    saved_step: int | None,
) -> tuple[AttemptStory, ...]:
    """Return all attempts, joined with what the training library has recorded for each.

    Args:
        record: The head's record.
        attempts: The attempts in that record.
        training: The training library's record, if any.
        saved_step: The step from which a restart would continue after the last attempt.
    """
    starts = training.starts if training is not None else []
    found: list[AttemptStory] = []
    place = 0
    for index, attempt in enumerate(attempts):
        is_last = index + 1 == len(attempts)
        ends = float("inf") if is_last else attempts[index + 1].began
        while place < len(starts) and starts[place].at < attempt.began:
            place += 1
        start = starts[place] if place < len(starts) and starts[place].at < ends else None
        following = next((s for s in starts[place + 1 :] if s.at >= ends), None) if start else None
        kept = following.step if following is not None else None
        if is_last:
            kept = saved_step
        state = record.result.state.value if is_last and record.result is not None else ""
        one = _attempt_story(attempt, start, state)
        if training is not None and start is not None and kept is not None:
            kept = min(kept, start.last_step)
            one = replace(one, kept_step=kept, kept_at=when_reached(training, start, kept))
        found.append(one)
    return tuple(found)


def _attempt_story(attempt: AttemptRecord, start: LibraryStart | None, state: str) -> AttemptStory:
    failure, cause, nodes = attempt.failure, attempt.cause, attempt.start.nodes
    ended_by = text(failure.what, 500) if failure is not None else text(attempt.stop, 300)
    if not ended_by and attempt.ended is not None:
        ended_by = "all workers ended well" if state == "succeeded" else state
    last_step = cause.step if cause is not None else None
    return AttemptStory(
        number=attempt.number,
        began=attempt.began,
        ended=attempt.ended,
        workers_at=attempt.workers_at,
        training_at=start.at if start is not None else None,
        why=text(attempt.start.why, 300),
        ended_by=ended_by,
        has_failed=failure is not None,
        cause_rank=whole(cause.rank) if cause is not None else None,
        cause_node=text(cause.node, 80) if cause is not None else "",
        world_size=attempt.num_workers or 0,
        nodes=tuple(
            AttemptNode(node=text(n.node, 80), host=text(n.host, 80), ranks=text(n.ranks, 80))
            for n in nodes[:_MAX_NODES]
        ),
        num_nodes=attempt.start.num_nodes or len(nodes),
        first_step=start.step if start is not None else None,
        last_step=start.last_step if start is not None else last_step,
        evidence=_evidence(cause) if cause is not None else (),
        ends=tuple(
            replace(one, node=text(one.node, 80), what=text(one.what, 300)) for one in attempt.ends
        ),
        num_ends=attempt.num_ends,
    )


def _evidence(cause: WorkerEnd) -> tuple[str, ...]:
    found = lines(cause.error.traceback if cause.error is not None else list(cause.tail), 30)
    more = (cause.detail, cause.memory_evidence)
    return (*found, *(text(one) for one in more if one is not None))


def network_story(record: RunRecord) -> NetworkStory | None:
    """Return the network of a run: what its workers used, or what the preflight has measured."""
    network, looked = record.network, record.preflight
    if network is not None:
        nodes, pairs, sentence = network.nodes, network.pairs, text(narrate(network))
    elif looked is not None and looked.pairs:
        nodes = tuple(str(row.get("node", "")) for row in looked.nodes)
        pairs, sentence = looked.pairs, ""
    else:
        return None
    return NetworkStory(
        sentence=sentence,
        nodes=tuple(text(name, 80) for name in nodes[:_MAX_NETWORK]),
        pairs=tuple(
            NodePair(
                source=source,
                target=target,
                why=text(why, 200) or None,
                latency_us=number(latency_us),
                mb_per_s=number(mb_per_s),
            )
            for source, target, why, latency_us, mb_per_s in pairs[:_MAX_PAIRS]
            if min(source, target) >= 0
        ),
    )


def few_attempts(attempts: Sequence[AttemptStory]) -> tuple[AttemptStory, ...]:
    """Return the attempts; if there are very many, the first and the last."""
    if len(attempts) <= WHOLE_FIRST + WHOLE_LAST:
        return tuple(attempts)
    return (*attempts[:WHOLE_FIRST], *attempts[-WHOLE_LAST:])


# The cost of a run: node hours, time lost to failures and restarts, goodput.
#
# A node second is one second in which one node was held. Every second between the start of the run
# and its end is of one kind:
#
#     starting      before the first training step: nodes, imports, loading
#     kept          training of steps that count
#     lost          training of steps that were done again, or never saved when the run ended badly
#     restarting    between the end of an attempt and the first training step of the next
#
# Goodput is `kept / all`. If a script saves by itself, it is unknown what a failed attempt has
# saved: then there are two numbers, for nothing and for everything.


def cost_of(
    attempts: Sequence[AttemptStory],
    *,
    blocked_s: float | None,
    began: float | None,
    ended: float | None,
    went_well: bool,
) -> Cost:
    """Return the cost of a run.

    Args:
        attempts: All attempts.
        blocked_s: How long the loop waited for snapshots; None without the training library.
        began: When the run began.
        ended: When it ended (its last event), or the current time.
        went_well: Whether the work of the last attempt counts to its end.
    """
    if not attempts or began is None or ended is None:
        return Cost()
    starting = kept = unsure = lost = restarting = workers = 0.0
    before = began
    for place, attempt in enumerate(attempts):
        is_last = place + 1 == len(attempts)
        over = max(attempt.began, attempt.ended if attempt.ended is not None else ended)
        over = min(over, attempts[place + 1].began) if not is_last else over
        trains = min(attempt.training_at or attempt.workers_at or over, over)
        nodes = max(attempt.num_nodes, 1)
        idle = nodes * max(0.0, trains - before)
        if place:
            restarting += idle
        else:
            starting += idle
        trained = nodes * (over - trains)
        counts = went_well if is_last else not attempt.has_failed and attempt.training_at is None
        if counts:
            kept += trained
        elif blocked_s is not None and attempt.training_at is not None:
            part = nodes * _kept_s(attempt, trains, over)
            kept += part
            lost += trained - part
        else:
            unsure += trained
        workers += max(attempt.world_size, 1) * (over - before)
        before = over
    nodes = max(attempts[-1].num_nodes, 1)
    restarting += nodes * max(0.0, ended - before)
    held = starting + kept + unsure + lost + restarting
    return Cost(
        held_s=held,
        worker_s=workers + max(attempts[-1].world_size, 1) * max(0.0, ended - before),
        starting_s=starting,
        kept_s=kept,
        lost_s=lost + unsure,
        restarting_s=restarting,
        saving_s=nodes * (blocked_s or 0.0),
        most_kept_s=kept + unsure,
        goodput=kept / held if held > 0 else None,
        most_goodput=(kept + unsure) / held if held > 0 else None,
    )


def _kept_s(attempt: AttemptStory, trains: float, over: float) -> float:
    """Return how long an attempt's training counts: up to the step from which the next resumed."""
    if attempt.kept_at is None:
        return 0.0
    return min(max(0.0, attempt.kept_at - trains), over - trains)


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

    def summary(self) -> RanksStory | None:
        """Return the summary; None without samples."""
        if self.began is None or not self._spans:
            return None
        num_spans = max(self._spans) + 1
        spans = self._filled_spans(num_spans)
        own = [_own_ms(span) if span is not None else [] for span in spans]
        size = len(self._nodes)
        return RanksStory(
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


# What readers of other commands raise for a value of an unexpected form.
MALFORMED = DAMAGED


def read_run_story(view: RunView) -> Story:
    """Return the story of a training run."""
    return _Reading(view).story()


def owner_of(path: str) -> str:
    """Return the name of the account that owns a folder."""
    try:
        uid = os.stat(path).st_uid
        return pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        return "another user"


_MAX_CAUSES = 20


class _Reading:
    """Reads all files of one training run into a story."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.run_dir = view.run_dir
        self.gaps: list[str] = []
        self.plan = self._object(self.run_dir.plan, "what was started is not known")
        self.result = self._object(self.run_dir.result, "how the run ended is not known")

    def story(self) -> Story:
        events, path = self.view.record, self.run_dir.events
        if not self._note_gaps(path, events.why_not, events.num_torn) and not events.began:
            what = "the run never began, or its head has written nothing"
            self.gaps.append(f"events.jsonl has no event: {what}")
        recorded = self.view.attempts
        training = self._training()
        samples = self._samples()
        ending = self._ending(events)
        saved = self._saved_step(training)
        attempts = attempt_stories(events, recorded, training, saved)
        causes = frequent_causes(recorded, _MAX_CAUSES)
        ended = events.last_at if ending.is_final else time.time()
        cost = cost_of(
            attempts,
            blocked_s=training.blocked_s if training is not None else None,
            began=events.began,
            ended=ended,
            went_well=ending.state == RunState.SUCCEEDED.value or not ending.is_final,
        )
        return Story(
            made=time.time(),
            made_by=torchmuster.__version__,
            kind="run",
            run_id=text(self.view.run_id, 200),
            name=text(short_id(self.view.run_id), 200),
            folder=text(self.run_dir.path),
            what=read_what(self.view, self.plan, events, self.gaps),
            ending=ending,
            began=events.began,
            ended=events.last_at if ending.is_final else None,
            attempts=few_attempts(attempts),
            num_attempts=len(attempts),
            causes=tuple((text(what, 300), num) for what, num in causes),
            moments=tuple(events.moments),
            num_moments=events.num_moments,
            training=training_story(training) if training is not None else None,
            ranks=samples.summary() if samples is not None else None,
            network=network_story(events),
            cost=cost,
            gaps=tuple(self.gaps),
        )

    def _object(self, path: str, gap: str) -> dict[str, Any]:
        found, why = object_in(path)
        if why:
            self.gaps.append(f"{os.path.basename(path)} can't be read ({why}): {gap}")
        elif not found and path == self.run_dir.plan:
            self.gaps.append(f"{os.path.basename(path)} is missing: {gap}")
        return found

    def _training(self) -> TrainingState | None:
        if not os.path.exists(self.run_dir.training):
            self.gaps.append(
                "there is no training.jsonl: the script does not use torchmuster.train, or its first step never began;"
                " so metrics, saves and samples are not known"
            )
            return None
        reader = TrainingReader(self.run_dir)
        training = reader.read()
        self._note_gaps(self.run_dir.training, reader.why_not, reader.num_torn)
        return training

    def _note_gaps(self, path: str, why_not: str, num_bad: int) -> bool:
        """Note which part of a record could not be read; return whether there was any."""
        name = os.path.basename(path)
        if why_not:
            self.gaps.append(f"{name} can't be read: {why_not}")
        elif num_bad:
            what = "torn by a crash, or not complete yet"
            self.gaps.append(f"{several(num_bad, 'line')} of {name} can't be read: {what}")
        return bool(why_not or num_bad)

    def _samples(self) -> SampleRecord | None:
        if not os.path.exists(self.run_dir.samples):
            self.gaps.append(
                "there is no samples.jsonl: how each rank stood over time is not known"
            )
            return None
        record = TolerantRecord(self.run_dir.samples)
        samples = read_samples(record)
        self._note_gaps(record.path, record.why_not, record.num_bad)
        if samples.num_bad:
            self.gaps.append(
                f"{several(samples.num_bad, 'line')} of samples.jsonl can't be understood"
            )
        return samples

    def _saved_step(self, training: TrainingState | None) -> int | None:
        of_result = whole(self.result.get("saved_step"))
        if of_result is not None or training is None:
            return of_result
        done = [save.step for save in training.saves if save.done_at is not None]
        return max(done, default=None)

    def _ending(self, events: RunRecord) -> Ending:
        state = self.view.state.value
        state_text = text(self.result.get("state"), 40)
        known = {one.value: one for one in RunState}
        if (
            state_text and self.view.result is None
        ):  # the result is of another version, or half written
            state = state_text
        report = mapped(self.result.get("report"))
        because = lines(report.get("because"))
        sentence, at, hint = (
            text(report.get("error")),
            text(report.get("at")),
            text(report.get("hint")),
        )
        more = listed(report.get("more"))[:4]
        if self.view.result is not None and self.view.result.state is RunState.FAILED:
            better = self._explained()
            if better is not None:
                sentence, because = text(better.error), lines(list(better.because))
                at, hint, more = text(better.at or ""), text(better.hint or ""), list(better.more)
        is_final = known[state].is_final if state in known else True
        if not sentence and is_final and state != RunState.SUCCEEDED.value:
            sentence = text(self._account_end())
        elapsed = number(self.result.get("elapsed_s"))
        if events.began is not None and events.last_at is not None:
            until = events.last_at if is_final else time.time()
            elapsed = max(elapsed or 0.0, until - events.began)
        return Ending(
            state=state,
            is_final=is_final,
            exit_code=whole(self.result.get("exit_code")),
            elapsed_s=elapsed,
            sentence=sentence,
            at=at,
            because=because,
            hint=hint,
            notes=tuple(text(note) for note in (*listed(self.result.get("notes"))[:20], *more)),
            go_on=self._go_on(is_final=is_final, state=state),
            restarts_spent=whole(self.result.get("restarts_spent")) or 0,
        )

    def _explained(self) -> Any:
        explained, result = plugs.find("ends", "explain"), self.view.result
        return (
            explained(result, self.run_dir)
            if explained is not None and result is not None
            else None
        )

    def _account_end(self) -> str:
        try:
            return account_of(self.view, time.time()).ended_by or ""
        except (*MALFORMED, MusterError):
            return ""

    def _go_on(self, *, is_final: bool, state: str) -> str:
        if not is_final or state == RunState.SUCCEEDED.value:
            return ""
        try:
            return text(how_to_go_on(self.run_dir, self.view.result) or "")
        except MALFORMED:  # the training record is damaged, which is noted where it is read
            return ""


def read_what(
    view: RunView, plan: Mapping[str, Any], events: RunRecord, gaps: list[str]
) -> WhatRan:
    """Return what ran, from the plan, the recorded origin, and the reports of the nodes."""
    program, limits = mapped(plan.get("program")), mapped(plan.get("limits"))
    setup = mapped(plan.get("node_setup"))
    origin, code, why = _origin(view.run_dir, gaps)
    ran = events.code or RanCode(files=())
    engine, jobs = text(plan.get("engine"), 80), _jobs(view)
    words = [
        text(word)
        for word in (program.get("target"), *listed(program.get("args")))
        if isinstance(word, str)
    ]
    if program.get("kind") == "module":
        words.insert(0, "-m")
    return WhatRan(
        command=hide_in_arguments(words[:500]),
        folder=text(program.get("cwd")),
        interpreter=" ".join(text(word) for word in listed(program.get("python"))[:20]),
        engine=engine,
        jobs=jobs,
        user=text(origin.get("user"), 80) or owner_of(view.run_dir.path),
        host=text(origin.get("host"), 200)
        or text(object_in(view.run_dir.owner)[0].get("host"), 200),
        submitted=view.submitted or None,
        num_nodes=_num_nodes(plan),
        workers_per_node=tuple(
            n for n in map(whole, listed(plan.get("workers_per_node"))[:64]) if n is not None
        ),
        torchmuster=text(origin.get("torchmuster"), 40),
        software=tuple(_software(row) for row in _rows(events)[:8]),
        environment=tuple(_variables(setup)),
        setup=tuple(
            hide_secrets(text(line))
            for line in (*listed(setup.get("lines")), *listed(setup.get("before")))
        )[:100],
        limits=tuple(
            (text(name, 40), f"{value:g}")
            for name in limits
            if (value := number(limits[name])) is not None
        ),
        code=code,
        why_no_code=why,
        ran=tuple((text(f.path, 300), text(f.sha256, 64), f.changed) for f in ran.files[:200]),
        num_ran_left_out=ran.num_left_out,
        packages=tuple(text(one, 200) for one in listed(origin.get("packages"))[:2000]),
    )


def _rows(record: RunRecord) -> tuple[dict[str, Any], ...]:
    """Return the software that nodes have reported, one row for each kind of node or each node."""
    return (record.preflight.software or record.preflight.nodes) if record.preflight else ()


def _origin(run_dir: RunDir, gaps: list[str]) -> tuple[dict[str, Any], CodeVersion | None, str]:
    found, why = object_in(run_dir.origin)
    if not found:
        why = (
            why
            or "origin.json is missing: the run was started by an older version, or a moment ago"
        )
        return {}, None, why
    try:
        origin = codec.from_plain(Origin, found)
    except codec.CodecError as error:
        gaps.append(
            f"origin.json is of another form ({text(str(error), 200)}): the version of the code is not known"
        )
        return found, None, "origin.json is of another form"
    return found, _clean(origin.code), origin.why_no_code


def _clean(code: CodeVersion | None) -> CodeVersion | None:
    """Return the version with printable text: file names and diff lines can contain anything."""
    if code is None:
        return None
    return CodeVersion(
        root=text(code.root),
        commit=text(code.commit, 80),
        branch=text(code.branch, 200),
        changed=tuple(text(name, 300) for name in code.changed[:100]),
        num_changed=code.num_changed,
        untracked=tuple(text(name, 300) for name in code.untracked[:100]),
        num_untracked=code.num_untracked,
        difference=text(hide_secrets(code.difference), 300_000),
        left_out=text(code.left_out, 300),
    )


def _jobs(view: RunView) -> tuple[str, ...]:
    try:
        return tuple(text(job, 80) for job in account_of(view, time.time()).jobs[-20:])
    except (*MALFORMED, MusterError):
        return ()


def _num_nodes(plan: Mapping[str, Any]) -> str:
    least, most = whole(plan.get("min_nodes")), whole(plan.get("max_nodes"))
    if least is None or most is None:
        return ""
    return str(most) if least == most else f"{least} to {most}"


def _software(row: Mapping[str, Any]) -> dict[str, str]:
    wanted = (
        "node",
        "nodes",
        "python",
        "torch",
        "cuda",
        "nccl",
        "driver",
        "num_gpus",
        "gpu",
        "num_cpus",
        "machine",
        "kernel",
    )
    found = {}
    for name in wanted:
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            found[name] = text(str(value), 200)
        elif isinstance(value, list):
            found[name] = text(", ".join(map(str, value[:16])), 300)
    memory = number(row.get("memory_bytes"))
    if memory:
        found["memory"] = f"{memory / 2**30:.0f} GiB"
    return found


def _variables(setup: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for pair in listed(setup.get("environment"))[:500]:
        if isinstance(pair, list) and len(pair) == 2:
            name, value = text(pair[0], 200), text(pair[1])
            found.append((name, HIDDEN if is_secret_name(name) else hide_secrets(value)))
    return found
