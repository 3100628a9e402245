"""Room for a run: free bytes, free inodes and the user's quota where its records and snapshots will lie."""

import errno
import os
import re
from collections.abc import Callable, Sequence

from torchmuster import proc
from torchmuster.errors import MusterError

MIN_FREE_BYTES = 4 << 20
LOW_FREE_BYTES = 1 << 30
_LOW_INODES = 1000
_QUOTA_TIMEOUT_S = 1.0
_KIB = 1024
Ask = Callable[[Sequence[str]], proc.Answered]
Statvfs = Callable[[str], os.statvfs_result]


def check_room(path: str, statvfs: Statvfs = os.statvfs) -> None:
    """Refuse a folder in which nothing can be kept: under 4 MiB free, or no inode.

    Raises:
        OSError: ENOSPC, with what is missing.
    """
    disk = statvfs(path)
    if disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, "No space left on device")
    if disk.f_files and not disk.f_favail:  # some file systems count none
        raise OSError(errno.ENOSPC, "No inode is left on the device: it can hold no more files")


def room_warnings(path: str, statvfs: Statvfs = os.statvfs) -> list[str]:
    """Return a sentence for each thing that will soon be short in the folder, or the next one above that is there."""
    folder = nearest_folder(os.path.realpath(path))
    try:
        disk = statvfs(folder)
    except OSError as error:
        return [f"{folder}: its free space can't be read: {error.strerror}"]
    found = []
    free = disk.f_bavail * disk.f_frsize
    if free < LOW_FREE_BYTES:
        found.append(f"{folder} has only {free >> 20} MiB free: `muster prune` makes room")
    if disk.f_files and disk.f_favail < _LOW_INODES:
        found.append(f"{folder} can take only {disk.f_favail} more files: `muster prune` helps")
    return found


def quota_warnings(path: str, asking: Ask | None = None) -> list[str]:
    """Return what the user's quotas leave, where little is left; tools that hang are left after 1 s."""
    import shutil

    asking = asking or _ask
    commands = []
    if shutil.which("quota"):
        commands.append((["quota", "-w", "-p"], parse_quota))
    if shutil.which("lfs"):
        user = str(os.getuid())
        commands.append(
            (
                ["lfs", "quota", "-q", "-u", user, nearest_folder(os.path.realpath(path))],
                parse_quota,
            )
        )
    found = []
    for argv, parse in commands:
        try:
            said = asking(argv)
        except MusterError:
            continue
        for disk, left, unit in parse(said.stdout.decode(errors="replace")):
            if unit == "KiB" and left * _KIB < LOW_FREE_BYTES:
                size = f"{max(0, left) // _KIB} MiB"
                found.append(f"your quota on {disk} leaves {size} (`{' '.join(argv[:2])}`)")
            if unit == "files" and left < _LOW_INODES:
                found.append(f"your quota on {disk} leaves {max(0, left)} files")
    return found


def parse_quota(text: str) -> list[tuple[str, int, str]]:
    """Return (file system, what is left, `KiB` or `files`) from `quota -w` or `lfs quota -q`; no limit, no entry.

    Both print: file system, blocks of 1 KiB, soft limit, hard limit, grace, files, soft limit, hard limit, grace. The
    grace may be missing; a `*` marks what is over its limit.
    """
    found: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        words = line.split()
        is_disk = words and (words[0].startswith(("/", "[")) or ":" in words[0])
        if len(words) < 7 or not is_disk:
            continue
        numbers = [int(w.rstrip("*")) for w in words[1:] if re.fullmatch(r"\d+\*?", w)]
        if len(numbers) == 8:  # `-p` writes the grace times as numbers too
            numbers = [*numbers[:3], *numbers[4:7]]
        if len(numbers) != 6:
            continue
        for (used, soft, hard), unit in ((numbers[:3], "KiB"), (numbers[3:], "files")):
            limit = soft or hard
            if limit:
                found.append((words[0], limit - used, unit))
    return found


def _ask(argv: Sequence[str]) -> proc.Answered:
    return proc.ask(argv, b"", _QUOTA_TIMEOUT_S)


def nearest_folder(path: str) -> str:
    """Return the path, or the nearest folder above it that exists."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
