"""Files in /dev/shm that nothing has open: left by programs of this user that were killed.

torch names its files torch_PID_..., NCCL nccl-..., and semaphores of POSIX are sem.NAME. Most programs remove theirs
when they end, and none does when it is killed.

Source: torch/lib/libshm; NCCL src/os/linux.cc and src/misc/shmutils.cc; sem_overview(7).
"""

import os
import re
import stat
import time
from collections.abc import Iterator

from torchmuster.diagnose.facts.kernel import list_folder

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
