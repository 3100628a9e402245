"""The order of samples: a function of (seed, epoch) and of nothing else.

The world size only decides which rank reads which part of a global batch. Sizes, positions and
shares are plain integers here, so that every property can be tested without a process group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps in an epoch that begins at 0."""
        return self.steps_from(0)

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
