"""Facts from a node's kernel: processor, memory, limits, shared memory, control groups."""

import os
import resource
from dataclasses import dataclass

from torchmuster.diagnose.facts import memory
from torchmuster.diagnose.facts.kernel import read_text
from torchmuster.diagnose.facts.shared_memory import left_files
from torchmuster.model.ranks import compress_ranks

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
    for path in memory.counter_files():
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
