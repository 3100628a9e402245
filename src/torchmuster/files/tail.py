"""The end of a log, for a message, without reading the whole log."""

import contextlib
import json
import os

from torchmuster.files.layout import RunDir
from torchmuster.model.display.lines import last_state
from torchmuster.model.plan import RunPlan
from torchmuster.plainfile import open_plain

_BLOCK_BYTES = 1 << 16


def last_lines(path: str, num_lines: int, num_bytes: int = 4096) -> list[str]:
    """Return the last lines of a text file from its last bytes, of a progress bar its last state; none when it can't be read."""
    text = last_bytes(path, num_bytes).decode(errors="replace").removesuffix("\n")
    return [last_state(line) for line in text.split("\n")][-num_lines:] if text else []


def last_bytes(path: str, num_bytes: int) -> bytes:
    """Return the last bytes of a file; none when it can't be read."""
    try:
        with open_plain(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - num_bytes))
            return log.read(num_bytes)
    except OSError:
        return b""


def size_of(path: str) -> int:
    """Return the length of a file; 0 for one that is not there."""
    try:
        return os.stat(path).st_size
    except OSError:  # the usual case: nobody has written it yet
        return 0


def offset_of_last_lines(path: str, num_lines: int) -> int:
    """Return the offset of the last lines of a file in bytes; 0 if it has fewer or can't be read."""
    try:
        with open_plain(path) as file:
            end = file.seek(0, os.SEEK_END)
            if num_lines == 0:
                return end
            position, found = end, 0
            while position > 0:
                begin = max(0, position - _BLOCK_BYTES)
                file.seek(begin)
                block = file.read(position - begin)
                at = len(block) - 1 if position == end and block.endswith(b"\n") else len(block)
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    found += 1
                    if found == num_lines:
                        return begin + at + 1
                position = begin
    except OSError:
        pass
    return 0


# What the end of a run's record says to whoever goes on with the run.


_LINES = 200  # are searched for the last attempt


def trained_last(plan: RunPlan, run_dir: RunDir) -> frozenset[int]:
    """Return the places that had ranks in the last attempt; none where that can't be read."""
    places = {name: place for place, name in enumerate(plan.node_names)}
    for line in reversed(last_lines(run_dir.events, _LINES, _LINES << 10)):
        if '"event":"attempt_started"' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                names = [node["node"] for node in json.loads(line)["nodes"]]
                return frozenset(places[name] for name in names if name in places)
    return frozenset()
