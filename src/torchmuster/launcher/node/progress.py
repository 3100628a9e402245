"""Read the progress of this node's ranks: their heartbeats, /proc, and the use of their GPUs.

A thread reads it every two seconds. For a script that does not use the training library, the
kernel's counters are the only source. The processes that a rank has started count for the rank;
they are looked up every ten seconds, and at each report of a rank that is idle itself.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torchmuster.core import proc
from torchmuster.core.model.progress import HeartbeatRecord
from torchmuster.core.node.heartbeats import read_beat
from torchmuster.launcher.facts.gpu import GpuUse, GpuUseReader
from torchmuster.launcher.model import progress as progress_launcher
from torchmuster.launcher.model.progress import RankProgress

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20
_IDLE_SHARE = 0.02  # of a processor
_LOOK_EVERY_S = 10.0
_Everybody = Callable[[], list[proc.ProcessFacts]]
_UTIME, _STIME = 11, 12  # fields of /proc/PID/stat after the name, from 0


@dataclass(slots=True)
class _Usage:
    """Total use of a rank and of the processes it has started, including those that have ended."""

    active_s: float = 0.0
    io_bytes: int = 0
    at: float = 0.0
    looked_at: float = 0.0
    session: list[int] = field(default_factory=list)
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)  # pid -> ticks, bytes

    def spend(self, pids: Sequence[int]) -> float:
        """Add what these processes have used since the last call; return its CPU seconds."""
        spent_ticks = 0
        for pid in pids:
            ticks = _ticks(pid)
            if ticks is None:
                continue
            io_bytes = _io_bytes(pid)
            ticks_before, io_before = self.seen.get(pid, (0, 0))
            if ticks < ticks_before:  # another process has got the number
                ticks_before = io_before = 0
            spent_ticks += ticks - ticks_before
            self.io_bytes += max(io_bytes - io_before, 0)
            self.seen[pid] = (ticks, io_bytes)
        spent_s = spent_ticks / _TICKS_PER_S
        self.active_s += spent_s
        return spent_s

    def look(self, pid: int, now: float, everybody: list[proc.ProcessFacts]) -> None:
        """Find the processes that the rank has started."""
        self.looked_at = now
        self.session = [
            p.pid for p in everybody if p.pid != pid and proc.leader_of(p, (pid,)) is not None
        ]
        kept = {pid, *self.session}
        self.seen = {one: used for one, used in self.seen.items() if one in kept}


class ProgressReader:
    """Reads the progress of the ranks of one attempt.

    Args:
        folder: Folder of the workers' heartbeat files.
        attempt: Number of the attempt.
        gpus: Rank -> id of its GPU, as in `CUDA_VISIBLE_DEVICES`; ranks without a GPU are left out.
    """

    def __init__(self, folder: str, attempt: int, gpus: Mapping[int, str] | None = None) -> None:
        self._folder = folder
        self.attempt = attempt
        self._gpus = dict(gpus or {})
        self._gpu_use = GpuUseReader() if self._gpus else None
        self._usage: dict[int, _Usage] = {}

    def read(self, workers: Sequence[tuple[int, int]]) -> tuple[RankProgress, ...]:
        """Return the progress of the given (rank, pid) pairs."""
        now = time.monotonic()
        everybody = cache(proc.all_processes)  # one listing of all processes serves all ranks
        return tuple(self._read_rank(rank, pid, now, everybody) for rank, pid in workers)

    def _read_rank(self, rank: int, pid: int, now: float, everybody: _Everybody) -> RankProgress:
        facts = proc.read_process(pid)
        usage = self._read_usage(rank, pid, now, everybody)
        gpu = self._read_gpu(rank)
        beat = read_beat(self._folder, self.attempt, rank)
        return RankProgress(
            rank=rank,
            state=facts.state if facts is not None else "",
            active_s=round(usage.active_s, 3),
            io_bytes=usage.io_bytes,
            rss_mib=sum(_rss_pages(one) for one in (pid, *usage.session)) * _PAGE_BYTES // _MIB,
            gpu_percent=gpu.percent,
            gpu_mib=gpu.mib,
            **_of_beat(beat, now),
        )

    def _read_usage(self, rank: int, pid: int, now: float, everybody: _Everybody) -> _Usage:
        """Return what the rank and the processes it has started have used so far."""
        usage = self._usage.setdefault(rank, _Usage())
        spent_s = usage.spend([pid])
        idle = bool(usage.at) and spent_s < _IDLE_SHARE * (now - usage.at)
        if idle or now - usage.looked_at >= _LOOK_EVERY_S:
            usage.look(pid, now, everybody())
        usage.spend(usage.session)
        usage.at = now
        return usage

    def _read_gpu(self, rank: int) -> GpuUse:
        gpu_id = self._gpus.get(rank)
        if gpu_id is None or self._gpu_use is None:
            return GpuUse()
        return self._gpu_use.read(gpu_id)


def _of_beat(beat: HeartbeatRecord | None, now: float) -> dict[str, Any]:
    """Return the fields that only the training library can fill."""
    if beat is None:
        return {}
    return {
        "beat_age_s": round(max(now - beat.at, 0.0), 3),
        "steps_here": beat.steps_here,
        "step": beat.step,
        "step_at": round(beat.step_at, 6),
        "phase": beat.phase,
        "seconds": tuple(round(value, 6) for value in beat.seconds),
        "median_s": round(progress_launcher.quantile(beat.durations, 0.5), 6),
        "p99_s": round(progress_launcher.quantile(beat.durations, 0.99), 6),
    }


def _ticks(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[_UTIME]) + int(fields[_STIME])


def _io_bytes(pid: int) -> int:
    """Return the bytes that the process has read and written, page cache included; 0 if unknown."""
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


def _rss_pages(pid: int) -> int:
    """Return the resident pages of a process, shared ones included; 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
