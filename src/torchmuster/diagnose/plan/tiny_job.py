"""A test job for all ranks: check that they reach each other and sum correctly, and how fast.

    python tiny_job.py [--seconds 2] [--bytes 67108864]

It is the program of an ordinary run, started by the job's interpreter, Python 3.8 or later. It
needs only torch, not torchmuster: its own folder is removed from `sys.path`. Every rank sums
vectors of 4 bytes to 64 MiB, as far as the time allows, and checks the sums; rank 0 prints one line
of JSON:

    {"backend": "gloo", "world_size": 4, "ranks_per_host": {"n1": 2, "n2": 2}, "nodes": [2, 2],
     "right": true, "between": [{"bytes": 4, "seconds": 0.0002, "repeats": 20,
     "cpu_seconds": 0.0001, "right": true}, ...], "inside": [...]}

`between` is measured with all ranks, `inside` with those of one node (on all nodes at the same
time); `inside` is null if it would be the same. `seconds` is the slowest rank's median.
`cpu_seconds` is the processor time of one sum, on the rank that needs most. The exit code is 1 if a
sum was wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

LIMIT_S = 30.0  # of every wait: by then a missing rank is known
SIZES = tuple(4 * 4**power for power in (0, 3, 5, 6, 7, 8, 9, 10, 11, 12))
MIN_REPEATS, MAX_REPEATS = 3, 20
NAME_BYTES = 64


class Ranks:
    """A group of ranks that sum together.

    Attributes:
        size: Number of ranks in the group.
        index: Index of this rank in the group.
    """

    def __init__(self, torch: Any, group: Any, device: Any) -> None:
        self._torch, self._group, self._device = torch, group, device
        self._dist = torch.distributed
        self.size: int = self._dist.get_world_size(group)
        self.index: int = self._dist.get_rank(group)

    def timed_sum(self, vector: Any) -> tuple[float, float]:
        """Sum a vector in place; return the wall-clock and the processor seconds that it took."""
        begun_s, cpu_begun_s = time.perf_counter(), time.process_time()
        self._dist.all_reduce(vector, group=self._group)
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)
        return time.perf_counter() - begun_s, time.process_time() - cpu_begun_s

    def largest(self, *values: float) -> list[float]:
        """Return the maximum of each value over all ranks."""
        vector = self._torch.tensor(values, dtype=self._torch.float64, device=self._device)
        self._dist.all_reduce(vector, self._dist.ReduceOp.MAX, group=self._group)
        return [float(value) for value in vector.tolist()]

    def check(self, size_bytes: int) -> tuple[bool, float]:
        """Sum a vector whose sum is known; return whether it is right here, and the seconds."""
        pattern = self._torch.arange(size_bytes // 4, device=self._device) % 8
        pattern = pattern.to(self._torch.float32)
        vector = pattern + self.index
        seconds, _ = self.timed_sum(vector)
        expected = pattern * self.size + self.size * (self.size - 1) / 2
        return bool(self._torch.equal(vector, expected)), seconds

    def measure(self, size_bytes: int, share_s: float) -> dict[str, Any]:
        """Return the time of a sum of this size, repeated for about `share_s`."""
        right, first_s = self.check(size_bytes)
        wrong, slowest_s = self.largest(float(not right), first_s)
        repeats = int(min(MAX_REPEATS, max(MIN_REPEATS, share_s / max(slowest_s, 1e-6))))
        vector = self._torch.zeros(size_bytes // 4, device=self._device)
        times = [self.timed_sum(vector) for _ in range(repeats)]
        median_s = statistics.median(wall for wall, _ in times)
        cpu_s = statistics.fmean(cpu for _, cpu in times)
        median_s, cpu_s = self.largest(median_s, cpu_s)
        found = {"bytes": size_bytes, "seconds": median_s, "repeats": repeats}
        return {**found, "cpu_seconds": cpu_s, "right": not wrong}

    def measure_all(self, limit_s: float, limit_bytes: int) -> list[dict[str, Any]]:
        """Return the times of sums of growing size; stop before one that would exceed the limit."""
        begun_s = time.perf_counter()
        self.check(4)  # the first sum makes connections and buffers
        found: list[dict[str, Any]] = []
        for size in SIZES:
            (passed_s,) = self.largest(time.perf_counter() - begun_s)
            last = found[-1]["seconds"] * size / found[-1]["bytes"] if found else 0.0
            # Small vectors take as long as the smallest: their time does not grow with their size.
            next_s = min(last, found[-1]["seconds"] * 4) if found else 0.0
            too_long = passed_s + next_s * (1 + MIN_REPEATS) > limit_s
            if size > limit_bytes or (len(found) >= 2 and too_long):
                break
            found.append(self.measure(size, limit_s / len(SIZES)))
        return found


def choose_device(torch: Any, control: Any) -> Any:
    """Return this rank's GPU when every rank has one, else the processor."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_none = float(not torch.cuda.is_available() or torch.cuda.device_count() <= local_rank)
    if control.largest(has_none)[0]:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def gather_text(torch: Any, text: str) -> list[str]:
    """Return every rank's text, cut to 64 bytes; without pickle."""
    raw = text.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    mine = torch.tensor(list(raw), dtype=torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(all_of_them, mine)
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in all_of_them]


def members_by(words: list[str]) -> dict[str, list[int]]:
    """Return text -> ranks with that text."""
    members: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        members.setdefault(word, []).append(rank)
    return members


def run(torch: Any, limit_s: float, limit_bytes: int) -> tuple[dict[str, Any], bool]:
    """Run the measurements in a process group; return the result and whether this is rank 0."""
    dist = torch.distributed
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    dist.monitored_barrier(timeout=timedelta(seconds=LIMIT_S))
    cpu = torch.device("cpu")
    device = choose_device(torch, Ranks(torch, None, cpu))
    backend = "nccl" if device.type == "cuda" else "gloo"
    hosts = members_by(gather_text(torch, platform.node()))
    nodes = members_by(gather_text(torch, os.environ.get("GROUP_RANK") or platform.node()))
    options = {"backend": backend, "timeout": timedelta(seconds=LIMIT_S)}
    inside_groups = [dist.new_group(members, **options) for members in nodes.values()]
    everyone = Ranks(torch, dist.new_group(**options), device)
    most = max(len(members) for members in nodes.values())
    both = len(nodes) > 1 and most > 1
    between = everyone.measure_all(limit_s / (1 + both), limit_bytes)
    inside = None
    if both:
        mine = [dist.get_rank() in members for members in nodes.values()].index(True)
        ranks = Ranks(torch, inside_groups[mine], device)
        # A node with one worker has nothing to measure; rank 0 reports for nodes like its own.
        inside = ranks.measure_all(limit_s / 2, limit_bytes) if ranks.size > 1 else None
    right = all(one["right"] for one in (*between, *(inside or ())))
    (wrong,) = everyone.largest(float(not right))
    found = {"backend": backend, "world_size": everyone.size, "right": not wrong}
    found["ranks_per_host"] = {host: len(members) for host, members in hosts.items()}
    found["nodes"] = [len(members) for members in nodes.values()]
    return {**found, "between": between, "inside": inside}, dist.get_rank() == 0


def main(arguments: list[str] | None = None) -> int:
    """Run the job and print the result; return the exit code."""
    parser = argparse.ArgumentParser(description="Sum vectors on all ranks and say how it went.")
    parser.add_argument("--seconds", type=float, default=2.0, help="about so long; default 2")
    parser.add_argument("--bytes", type=int, default=SIZES[-1], help="largest; default 64 MiB")
    given = parser.parse_args(arguments)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    torch = importlib.import_module("torch")  # by name: the job's interpreter decides which torch
    importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    found, is_first = run(torch, given.seconds, given.bytes)
    if is_first:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0 if found["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
