"""Collect facts from a node's kernel: processors, memory, limits, shared memory, control groups."""

import os
import re
import resource
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.core.model.ranks import compress_ranks
from torchmuster.core.node.kernel import (
    counter_files,
    list_folder,
    read_text,
)

# Files in /dev/shm that no process has open: left by killed programs of this user.
#
# torch names its files torch_PID_..., NCCL nccl-..., and POSIX semaphores are sem.NAME. Most
# programs remove their files when they end, but not when they are killed.
#
# Source: torch/lib/libshm; NCCL src/os/linux.cc and src/misc/shmutils.cc; sem_overview(7).


_NAMES = ("torch_", "nccl-", "sem.")
_MAX_FILES = 10_000
# A program may have yet to open a file that was made only a moment ago.
_AGE_S = 600.0


def leftover_shm_files(folder: str, root: str = "/") -> tuple[int, int]:
    """Return number and bytes of this user's files in /dev/shm that no process has open.

    Processes that can't be inspected (a container's init) count as having none open.
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
            continue  # the process has ended, or may not be inspected


# A limit this large means no limit: RLIM_INFINITY, or cgroup v1's largest multiple of a page.
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
        memory_limit_bytes: The smallest limit of the control groups above us; None without one.
        shm_bytes: Size of /dev/shm; None if there is none.
        left_shm_files: Number of this user's files there that no process has open; `left_shm_bytes`
            is their size.
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
    """Return the kernel's facts about this node; `root` is the root of its files.

    The long form also checks the open files of this user's processes.
    """
    name = os.uname()
    usable = sorted(os.sched_getaffinity(0))
    shared = os.path.join(root, SHARED_MEMORY.lstrip("/"))
    shm = _room(shared)
    left = leftover_shm_files(shared, root) if is_long else (0, 0)
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
    """Return the smallest memory limit, in bytes, of the control groups above us, or None."""
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
