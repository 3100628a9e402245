"""What the kernel reports on a node: the GPUs, and why a process was killed."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

# Read the kernel's files and its log. An unreadable file counts as empty, and reading the log never
# blocks.


_MAX_BYTES = 1 << 16
_MAX_RECORDS = 20_000


def read_bytes(path: str, most: int = _MAX_BYTES) -> bytes:
    """Return the beginning of a file, 64 KiB at most unless another bound is given."""
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return b""


def read_text(path: str) -> str:
    """Return the beginning of a file, 64 KiB at most."""
    return read_bytes(path).decode(errors="replace")


def list_folder(path: str) -> list[str]:
    """Return the names in a folder, sorted."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def open_files(pid: int, most: int | None = None) -> Iterator[str]:
    """Yield what a process has open, as the links of its descriptors; of `most` of them, if given."""
    folder = f"/proc/{pid}/fd"
    for name in sorted(list_folder(folder), key=int)[:most]:
        with contextlib.suppress(OSError):
            yield os.readlink(os.path.join(folder, name))


def log_records(root: str = "/") -> Iterator[bytes]:
    """Yield the records of the kernel's log, if it is readable."""
    try:
        fd = os.open(os.path.join(root, "dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(fd, 8192)
            except BrokenPipeError:  # a record was overwritten while we read
                continue
            except OSError:  # there are no more
                return
            if not record:
                return
            yield record
    finally:
        os.close(fd)


# GPUs are counted without initialising CUDA: a process that has done that can't fork workers.


def visible_gpus(environment: Mapping[str, str] | None = None, root: str = "/") -> list[str]:
    """Return the ids that `CUDA_VISIBLE_DEVICES` may name, in order; empty without a GPU.

    Args:
        environment: Where to look up the variable; this process's own by default.
        root: The root folder of the kernel's files.
    """
    chosen = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(index) for index in range(count_devices(root))]
    ids: list[str] = []
    for word in chosen.split(","):
        # Source: CUDA programming guide, "CUDA environment variables": an id that is not valid
        # hides itself and all that follow.
        word_id = word.strip()
        if not re.match(r"\d+$|GPU-|MIG-", word_id):  # Slurm sets NoDevFiles if there is none
            break
        ids.append(word_id)
    return ids


def count_devices(root: str = "/") -> int:
    """Return the number of NVIDIA GPUs that are visible to this process."""
    shown = list_folder(os.path.join(root, "proc/driver/nvidia/gpus"))
    files = list_folder(os.path.join(root, "dev"))
    return len(shown) or sum(re.fullmatch(r"nvidia\d+", name) is not None for name in files)


# Evidence of out-of-memory kills: the kernel's counters, and its log if that is readable.
#
# Every readable ancestor of our control group is checked, because the limit that kills is often the
# job's or the pod's, not our own. Version 2 counts `oom_kill` in `memory.events`, version 1 in
# `memory.oom_control`.
#
# Source: kernel documentation, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.


_COUNTER = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_KERNEL_LINE = re.compile(r"[Kk]illed process (\d+) \(([^)]*)\)(?:.*?anon-rss:(\d+)kB)?")


def read_counters() -> dict[str, int]:
    """Return the kills counted by our control group and its readable ancestors, by counter file."""
    kills: dict[str, int] = {}
    for path in counter_files():
        match = _COUNTER.search(read_bytes(path))
        if match:
            kills[path] = int(match.group(1))
    return kills


def explain_kill(before: Mapping[str, int], pid: int) -> str | None:
    """Return the evidence that memory was the reason for a SIGKILL; None if there is none."""
    from_log = kernel_log_line(pid)
    if from_log is not None:
        return from_log
    for path, count in read_counters().items():
        new = count - before.get(path, count)
        if new > 0:
            limit = _limit_of(path)
            return (
                f"the kernel killed {new} process{'es' if new > 1 else ''} because memory ran out in"
                f" this control group since the attempt began: {path}{limit}"
            )
    return None


def counter_files() -> list[str]:
    """Return the counter files of our control group and its ancestors, nearest first."""
    mounts = _mounts()
    files: list[str] = []
    lines = read_text("/proc/self/cgroup").split("\n")
    rows = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    for number, controllers, path in rows:
        if number == "0" and "cgroup2" in mounts:
            files += _ancestors(*mounts["cgroup2"], path, "memory.events")
        elif "memory" in controllers.split(",") and "memory" in mounts:
            files += _ancestors(*mounts["memory"], path, "memory.oom_control")
    return files


def free_bytes() -> int | None:
    """Return how many bytes of memory processes here can still use; None if unknown.

    The machine and the control groups above us limit it. A group's inactive file cache counts as
    free (memory.stat, `inactive_file`).
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
    """Return the mount point and the mounted root of cgroup v2 and of v1's memory controller."""
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
