"""What /proc says about processes, and an end for all that we started.

The benchmark makes itself the reaper of its orphans, so everything that a launcher starts, in
whatever session and however often forked, stays below this process and can be counted and killed.
"""

import ctypes
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

# Source: prctl(2), linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36

KILL_TIMEOUT_S = 20.0
POLL_S = 0.02


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))


def descendants(root: int | None = None) -> list[int]:
    """Return the pids of all live processes below `root`, which is this one if not given."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            state, parent = fields[0], int(fields[1])
            if state != "Z":
                children[parent].append(int(entry.name))
    found: list[int] = []
    waiting = [root or os.getpid()]
    while waiting:
        below = children[waiting.pop()]
        found += below
        waiting += below
    return found


def kill_descendants() -> None:
    """Kill and reap everything below this process.

    Raises:
        TimeoutError: Something outlived SIGKILL for `KILL_TIMEOUT_S`.
    """
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while pids := descendants():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(pids)} processes outlived SIGKILL for {KILL_TIMEOUT_S} s")
        for pid in pids:
            _kill(pid)
        time.sleep(POLL_S)
    _reap()


def pss_bytes(pid: int) -> int:
    """Return the proportional share of memory of `pid`, 0 when it is gone."""
    return _kilobytes(_read(pid, "smaps_rollup"), "Pss:") * 1024


def rss_bytes(pid: int) -> int:
    """Return the resident memory of `pid`, 0 when it is gone."""
    return _kilobytes(_read(pid, "status"), "VmRSS:") * 1024


def cpu_s(pid: int) -> float:
    """Return the processor time that the threads of `pid` have used, 0 when it is gone.

    Source: Documentation/scheduler/sched-stats.rst of Linux: the first field, in nanoseconds. What /proc/PID/stat says is
    in hundredths of a second, which is as much as a quiet agent takes in ten.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    times = (_read(pid, f"task/{thread}/schedstat").split() for thread in threads)
    return sum(int(fields[0]) for fields in times if fields) / 1e9


def command_line(pid: int) -> str:
    """Return the arguments of `pid` with blanks between them, empty when it is gone."""
    return _read(pid, "cmdline").replace("\0", " ").strip()


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _stat_fields(pid: int) -> list[str]:
    """Return what follows the command in /proc/PID/stat: state, parent, ..."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _kilobytes(text: str, key: str) -> int:
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(key))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _reap() -> None:
    """Collect every zombie that is ours."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
