"""The progress of this node's ranks: their heartbeats, and facts from /proc.

Read every two seconds, in a thread. The kernel's counters are the only word of a script that does not use the
training library; its children are looked at only while the rank itself does nothing.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from torchmuster import proc
from torchmuster.model import heartbeat
from torchmuster.model.heartbeat import HeartbeatRecord
from torchmuster.model.progress import RankProgress

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE_SHARE = 0.02  # of a processor
_Everybody = Callable[[], list[proc.ProcessFacts]]
_UTIME, _STIME = 11, 12  # fields of /proc/PID/stat behind the name, from 0


@dataclass(slots=True)
class _Usage:
    """The processor time of one rank and of what it has started, added up."""

    active_s: float = 0.0
    at: float = 0.0
    seen_ticks: dict[int, int] = field(default_factory=dict)
    watches_children: bool = False


class NodeProgress:
    """Reads the progress of the ranks of one attempt.

    Args:
        folder: Of the workers' heartbeat files.
    """

    def __init__(self, folder: str, attempt: int) -> None:
        self._folder = folder
        self.attempt = attempt
        self._usage: dict[int, _Usage] = {}

    def read(self, workers: Sequence[tuple[int, int]]) -> tuple[RankProgress, ...]:
        """Return the progress of these (rank, pid)."""
        now = time.monotonic()
        everybody = cache(proc.all_processes)  # one look at all processes serves all idle ranks
        return tuple(self._read_rank(rank, pid, now, everybody) for rank, pid in workers)

    def _read_rank(self, rank: int, pid: int, now: float, everybody: _Everybody) -> RankProgress:
        facts = proc.read_process(pid)
        state = facts.state if facts is not None else ""
        active_s, children = self._read_usage(rank, pid, now, everybody)
        io_bytes = sum(_io_bytes(one) for one in (pid, *children))
        beat = _read_beat(self._folder, self.attempt, rank)
        if beat is None:
            return RankProgress(rank=rank, state=state, active_s=active_s, io_bytes=io_bytes)
        return RankProgress(
            rank=rank,
            state=state,
            active_s=active_s,
            io_bytes=io_bytes,
            beat_age_s=round(max(now - beat.at, 0.0), 3),
            steps_here=beat.steps_here,
            step=beat.step,
            step_at=round(beat.step_at, 6),
            phase=beat.phase,
            seconds=tuple(round(value, 6) for value in beat.seconds),
            median_s=round(heartbeat.quantile(beat.durations, 0.5), 6),
            p99_s=round(heartbeat.quantile(beat.durations, 0.99), 6),
        )

    def _read_usage(
        self, rank: int, pid: int, now: float, everybody: _Everybody
    ) -> tuple[float, list[int]]:
        """Return the processor time so far, and the processes that were looked at beside the rank's."""
        usage = self._usage.setdefault(rank, _Usage())
        spent_s = self._spend(usage, [pid])
        elapsed_s = now - usage.at
        idle = bool(usage.at) and spent_s < _IDLE_SHARE * elapsed_s
        session: list[int] = []
        if idle:
            session = [
                p.pid for p in everybody() if p.pid != pid and proc.leader_of(p, (pid,)) is not None
            ]
            extra_s = self._spend(usage, session)
            # At the first look it is the whole life of these processes: that says nothing about now.
            spent_s += extra_s if usage.watches_children else 0.0
        usage.watches_children = idle
        usage.active_s += spent_s
        usage.at = now
        return round(usage.active_s, 3), session

    def _spend(self, usage: _Usage, pids: Sequence[int]) -> float:
        """Return the processor time since the last look at these processes, in seconds."""
        spent_ticks = 0
        for pid in pids:
            ticks = _ticks(pid)
            if ticks is None:
                continue
            spent_ticks += ticks - usage.seen_ticks.get(pid, 0)
            usage.seen_ticks[pid] = ticks
        return max(spent_ticks, 0) / _TICKS_PER_S


def last_step(folder: str, attempt: int, rank: int) -> int | None:
    """Return the last step that a rank has done, also after its end; None where it did not say."""
    beat = _read_beat(folder, attempt, rank)
    return beat.step if beat is not None and beat.steps_here else None


def _read_beat(folder: str, attempt: int, rank: int) -> HeartbeatRecord | None:
    path = heartbeat.heartbeat_path(folder, attempt, rank)
    for _ in range(3):  # it may be half written
        try:
            with open(path, "rb") as file:
                page = file.read(heartbeat.PAGE_BYTES)
        except OSError:
            return None
        beat = heartbeat.unpack(page)
        if beat is not None:
            return beat
    return None


def _ticks(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[_UTIME]) + int(fields[_STIME])


def _io_bytes(pid: int) -> int:
    """Return what the process has read and written, the page cache included; 0 where that is not told."""
    total = 0
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            for line in file:
                name, _, value = line.partition(b":")
                if name in (b"rchar", b"wchar"):
                    total += int(value)
    except (OSError, ValueError):
        return 0
    return total
