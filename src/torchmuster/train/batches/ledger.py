"""The sample ledger: proves from the fetched samples that an epoch saw every sample once.

Each rank sums two 64-bit hashes of the ids it received. The sums over all ranks and restarts equal
those of the whole epoch if and only if (up to 2**-128) each id came exactly once: a few bytes in a
snapshot, whatever the size of the dataset. The ids since the start of this process are kept too, to
name the samples when the sums differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_KEYS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_FOLD_EVERY = 4096


@dataclass(frozen=True, slots=True)
class Sums:
    """A multiset of ids in three numbers."""

    count: int = 0
    first: int = 0
    second: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        mask = (1 << 64) - 1
        return Sums(
            self.count + other.count,
            (self.first + other.first) & mask,
            (self.second + other.second) & mask,
        )

    def __sub__(self, other: "Sums") -> "Sums":
        mask = (1 << 64) - 1
        return Sums(
            self.count - other.count,
            (self.first - other.first) & mask,
            (self.second - other.second) & mask,
        )


def sums_of(ids: np.ndarray) -> Sums:
    """Return the sums over int64 `ids`.

    Source: SplitMix64's finalizer, as in `order.mix`, with two odd keys.
    """
    totals = []
    with np.errstate(over="ignore"):
        for key in _KEYS:
            word = (ids.astype(np.uint64) + np.uint64(1)) * key
            word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            word ^= word >> np.uint64(31)
            totals.append(int(word.sum(dtype=np.uint64)))
    return Sums(len(ids), totals[0], totals[1])


class Ledger:
    """What this rank has fetched of the current epoch.

    Attributes:
        noted: Number of ids that this process has recorded for the epoch.
    """

    def __init__(self) -> None:
        self.noted = 0
        self._sums = Sums()
        self._new: list[torch.Tensor] = []
        self._named: list[np.ndarray] = []

    def start(self, before: Sums = Sums()) -> None:
        """Begin an epoch; `before` is the part of it consumed according to a snapshot."""
        self.noted = 0
        self._sums = before
        self._new = []
        self._named = []

    def add(self, ids: torch.Tensor) -> None:
        """Record the ids of one batch: shape `(count,)`, int64."""
        self.noted += len(ids)
        self._new.append(ids)
        if len(self._new) >= _FOLD_EVERY:
            self._fold()

    def sums(self) -> Sums:
        """Return the sums over all recorded ids."""
        self._fold()
        return self._sums

    def ids(self) -> np.ndarray:
        """Return the ids that this process has recorded for the epoch."""
        self._fold()
        return np.concatenate(self._named) if self._named else np.empty(0, dtype=np.int64)

    def _fold(self) -> None:
        if self._new:
            ids = torch.cat(self._new).numpy()
            self._new = []
            self._named.append(ids)
            self._sums = self._sums + sums_of(ids)


def name_faults(expected: np.ndarray, seen: np.ndarray) -> str:
    """Return which ids were lost or seen twice, a few of each."""
    ids, counts = np.unique(seen, return_counts=True)
    twice = ids[counts > 1]
    lost = np.setdiff1d(expected, ids)
    strange = np.setdiff1d(ids, expected)
    parts = [
        f"{len(found)} {what} ({_few(found)})"
        for found, what in ((lost, "lost"), (twice, "seen twice"), (strange, "out of place"))
        if len(found)
    ]
    return ", ".join(parts) or "what earlier attempts recorded differs"


def _few(ids: Sequence[int] | np.ndarray) -> str:
    shown = ", ".join(str(int(i)) for i in ids[:5])
    return f"samples {shown}, ..." if len(ids) > 5 else f"samples {shown}"
