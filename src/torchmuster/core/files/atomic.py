"""Write small files atomically, mostly JSON."""

import contextlib
import json
import os
from typing import Any

from torchmuster.core.plainfile import open_plain, write_all


def replace_file(path: str, data: bytes, *, mode: int = 0o644) -> None:
    """Write, fsync and rename: a reader gets the old file or the new one."""
    # Other hosts may share the folder, and have a process with the same pid.
    temporary = f"{path}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
    try:
        write_synced(temporary, data, mode=mode, flags=os.O_TRUNC)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_synced(path: str, data: bytes, *, mode: int, flags: int) -> None:
    """Write and fsync a file; `flags` decide about an existing one: `O_TRUNC` or `O_EXCL`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, mode)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def as_json(value: Any) -> bytes:
    """Return a value as indented JSON with a newline."""
    return json.dumps(value, indent=1).encode() + b"\n"


def write_json(path: str, value: Any, *, mode: int = 0o644) -> None:
    """Write a value as indented JSON, atomically."""
    replace_file(path, as_json(value), mode=mode)


def read_json(path: str) -> Any:
    """Return the value in a file, or None when it is missing or incomplete."""
    try:
        with open_plain(path) as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
