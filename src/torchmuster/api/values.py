"""The values that the function of a run has returned: read, compared with the record, and only then unpickled.

The record (`events.jsonl`) is written by the head of the run, which has heard the hash of each value on the authenticated
channel. What is not in it, or is not what it says, is not unpickled.
"""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from torchmuster.errors import MusterError, NotFoundError
from torchmuster.files.layout import RunDir
from torchmuster.model.calls.call_file import own_python
from torchmuster.model.calls.carried import unpack
from torchmuster.model.failure import ValueNote
from torchmuster.model.ranks import name_ranks
from torchmuster.owner.views.record import record_of
from torchmuster.plainfile import open_own


class ResultError(MusterError):
    """What a rank has returned can't be read, or is not what the record of the run says."""


def noted_values(run_dir: RunDir) -> tuple[int, dict[int, ValueNote]]:
    """Return the attempt that counts, the last, with what the record says of its values, by rank.

    Raises:
        NotFoundError: The run has no attempt, or ranks of the last one have returned nothing.
    """
    attempts = record_of(run_dir).attempts
    attempt, world_size, found = -1, 0, dict[int, ValueNote]()
    if attempts:
        last = attempts[-1]
        attempt, world_size, found = last.number, last.num_workers or 0, last.values
    missing = [rank for rank in range(world_size) if rank not in found]
    if attempt < 0 or missing:
        who = name_ranks(missing) if missing else "no rank"
        raise NotFoundError(
            f"{who} of the run has returned no value" if missing else "the run has no values",
            where=run_dir.events,
            why="only functions return values: a script leaves files, or `torchmuster.train` metrics",
        )
    return attempt, {rank: found[rank] for rank in range(world_size)}


def are_here(run_dir: RunDir, attempt: int, notes: Mapping[int, ValueNote]) -> bool:
    """Say whether all files have come, which of other hosts may take longer than the result."""
    sizes = (_size(run_dir.rank_value(attempt, rank)) for rank in notes)
    return all(size == note.size_bytes for size, note in zip(sizes, notes.values(), strict=True))


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1


def read_value(path: str, note: ValueNote, rank: int) -> Any:
    """Return what a rank has returned.

    Raises:
        ResultError: The file is not the one that the record names, or needs another Python.
    """
    if note.python != own_python():
        raise ResultError(
            f"the value of rank {rank} was pickled by Python {note.python}, this is Python {own_python()}",
            where=path,
            fix=f"read it with Python {note.python}",
        )
    try:
        with open_own(path) as file:
            data = file.read(note.size_bytes + 1)
    except OSError as error:
        raise ResultError(
            f"the value of rank {rank} can't be read", where=path, why=str(error)
        ) from None
    if len(data) != note.size_bytes or hashlib.sha256(data).hexdigest() != note.sha256:
        raise ResultError(
            f"the value of rank {rank} is not what the rank has sent",
            where=path,
            why=f"the record of the run names other {note.size_bytes} bytes, so nothing was unpickled",
            fix="run the function again",
        )
    return unpack(data, lambda module: _missing(module, rank))


def _missing(module: str, rank: int) -> ResultError:
    what = f"the value of rank {rank} needs the module `{module}`, which is not here"
    return ResultError(what, fix="return numbers, texts, lists, dictionaries or tensors")
