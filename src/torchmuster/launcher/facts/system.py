"""Facts from a node's kernel: processor, memory, limits, shared memory, control groups."""

import os
import re
import resource
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchmuster.core.model.ranks import compress_ranks

# Reads files of the kernel, and its log: unreadable ones are empty, and reading the log never blocks.


_MAX_BYTES = 1 << 16
_MAX_RECORDS = 20_000


def read_bytes(path: str) -> bytes:
    """Return the beginning of a file, 64 KiB at most."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES)
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
            except BrokenPipeError:  # overwritten while we read
                continue
            except OSError:  # there are no more
                return
            if not record:
                return
            yield record
    finally:
        os.close(fd)


# Files in /dev/shm that nothing has open: left by programs of this user that were killed.
#
# torch names its files torch_PID_..., NCCL nccl-..., and semaphores of POSIX are sem.NAME. Most programs remove theirs
# when they end, and none does when it is killed.
#
# Source: torch/lib/libshm; NCCL src/os/linux.cc and src/misc/shmutils.cc; sem_overview(7).


_NAMES = ("torch_", "nccl-", "sem.")
_MAX_FILES = 10_000
# A file that was made a moment ago may be of a program that has yet to open it.
_AGE_S = 600.0


def left_files(folder: str, root: str = "/") -> tuple[int, int]:
    """Return number and bytes of the files of this user in /dev/shm that no process has open.

    Processes that can't be looked at (an init of a container) have none open.
    """
    sizes = dict(_old_files(folder))
    if not sizes:
        return 0, 0
    for used in _open_files(folder, os.path.join(root, "proc")):
        sizes.pop(used, None)
    return len(sizes), sum(sizes.values())


def _old_files(folder: str) -> Iterator[tuple[str, int]]:
    until = time.time() - _AGE_S
    for name in list_folder(folder)[:_MAX_FILES]:
        if not name.startswith(_NAMES):
            continue
        try:
            status = os.lstat(os.path.join(folder, name))
        except OSError:
            continue
        mine = status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)
        if mine and status.st_mtime < until:
            yield name, status.st_blocks * 512


def _open_files(folder: str, proc: str) -> Iterator[str]:
    """Yield the names that processes of this user have mapped or open."""
    pattern = re.compile(rf"{re.escape(folder)}/(\S+)")
    for pid in list_folder(proc):
        path = os.path.join(proc, pid)
        if not pid.isdecimal():
            continue
        try:
            if os.stat(path).st_uid != os.getuid():
                continue
            with open(os.path.join(path, "maps"), errors="replace") as file:
                yield from pattern.findall(file.read())
            for descriptor in os.listdir(os.path.join(path, "fd")):
                found = pattern.match(os.readlink(os.path.join(path, "fd", descriptor)))
                if found is not None:
                    yield found[1]
        except OSError:
            continue  # it has ended, or belongs to somebody else


# Evidence of out-of-memory kills: the kernel's own counters, and its log if it is readable.
#
# Every readable ancestor of our control group is checked, because the limit that kills is often the job's or
# the pod's, not our own. Version 2 counts `oom_kill` in `memory.events`, version 1 in
# `memory.oom_control`.
#
# Source: kernel documentation, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.


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


# What a limit is when there is none: RLIM_INFINITY, and cgroup v1's largest multiple of a page.
_NO_LIMIT = 1 << 62
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "core": resource.RLIMIT_CORE,
}
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """The kernel's facts about a node.

    Attributes:
        cpus: The CPUs that this process may use, as `0-3,8`.
        limits: Soft limits by name; -1 for none.
        memory_limit_bytes: The smallest of the control groups above us; None without one.
        shm_bytes: Size of /dev/shm; None when there is none.
        left_shm_files: Files of this user there that no process has open; `left_shm_bytes` is what they take.
    """

    host: str
    kernel: str
    machine: str
    boot_id: str
    num_cpus: int
    num_usable_cpus: int
    cpus: str
    memory_bytes: int
    limits: dict[str, int]
    memory_limit_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    left_shm_files: int = 0
    left_shm_bytes: int = 0
    uid: int = 0


def collect_system(root: str = "/", *, is_long: bool = False) -> SystemFacts:
    """Return the kernel's facts about this node; `root` is the folder of its files.

    The long form also looks through the open files of this user's processes.
    """
    name = os.uname()
    usable = sorted(os.sched_getaffinity(0))
    shared = os.path.join(root, SHARED_MEMORY.lstrip("/"))
    shm = _room(shared)
    left = left_files(shared, root) if is_long else (0, 0)
    return SystemFacts(
        host=name.nodename,
        kernel=name.release,
        machine=name.machine,
        boot_id=read_text(os.path.join(root, "proc/sys/kernel/random/boot_id")).strip(),
        num_cpus=os.cpu_count() or 1,
        num_usable_cpus=len(usable),
        cpus=compress_ranks(usable),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        limits={word: _plain(resource.getrlimit(which)[0]) for word, which in _LIMITS.items()},
        memory_limit_bytes=memory_limit(),
        shm_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
        left_shm_files=left[0],
        left_shm_bytes=left[1],
        uid=os.getuid(),
    )


def memory_limit() -> int | None:
    """Return the smallest memory limit of the control groups above us, in bytes; None without one."""
    found: list[int] = []
    for path in counter_files():
        is_second = path.endswith("memory.events")
        name = "memory.max" if is_second else "memory.limit_in_bytes"
        text = read_text(os.path.join(os.path.dirname(path), name)).strip()
        if text.isdecimal() and int(text) < _NO_LIMIT:
            found.append(int(text))
    return min(found, default=None)


def _plain(limit: int) -> int:
    return -1 if limit == resource.RLIM_INFINITY or limit >= _NO_LIMIT else limit


def _room(path: str) -> tuple[int, int] | None:
    try:
        disk = os.statvfs(path)
    except OSError:
        return None
    return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
