"""Evidence of out-of-memory kills: the kernel's own counters, and its log if it is readable.

Every readable ancestor of our control group is checked, because the limit that kills is often the job's or
the pod's, not our own. Version 2 counts `oom_kill` in `memory.events`, version 1 in
`memory.oom_control`.

Source: kernel documentation, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torchmuster.diagnose.facts.kernel import log_records, read_bytes, read_text

_COUNTER = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_KERNEL_LINE = re.compile(r"[Kk]illed process (\d+) \(([^)]*)\)(?:.*?anon-rss:(\d+)kB)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounters:
    """The kills counted by each control group above us, by the path of its file."""

    kills: Mapping[str, int]


def read_counters() -> MemoryCounters:
    """Return the counters of our control group and its readable ancestors."""
    kills: dict[str, int] = {}
    for path in counter_files():
        match = _COUNTER.search(read_bytes(path))
        if match:
            kills[path] = int(match.group(1))
    return MemoryCounters(kills=kills)


def explain_kill(before: MemoryCounters, pid: int) -> str | None:
    """Return the evidence that memory was the reason for a SIGKILL; None without any."""
    from_log = kernel_log_line(pid)
    if from_log is not None:
        return from_log
    after = read_counters()
    for path, count in after.kills.items():
        new = count - before.kills.get(path, count)
        if new > 0:
            limit = _limit_of(path)
            return (
                f"the kernel killed {new} process{'es' if new > 1 else ''} because memory ran out in"
                f" this control group since the attempt began: {path}{limit}"
            )
    return None


def counter_files() -> list[str]:
    """Return the counters of our control group and its ancestors, nearest first; version 2 or 1."""
    mounts = _mounts()
    files: list[str] = []
    try:
        with open("/proc/self/cgroup") as cgroup:
            rows = [line.rstrip("\n").split(":", 2) for line in cgroup]
    except OSError:
        return []
    for number, controllers, path in rows:
        if number == "0" and "cgroup2" in mounts:
            files += _ancestors(*mounts["cgroup2"], path, "memory.events")
        elif "memory" in controllers.split(",") and "memory" in mounts:
            files += _ancestors(*mounts["memory"], path, "memory.oom_control")
    return files


def free_bytes() -> int | None:
    """Return what processes here can still take: of the machine and of the control groups above us, in bytes.

    What a group keeps of files that nobody uses at the moment counts as free (memory.stat, `inactive_file`).
    """
    found = [
        int(m[1]) << 10 for m in re.finditer(r"MemAvailable: *(\d+) kB", read_text("/proc/meminfo"))
    ]
    for path in counter_files():
        folder = os.path.dirname(path)
        is_second = path.endswith("memory.events")
        names = (
            ("memory.max", "memory.current")
            if is_second
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        limit, used = (read_text(os.path.join(folder, name)).strip() for name in names)
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
            cached = re.search(
                r"^(?:total_)?inactive_file (\d+)$",
                read_text(os.path.join(folder, "memory.stat")),
                re.MULTILINE,
            )
            found.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return max(min(found), 0) if found else None


def _ancestors(mount_point: str, root: str, path: str, name: str) -> list[str]:
    """Return the files from our own group up to the mount's root, nearest first."""
    below = os.path.relpath(path, root) if path.startswith(root) else "."
    parts = [] if below in (".", "") or below.startswith("..") else below.split("/")
    depths = range(len(parts), -1, -1)
    return [os.path.join(mount_point, *parts[:depth], name) for depth in depths]


def _mounts() -> dict[str, tuple[str, str]]:
    """Return mount point and mounted root of cgroup v2 and of v1's memory controller."""
    found: dict[str, tuple[str, str]] = {}
    try:
        with open("/proc/self/mountinfo") as mountinfo:
            rows = [line.split() for line in mountinfo]
    except OSError:
        return found
    for row in rows:
        kind, options = row[row.index("-") + 1], row[-1].split(",")
        if kind == "cgroup2":
            found.setdefault("cgroup2", (row[4], row[3]))
        elif kind == "cgroup" and "memory" in options:
            found.setdefault("memory", (row[4], row[3]))
    return found


def _limit_of(counter_path: str) -> str:
    folder = os.path.dirname(counter_path)
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = read_text(os.path.join(folder, name)).strip()
        if text.isdigit() and int(text) < 1 << 60:
            return f" (limit {int(text) / 2**30:.2f} GiB)"
    return ""


def kernel_log_line(pid: int) -> str | None:
    """Return the kernel's own line about the kill of `pid`, if its log is readable."""
    found = None
    for record in log_records():
        match = _KERNEL_LINE.search(record.decode(errors="replace"))
        if match and int(match.group(1)) == pid:
            size = f" with {int(match.group(3)) / 2**20:.2f} GiB" if match.group(3) else ""
            found = f"the kernel's log says: out of memory, killed process {pid} ({match.group(2)}){size}"
    return found
