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


def words_on_limit(world_size: int) -> str:
    """Return the sentence for the first attempt whose logs are removed."""
    return (
        f"from now on the logs of old attempts are removed: a run of {world_size} ranks keeps those of its first"
        f" attempt and of the last {attempts_kept(world_size)}"
    )


def remove_old(run_dir: RunDir, newest: int, ranks: Iterable[int], world_size: int) -> None:
    """Remove what these ranks have left of the attempt that is too old now: their node has written it.

    Args:
        run_dir: Of the run.
        newest: The attempt that starts.
        ranks: Of this node.
        world_size: Of all nodes.
    """
    old = newest - attempts_kept(world_size)
    if old <= 0:
        return
    folder = run_dir.attempt_logs(old)
    for rank in ranks:
        nccl = os.path.join(folder, f"nccl-{rank}.log")
        for path in (run_dir.rank_log(old, rank), run_dir.rank_value(old, rank), nccl):
            with contextlib.suppress(OSError):
                os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # the last node of a shared disk
