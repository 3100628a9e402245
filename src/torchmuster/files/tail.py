"""The end of a log, for a message: bounded, however long the log is."""

import os


def last_lines(path: str, num_lines: int, num_bytes: int = 4096) -> list[str]:
    """Return the last lines of a text file, of its last bytes at most; none when it can't be read."""
    return last_bytes(path, num_bytes).decode(errors="replace").splitlines()[-num_lines:]


def last_bytes(path: str, num_bytes: int) -> bytes:
    """Return the last bytes of a file; none when it can't be read."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - num_bytes))
            return log.read(num_bytes)
    except OSError:
        return b""
