"""Small JSON files, written whole or not at all."""

import contextlib
import json
import os
from typing import Any

from torchmuster.plainfile import open_plain


def write_json(path: str, value: Any, *, mode: int = 0o644) -> None:
    """Write, fsync and rename: a reader sees the old file or the new one."""
    temporary = f"{path}.{os.getpid()}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_json(path: str) -> Any:
    """Return the value in a file, or None when there is no whole one."""
    try:
        with open_plain(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None
