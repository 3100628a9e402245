"""The proof at the end of an epoch, and the check of a snapshot's ledger, from recorded samples."""

from typing import Any

import numpy as np

from torchmuster.train.batches.keyed import DatasetError
from torchmuster.train.batches.ledger import Sums, name_faults, sums_of
from torchmuster.train.batches.loader import Loader
from torchmuster.train.exchange import gather_bytes, gather_ints
from torchmuster.train.snapshot.state import SnapshotError


def prove(data: Loader) -> dict[str, Any]:
    """Prove by all ranks' ledgers that each sample up to the position was seen once; a collective.

    Returns:
        `samples`, `lost`, `twice`, and `whole`: whether that is the complete epoch.

    Raises:
        DatasetError: Some were lost or seen twice.
    """
    mine = data.ledger.sums()
    rows = gather_ints([mine.count, *_halves(mine.first), *_halves(mine.second)])
    total = Sums()
    for count, *halves in rows:
        total = total + Sums(count, _whole(halves[:2]), _whole(halves[2:]))
    expected = data.expected(data.position)
    if total == sums_of(expected):
        whole = data.position == (data.epoch_samples() or data.position)
        return {"samples": total.count, "lost": 0, "twice": 0, "whole": whole}
    ids = gather_bytes(data.ledger.ids().tobytes())
    seen = np.concatenate([np.frombuffer(one, dtype=np.int64) for one in ids])
    raise DatasetError(
        f"epoch {data.epoch} did not see every sample exactly once",
        where=f"{total.count} of {data.position} samples recorded",
        why=name_faults(expected, seen),
        fix="this is a bug of torchmuster, or the dataset changed while it was read",
    )


def begin_ledger(data: Loader, pieces: list[list[int]], step: int, *, is_first: bool) -> None:
    """Restore the ranks' ledgers from a snapshot; rank 0 gets the sums of all.

    Raises:
        SnapshotError: Their sums differ from those of the order up to the position.
    """
    total = Sums()
    for piece in pieces:
        total = total + Sums(*piece)
    if total != sums_of(data.expected(data.position)):
        raise SnapshotError(
            f"the ledger of the snapshot of step {step} doesn't match its position in the data",
            where=f"epoch {data.epoch}, {data.position} samples consumed",
            why=f"{total.count} samples were recorded, or others than this order has",
            fix="check that dataset, seed and shuffle are the same as when the snapshot was made",
        )
    data.ledger.start(total if is_first else Sums())


def _halves(value: int) -> tuple[int, int]:
    """Return a 64-bit number as two that an int64 tensor can hold."""
    return value >> 32, value & 0xFFFFFFFF


def _whole(halves: list[int]) -> int:
    return (halves[0] << 32) | halves[1]
