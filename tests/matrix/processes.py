"""Which processes belong to a run: by a variable that only they have."""

import os
from pathlib import Path


def pids_with(variable):
    """Return pid -> command line of the living processes that were started with this `NAME=value`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if variable.encode() in variables and state not in "ZX":
            found[int(folder.name)] = " ".join(map(os.fsdecode, words)).strip()
    return found
