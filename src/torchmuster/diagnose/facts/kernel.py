"""Reads files of the kernel, and its log: unreadable ones are empty, and reading the log never blocks."""

import os
from collections.abc import Iterator

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
