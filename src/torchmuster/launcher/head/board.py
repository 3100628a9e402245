"""Live state of all ranks: collect the agents' reports, serve viewers, and write the record.

A value of a sample is the change between two reports of a rank. Viewers get a window of ten to
twenty seconds, so that the numbers are steady. The record (`samples.jsonl`) has a line every ten
seconds at first. The interval doubles with every 4 MiB of the file, including what earlier heads
wrote, so its size grows with the logarithm of the run's time: a line for 512 ranks has about 60 KB,
and a week of them about 40 MiB.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.model import codec
from torchmuster.core.model.codec import utc_now
from torchmuster.core.model.failure import WorkerEnd
from torchmuster.core.model.progress import RankPhase
from torchmuster.launcher.head.hangs.stragglers import StepParts, per_step, waits_s
from torchmuster.launcher.head.hangs.watch import was_active
from torchmuster.launcher.model.progress import RankProgress, RankSample, split
from torchmuster.launcher.net import part_messages

WRITE_EVERY_S = 10.0
DOUBLE_EVERY_BYTES = 4 << 20
_WINDOW_S = 10.0  # viewers get one to two windows
_FRESH_S = 1.0  # how long one sample serves all viewers
_RANKS_PER_MESSAGE = 1024  # with names of 100 characters still half a frame
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _RankReport:
    """An agent's report on a rank, and when it came."""

    at: float
    progress: RankProgress


@dataclass(slots=True)
class _Baseline:
    """The earlier reports with which the newest ones are compared."""

    at: float
    ranks: dict[int, _RankReport] = field(default_factory=dict)


class Board:
    """Live state of the ranks of the running attempt.

    Args:
        write: Appends a line to the record.
        has_bytes: Size of the record that earlier heads have written.
    """

    def __init__(self, write: Callable[[bytes], None], has_bytes: int = 0) -> None:
        self._write, self._has_bytes = write, has_bytes
        self.attempt: int | None = None
        self._nodes: tuple[str, ...] = ()
        self._ended: set[int] = set()
        self._num_ends = 0
        self._reports: dict[int, _RankReport] = {}
        self._stepped: dict[int, _RankReport] = {}  # each rank's first report of a step
        self._active_at: dict[int, float] = {}
        self._written = self._older = self._newer = _Baseline(0.0)
        self._is_news = False
        self._shown: tuple[float, RankSample] | None = None

    # Reports.

    def begin(self, now: float, attempt: int, nodes: Mapping[int, str]) -> None:
        """Start an attempt; `nodes` maps each rank to its node."""
        self.end(now)
        self.attempt = attempt
        self._nodes = tuple(nodes[rank] for rank in sorted(nodes))
        self._reports, self._stepped, self._ended, self._num_ends = {}, {}, set(), 0
        self._active_at = {}
        self._written = self._older = self._newer = _Baseline(now)

    def take(self, now: float, progress: Sequence[RankProgress]) -> None:
        """Handle an agent's report."""
        for one in progress:
            if not 0 <= one.rank < len(self._nodes):
                continue
            before = self._reports.get(one.rank)
            if before is None or was_active(before.progress, one, now - before.at):
                self._active_at[one.rank] = now
            report = self._reports[one.rank] = _RankReport(now, one)
            for base in (self._written, self._older, self._newer):
                base.ranks.setdefault(one.rank, report)  # its first report is compared with itself
            if one.steps_here:
                self._stepped.setdefault(one.rank, report)
            self._is_news = True
        if now - self._newer.at >= _WINDOW_S:
            self._older, self._newer = self._newer, _Baseline(now, dict(self._reports))

    def note_ends(self, ends: Sequence[WorkerEnd]) -> None:
        """Record which workers have ended; `ends` are all of the attempt, in order."""
        self._ended.update(end.rank for end in ends[self._num_ends :])
        self._num_ends = len(ends)

    def advance(self, now: float) -> None:
        """Write a line when it is due."""
        every_s = WRITE_EVERY_S * 2 ** (self._has_bytes // DOUBLE_EVERY_BYTES)
        if self._is_news and now - self._written.at >= every_s:
            self._record(now)

    def end(self, now: float) -> None:
        """End the attempt; write what is not written yet."""
        if self.attempt is not None and self._is_news:
            self._record(now)
        self.attempt = self._shown = None

    # Samples.

    def answer(self, now: float, ask_id: str) -> list[part_messages.BoardSample]:
        """Return the answer to a client."""
        sample = self.newest(now)
        if sample is None:
            return [part_messages.BoardSample(ask_id=ask_id, sample=None)]
        parts = split(sample, _RANKS_PER_MESSAGE)
        return [
            part_messages.BoardSample(ask_id=ask_id, sample=part, is_last=part is parts[-1])
            for part in parts
        ]

    def newest(self, now: float) -> RankSample | None:
        """Return the state of all ranks, at most a second old; None while no attempt runs."""
        if self.attempt is None:
            return None
        if self._shown is None or now - self._shown[0] >= _FRESH_S:
            self._shown = (now, self._sample(now, self._older))
        return self._shown[1]

    def _record(self, now: float) -> None:
        sample = self._sample(now, self._written)
        plain = {name: value for name, value in codec.to_plain(sample).items() if value != []}
        line = json.dumps(plain, separators=(",", ":")).encode() + b"\n"
        self._write(line)
        self._has_bytes += len(line)
        self._written, self._is_news = _Baseline(now, dict(self._reports)), False

    def _sample(self, now: float, base: _Baseline) -> RankSample:
        ranks = range(len(self._nodes))
        rows = [self._row(now, rank, base) for rank in ranks]
        steps = {rank: row.parts for rank, row in enumerate(rows) if row.parts is not None}
        waits = waits_s(steps)
        for rank, wait_s in waits.items():
            rows[rank].values["wait_s"] = round(wait_s * rows[rank].num_steps, 3)
        return RankSample(
            time=utc_now(),
            attempt=self.attempt or 0,
            over_s=round(max(now - base.at, 0.0), 3),
            nodes=self._nodes,
            **{name: _column(rows, name) for name in _COLUMNS},
        )

    def _row(self, now: float, rank: int, base: _Baseline) -> "_Row":
        report = self._reports.get(rank)
        if report is None:
            return _Row({"states": "" if rank in self._ended else "?"})
        progress, before = report.progress, base.ranks[rank]
        values: dict[str, Any] = {
            "states": "" if rank in self._ended else progress.state,
            "report_ages_s": round(max(now - report.at, 0.0), 1),
            "still_s": round(report.at - self._active_at[rank], 1),
            "rss_mib": progress.rss_mib,
            "gpu_percent": progress.gpu_percent,
            "gpu_mib": progress.gpu_mib,
            **_of_kernel(before, report),
        }
        if progress.beat_age_s is None:
            return _Row(values)
        values["ages_s"] = round(progress.beat_age_s + max(now - report.at, 0.0), 1)
        # The time before the first step belongs to no step.
        start = before if before.progress.steps_here else self._stepped.get(rank, report)
        values |= _of_library(before.progress, start.progress, progress)
        num_steps = progress.steps_here - start.progress.steps_here
        over_s = progress.step_at - start.progress.step_at
        if num_steps <= 0 or over_s <= 0:
            return _Row(values)
        parts = per_step(start.progress, progress)
        values["steps_per_s"] = round(num_steps / over_s, 4)
        values["rest_s"] = round(parts.rest_s * num_steps, 3)
        return _Row(values, num_steps, parts)


@dataclass(frozen=True, slots=True)
class _Row:
    """The values of one rank, by column; `parts` only if it has made steps."""

    values: dict[str, Any]
    num_steps: int = 0
    parts: StepParts | None = None


def _of_kernel(before: _RankReport, now: _RankReport) -> dict[str, Any]:
    over_s = now.at - before.at
    if over_s <= 0:
        return {}
    busy_s = now.progress.active_s - before.progress.active_s
    io_bytes = now.progress.io_bytes - before.progress.io_bytes
    return {
        "cpus": round(max(busy_s, 0.0) / over_s, 2),
        "io_mib": round(max(io_bytes, 0) / _MIB, 1),
    }


def _of_library(before: RankProgress, start: RankProgress, now: RankProgress) -> dict[str, Any]:
    values: dict[str, Any] = {
        "steps": now.step if now.steps_here else None,
        "steps_here": now.steps_here,
        "phases": now.phase.name.lower(),
        "median_s": now.median_s or None,
    }
    if len(now.seconds) != _NUM_PHASES:
        return values
    for name, (phase, is_of_steps) in _PHASES.items():
        first = start if is_of_steps else before
        if len(first.seconds) == _NUM_PHASES:
            values[name] = round(max(now.seconds[phase] - first.seconds[phase], 0.0), 3)
    return values


_NUM_PHASES = len(RankPhase)
_PHASES = {  # column -> phase, and whether it is part of every step
    "data_s": (RankPhase.DATA, True),
    "forward_s": (RankPhase.FORWARD, True),
    "save_s": (RankPhase.SAVE, False),
    "evaluate_s": (RankPhase.EVALUATE, False),
}
_COLUMNS = (
    *(
        "states",
        "report_ages_s",
        "still_s",
        "steps",
        "steps_here",
        "ages_s",
        "phases",
        "steps_per_s",
    ),
    *("median_s", "data_s", "forward_s", "rest_s", "wait_s", "save_s", "evaluate_s"),
    *("cpus", "rss_mib", "io_mib", "gpu_percent", "gpu_mib"),
)


def _column(rows: Sequence[_Row], name: str) -> tuple[Any, ...]:
    """Return a column; empty where no rank has a value."""
    nothing = "" if name == "phases" else None
    column = tuple(row.values.get(name, nothing) for row in rows)
    return column if any(value is not nothing for value in column) else ()
