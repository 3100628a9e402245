"""The end of a log, for a message: bounded, however long the log is."""

import os


def last_lines(path: str, num_lines: int, num_bytes: int = 4096) -> list[str]:
    """Return the last lines of a text file, of its last bytes at most; none when it can't be read."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - num_bytes))
            text = log.read(num_bytes).decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-num_lines:]
