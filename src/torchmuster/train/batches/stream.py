"""Iterable datasets, under a contract: the same sequence for (seed, epoch) in any process.

Every reader (each rank, and each of its loader workers) reads the whole stream and keeps its own
part: with R ranks of K workers the stream is read R x K times. That is the price of an order that
does not depend on R and K; a map-style dataset has no such cost.

A dataset may have `set_epoch(epoch)`, and `state_dict()` with `load_state_dict(state)`: then a
resumed run begins at the state of the last step, otherwise it reads and drops the consumed samples.
torch, numpy and `random` are seeded from (seed, epoch, position) before each global batch is read.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from torchmuster.errors import UsageError
from torchmuster.train import rng
from torchmuster.train.batches import loader
from torchmuster.train.batches.order import Division, Share, mix
from torchmuster.train.exchange import gather_int

_NO_END = 1 << 62


@dataclass(slots=True)
class _Start:
    """The position at which the next iteration begins; the readers get it when they are forked."""

    epoch: int = 0
    position: int = 0
    micro_batches_done: int = 0
    state: Any = None


class StreamReader(IterableDataset):
    """Reads the whole stream and yields this reader's micro-batches with their sample ids."""

    def __init__(
        self,
        dataset: Any,
        settings: loader.LoaderSettings,
        division: Division,
        *,
        rank: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.dataset = dataset
        self.start = _Start()
        self._settings = settings
        self._division = division
        self._rank = rank
        self._collate = collate or default_collate
        self._beginning: tuple[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        num_readers, reader = (1, 0) if worker is None else (worker.num_workers, worker.id)
        source = self._open()
        position, head = self.start.position, None
        micro_batch = -self.start.micro_batches_done
        while samples := self._read(source, position):
            head = loader.digest(samples[0]) if head is None else head
            state = self._state()
            for share in self._shares(position, len(samples)):
                if micro_batch >= 0 and micro_batch % num_readers == reader:
                    yield share, self._pick(samples, share, position), head, state
                micro_batch += 1
            position += len(samples)

    def _open(self) -> Iterator[Any]:
        start = self.start
        self._rewind()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(start.epoch)
        if start.state is not None:
            self.dataset.load_state_dict(start.state)
        with self._seeded(start.epoch):
            source = iter(self.dataset)
        if start.state is not None:
            return source
        size, position = self._division.global_batch_size, 0
        while position < start.position:
            wanted = min(size, start.position - position)
            if len(self._draw(source, position, wanted)) < wanted:
                raise loader.DatasetError(
                    f"the stream ended before sample {start.position}, the position of the snapshot",
                    where=type(self.dataset).__name__,
                    fix="restore the data that the snapshot was made with",
                )
            position += wanted
        return source

    def _read(self, source: Iterator[Any], position: int) -> list[Any]:
        size = self._division.global_batch_size
        samples = self._draw(source, position, size)
        return [] if self._settings.drop_last and len(samples) < size else samples

    def _draw(self, source: Iterator[Any], position: int, count: int) -> list[Any]:
        with self._seeded(self.start.epoch, position):
            return list(itertools.islice(source, count))

    @contextmanager
    def _seeded(self, *words: int) -> Iterator[None]:
        before = rng.cheap_state()
        rng.seed_for_sample(mix(self._settings.seed, *words))
        try:
            yield
        finally:
            rng.put_back(before)

    def _rewind(self) -> None:
        """Go back to the beginning: an earlier iteration here may have ended in the middle."""
        if self._beginning is None:
            self._beginning = (self._state(),)
        elif self._has_state():
            self.dataset.load_state_dict(copy.deepcopy(self._beginning[0]))

    def _has_state(self) -> bool:
        return hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")

    def _state(self) -> Any:
        # A copy: the dataset may change what it has returned as it reads on.
        return copy.deepcopy(self.dataset.state_dict()) if self._has_state() else None

    def _shares(self, position: int, size: int) -> Iterator[Share]:
        division = Division(
            num_samples=position + size,
            global_batch_size=size,
            world_size=self._division.world_size,
            accumulate=self._settings.accumulate,
        )
        return division.shares(self._rank, position)

    def _pick(self, samples: list[Any], share: Share, position: int) -> Any:
        begin, end = share.begin - position, share.end - position
        if begin == end:  # a repeated sample with weight 0
            begin = min(begin, len(samples) - 1)
            end = begin + 1
        return self._collate(samples[begin:end])


class StreamLoader(loader.Loader):
    """A loader of an iterable dataset; made by `World.loader`.

    `compare` gathers a value from all ranks, in rank order.
    """

    def __init__(self, *args: Any, compare: Callable[[int], list[int]], **kwargs: Any) -> None:
        self._compare_heads = compare
        self._state: Any = None
        self._heads: set[int] = set()
        self._heads_compared = False
        self._is_over = False
        super().__init__(*args, **kwargs)

    def _count(self, dataset: Any) -> int:
        return _NO_END

    def _open(self, dataset: Any, collate: Any, options: dict[str, Any]) -> Any:
        reader = StreamReader(
            dataset, self.settings, self._division, rank=self._rank, collate=collate
        )
        # The readers get the epoch when they are forked, so they must not outlive it.
        options = {**options, "persistent_workers": False}
        return loader.open_batches(reader, None, self.settings.num_workers, options)

    @property
    def first_batch_is_collective(self) -> bool:
        """Whether the readers' first samples are still to be compared."""
        return not self._heads_compared

    def __len__(self) -> int:
        raise TypeError("the length of a stream isn't known")

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            self._begin_next()
        if self._is_over:
            return iter(())
        self._heads_compared = False
        self._heads = set()
        start = _Start(self.epoch, self.position, self._micro_batches_done, self._state)
        self._batches.dataset.start = start
        return super().__iter__()

    def _next(
        self, batches: Iterator[Any], shares: Iterator[Share]
    ) -> tuple[Share, torch.Tensor, Any] | None:
        item = next(batches, None)
        self._check_heads(item)
        if item is None:
            self._is_over = True
            return None
        share, batch, _, state = item
        self._pending_state = state
        return share, torch.arange(share.begin, share.end), batch

    def _take(self, share: Share, ids: torch.Tensor) -> None:
        super()._take(share, ids)
        if share.ends_step:
            self._state = self._pending_state

    def _check_heads(self, item: Any) -> None:
        """Refuse a stream that differs between readers because it shards itself or is random."""
        if item is not None:
            self._heads.add(item[2])
        if len(self._heads) > 1:
            raise _divides_itself("two loader workers of one rank")
        if not self._heads_compared:
            self._heads_compared = True
            heads = self._compare_heads(0 if item is None else item[2])
            if len(set(heads)) > 1:
                odd = next(rank for rank, head in enumerate(heads) if head != heads[0])
                raise _divides_itself(f"ranks 0 and {odd}")

    def begin_epoch(self, epoch: int, position: int = 0, consumed: Any = None) -> None:
        """Move to `position` of `epoch`."""
        super().begin_epoch(epoch, position, consumed)
        self._is_over = False
        self._state = None

    def epoch_samples(self) -> int | None:
        """Return the stream's length; None until its end has been seen."""
        return self.position if self._is_over else None

    def expected(self, position: int) -> np.ndarray:
        """Return the positions: they are the ids of a stream's samples."""
        return np.arange(position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream: the same on all ranks."""
        return {**super().state_dict(), "stream": self._state, "is_over": self._is_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position in `state`."""
        super().load_state_dict(state)
        self._state, self._is_over = state["stream"], state["is_over"]


def open_loader(
    world: Any,
    dataset: Any,
    settings: loader.LoaderSettings,
    collate: Callable[[list[Any]], Any] | None,
    options: dict[str, Any],
) -> loader.Loader:
    """Return this rank's loader for a map-style or iterable dataset.

    Raises:
        UsageError: `shuffle` is given for a stream, or sizes don't fit.
        DatasetError: The dataset is empty or has no length.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "the loader takes a dataset, and got a DataLoader",
            where="World.loader",
            fix="give it the dataset: tm.loader(dataset, batch_size=...)",
        )
    if taken := {"sampler", "batch_sampler"} & options.keys():
        raise UsageError(
            f"the loader shares the samples out itself: `{taken.pop()}` can't be given",
            where="World.loader",
            fix="leave it out",
        )
    if not isinstance(dataset, IterableDataset):
        compare = gather_int if world.world_size > 1 else None
        return loader.Loader(
            world, dataset, settings, collate=collate, options=options, compare=compare
        )
    if settings.shuffle:
        raise UsageError(
            "an iterable dataset has its own order: shuffle=True has no effect",
            where="World.loader",
            fix="shuffle in the dataset, from (seed, epoch)",
        )
    return StreamLoader(
        world, dataset, settings, collate=collate, options=options, compare=gather_int
    )


def _divides_itself(who: str) -> loader.DatasetError:
    return loader.DatasetError(
        f"the iterable dataset gives {who} different samples",
        why="it shards itself by rank or worker, or shuffles with a seed of its own",
        fix="let it yield the whole sequence everywhere, the same for (seed, epoch): the loader"
        " selects each reader's part",
    )
