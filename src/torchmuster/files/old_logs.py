"""Bounds the logs of a run: thousands of attempts of thousands of ranks would fill a disk with files."""

import contextlib
import os
from collections.abc import Iterable

from torchmuster.files.layout import RunDir

MOST_FILES = 100_000
_LEAST_KEPT = 20


def attempts_kept(world_size: int) -> int:
    """Return of how many of the last attempts the logs are kept; those of the first one always are."""
    return max(_LEAST_KEPT, MOST_FILES // max(1, world_size))


def too_old(newest: int, world_size: int) -> int | None:
    """Return the attempt whose logs go when another starts; None while all are kept."""
    old = newest - attempts_kept(world_size)
    return old if old > 0 else None


def words_on_limit(world_size: int) -> str:
    """Return the sentence for the first attempt whose logs are removed."""
    return (
        f"from now on the logs of old attempts are removed: a run of {world_size} ranks keeps those of its first"
        f" attempt and of the last {attempts_kept(world_size)}"
    )


def remove_old(run_dir: RunDir, old: int, ranks: Iterable[int]) -> None:
    """Remove what these ranks have left of an attempt: their node has written it."""
    folder = run_dir.attempt_logs(old)
    for rank in ranks:
        nccl = os.path.join(folder, f"nccl-{rank}.log")
        for path in (run_dir.rank_log(old, rank), run_dir.rank_value(old, rank), nccl):
            with contextlib.suppress(OSError):
                os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # the last node of a shared disk
