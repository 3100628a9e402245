"""The order of samples, a function of (seed, epoch) and of nothing else, and the ledger of it.

The world size only decides which rank reads which part of a global batch. Sizes, positions and
shares are plain integers here, so that every property can be tested without a process group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """Return a 63-bit number that depends on every bit of `words` and on their order.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014:
    the finalizer of SplitMix64, applied to a running sum.
    """
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ (word & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Return the indices of one epoch in order: shape `(num_samples,)`, int64."""
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of one micro-batch.

    Attributes:
        begin: Position in the epoch of the first sample.
        end: Position after the last; `begin == end` is an empty share.
        weight: Weight of this rank's mean loss, chosen so that DDP's mean over ranks (and the sum
            over
            the micro-batches of a step) is the mean over the global batch.
        ends_step: The optimizer steps after this micro-batch.
        position: Samples of the epoch consumed by all ranks when the step is done.
    """

    begin: int
    end: int
    weight: float
    ends_step: bool
    position: int

    @property
    def count(self) -> int:
        """The number of samples in this share."""
        return self.end - self.begin


def split(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return `(begin, end)` of one of `parts` contiguous parts; sizes differ by at most one."""
    return length * part // parts, length * (part + 1) // parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the samples of an epoch are divided into steps, micro-batches and shares.

    Attributes:
        num_samples: Number of samples of an epoch.
        global_batch_size: Samples per step over all ranks and micro-batches.
        world_size: Number of ranks.
        accumulate: Micro-batches per step.
        drop_last: Drop a last step that is smaller.
    """

    num_samples: int
    global_batch_size: int
    world_size: int
    accumulate: int = 1
    drop_last: bool = False

    def end_from(self, position: int) -> int:
        """Return the end of an epoch at `position`; earlier steps may have had another size."""
        if self.drop_last:
            return self.num_samples - (self.num_samples - position) % self.global_batch_size
        return self.num_samples

    def steps_from(self, position: int) -> int:
        """Return the number of steps that remain from `position` on."""
        return -(-(self.end_from(position) - position) // self.global_batch_size)

    def shares(self, rank: int, position: int = 0) -> Iterator[Share]:
        """Yield the shares of one rank from `position` (in samples) to the end of the epoch."""
        epoch_end = self.end_from(position)
        while position < epoch_end:
            size = min(self.global_batch_size, epoch_end - position)
            # A short last step keeps the number of micro-batches, so that all steps look alike.
            for micro in range(self.accumulate):
                begin, end = split(size, self.accumulate, micro)
                first, last = split(end - begin, self.world_size, rank)
                yield Share(
                    begin=position + begin + first,
                    end=position + begin + last,
                    weight=(last - first) * self.world_size / size,
                    ends_step=micro == self.accumulate - 1,
                    position=position + size,
                )
            position += size


# The sample ledger: proves from the fetched samples that an epoch saw every sample once.
#
# Each rank sums two 64-bit hashes of the ids it received. The sums over all ranks and restarts equal
# those of the whole epoch if and only if (up to 2**-128) each id came exactly once: a few bytes in a
# snapshot, whatever the size of the dataset. The ids since the start of this process are kept too, to
# name the samples when the sums differ.


_KEYS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_FOLD_EVERY = 4096


@dataclass(frozen=True, slots=True)
class Sums:
    """A multiset of ids in three numbers."""

    count: int = 0
    first: int = 0
    second: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.count + other.count,
            (self.first + other.first) & _MASK,
            (self.second + other.second) & _MASK,
        )

    def __sub__(self, other: "Sums") -> "Sums":
        return self + Sums(-other.count, -other.first, -other.second)


def sums_of(ids: np.ndarray) -> Sums:
    """Return the sums over int64 `ids`.

    Source: SplitMix64's finalizer, as in `mix`, with two odd keys.
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
