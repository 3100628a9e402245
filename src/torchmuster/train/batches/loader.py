"""The loader: yields this rank's share of a global order of samples that depends only on the seed.

It wraps torch's DataLoader and decides which samples are read, in which order and from which
position. Iteration continues at the current position of the epoch: a second `for` after a `break`
starts with the next batch; after the end of an epoch it begins the next one, and its ledger proves
what was seen.
"""

import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Sampler, TensorDataset, default_collate

from torchmuster.core.model.progress import RankPhase
from torchmuster.errors import MusterError, UsageError
from torchmuster.train import rng
from torchmuster.train.batches.order import (
    Division,
    Ledger,
    Share,
    Sums,
    epoch_order,
    mix,
    name_faults,
    sums_of,
)
from torchmuster.train.exchange import gather_bytes, gather_json
from torchmuster.train.heartbeat import StepState
from torchmuster.train.preempt import StopNow, begin_quietly, fork_quietly
from torchmuster.train.snapshot.state import SnapshotError

# A batch is fetched and collated in a loader worker, with random numbers keyed by sample.
#
# Random augmentation inside `__getitem__` is keyed by (seed, epoch, sample): a sample is augmented in
# the same way on every rank and in every loader worker. Seeding costs 11 us per sample, so it begins
# only when a dataset has drawn random numbers: a batch that advanced a generator is fetched again,
# keyed. Not covered: generators that the dataset creates itself without a seed, `collate_fn`, and the
# device.


Request = tuple[int, list[int] | torch.Tensor]  # epoch, indices


class DatasetError(MusterError):
    """The dataset violates a requirement of exact data order."""

    exit_code = 9


class KeyedFetch:
    """A dataset of batches: item `(epoch, indices)` is `(ids, collated samples)`."""

    def __init__(
        self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._collate = collate or default_collate
        # Indexing each tensor once gives the same as fetching and collating samples one by one.
        self._tensors = (
            dataset.tensors if collate is None and type(dataset) is TensorDataset else None
        )
        self._draws = False

    def __getitem__(self, request: Request) -> tuple[torch.Tensor, Any]:
        epoch, wanted = request
        ids = wanted if isinstance(wanted, torch.Tensor) else torch.tensor(wanted)
        if self._tensors is not None:
            return ids, [tensor[ids] for tensor in self._tensors]
        indices = ids.tolist()
        before = rng.cheap_state()
        samples = None
        try:
            samples = None if self._draws else self._fetch_plain(indices)
            if samples is None or rng.moved_since(before):
                self._draws, samples = True, None
                samples = [self._fetch_keyed(epoch, index) for index in indices]
        finally:
            if self._draws or samples is None:  # it draws random numbers, or it raised
                rng.put_back(before)
        return ids, self._collate(samples)

    def _fetch_plain(self, indices: Sequence[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(indices)) if many is not None else [self.dataset[i] for i in indices]

    def _fetch_keyed(self, epoch: int, index: int) -> Any:
        rng.seed_for_sample(mix(self._seed, epoch, index))
        return self.dataset[index]


def num_samples_of(dataset: Any) -> int:
    """Return the length of a map-style dataset.

    Raises:
        DatasetError: The dataset has no length, or is empty.
    """
    try:
        length = len(dataset)
    except TypeError as error:
        raise DatasetError(
            "the dataset has no length",
            where=type(dataset).__name__,
            why=str(error),
            fix="give it __len__ and __getitem__, or derive it from IterableDataset",
        ) from error
    if length < 1:
        raise DatasetError("the dataset is empty", where=type(dataset).__name__)
    return int(length)


def digest(sample: Any) -> int:
    """Return a checksum of a sample's values, for comparing readers."""
    crc = 0
    for leaf in pytree.tree_leaves(sample):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            data = leaf.tobytes()
        elif isinstance(leaf, (bytes, str, int, float, complex, np.generic, type(None))):
            data = leaf if isinstance(leaf, bytes) else repr(leaf).encode()
        else:
            # The text of other objects often holds their address, which no two processes share.
            data = type(leaf).__qualname__.encode()
        crc = zlib.crc32(data, crc)
    return crc + 1  # 0 is an empty stream


class Gate(Protocol):
    """Callbacks of a run around batches; `is_in_epoch`: the script is looping over `run.epochs`."""

    is_in_epoch: bool

    def between_steps(self) -> None:
        """Called when all code of the last step has run, before the next batch is requested."""

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Context in which the main thread waits for a batch and can be interrupted."""

    def stop(self) -> None:
        """Called when the wait was interrupted: save and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Options for dividing and fetching; see `World.loader`."""

    global_batch_size: int | None
    batch_size: int | None
    shuffle: bool
    seed: int
    accumulate: int
    drop_last: bool
    num_workers: int


class Loader:
    """Batches of this rank, moved to its device; made by `World.loader`.

    Attributes:
        epoch: The epoch that the next batch belongs to.
        position: Samples of this epoch that all ranks together have consumed.
        ledger: The samples that this rank received in the epoch.
    """

    def __init__(
        self,
        world: Any,
        dataset: Any,
        settings: LoaderSettings,
        *,
        collate: Callable[[list[Any]], Any] | None,
        options: dict[str, Any],
        compare: Callable[[int], list[int]] | None = None,
    ) -> None:
        self.settings = settings
        self._compare = compare
        self.num_samples = self._count(dataset)
        self.epoch = 0
        self.position = 0
        self.ledger = Ledger()
        self.gate: Gate | None = None
        self._rank, self._device = world.rank, world.device
        self._step_state: StepState = world.step_state
        self._order: torch.Tensor | None = None
        self._micro_batches_done = 0  # of the current step
        self._division = divide(settings, self.num_samples, world.world_size)
        self._batches = self._open(dataset, collate, options)

    def _count(self, dataset: Any) -> int:
        return num_samples_of(dataset)

    def _open(self, dataset: Any, collate: Any, options: dict[str, Any]) -> Any:
        fetch = KeyedFetch(dataset, self.settings.seed, collate)
        return open_batches(fetch, _Requests(self), self.settings.num_workers, options)

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self._batches.dataset.dataset

    @property
    def first_batch_is_collective(self) -> bool:
        """Whether the ranks are compared while the next batch is fetched."""
        return False

    @property
    def global_batch_size(self) -> int:
        """Samples per step, over all ranks."""
        return self._division.global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch."""
        return self._division.steps_from(0)

    @property
    def ends_step(self) -> bool:
        """Whether the optimizer steps after the current batch: always, without accumulation."""
        return self._step_state.ends_step

    @property
    def count(self) -> int:
        """Number of samples in the current batch; 0 for a repeated sample without a share."""
        return self._step_state.count or 0

    def __len__(self) -> int:
        """Return the number of micro-batches that remain in the epoch."""
        steps = self._division.steps_from(self.position)
        return steps * self.settings.accumulate - self._micro_batches_done

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch; after its end, those of the next."""
        if self.position >= self._division.end_from(self.position):
            self._begin_next()
        with fork_quietly():
            batches = iter(self._batches)
        return self._iterate(batches)

    def _begin_next(self) -> None:
        if self.gate is None:
            self.begin_epoch(self.epoch + 1)
        elif not self.gate.is_in_epoch:
            raise UsageError(
                "the data of this epoch are used up, and no other epoch has begun",
                where=f"epoch {self.epoch}",
                fix="for epoch in run.epochs(N): it goes on where a snapshot was, and saves",
            )

    def _iterate(self, batches: Iterator[Any]) -> Iterator[Any]:
        shares = self._shares()
        ends_step = not self._micro_batches_done
        heartbeat = self._step_state.heartbeat
        self._check_alike(batches)
        try:
            while True:
                if self.gate is not None and ends_step:
                    self.gate.between_steps()
                heartbeat.enter(RankPhase.DATA)
                with self.gate.waiting_for_data() if self.gate is not None else nullcontext():
                    taken = self._next(batches, shares)
                heartbeat.enter(RankPhase.COMPUTE if taken is not None else RankPhase.BETWEEN)
                if taken is None:
                    return
                if self.gate is not None and ends_step:
                    self.gate.between_steps()
                share, ids, batch = taken
                self._take(share, ids)
                ends_step = share.ends_step
                yield batch if self._device.type == "cpu" else on_device(batch, self._device)
        except StopNow:
            if self.gate is not None:
                self.gate.stop()
        finally:
            self._step_state.clear()

    def _check_alike(self, batches: Iterator[Any]) -> None:
        """Check once that all ranks read the same dataset, by their first sample."""
        compare = self._compare
        if compare is None:
            return
        _, sample = next(batches)  # requested first by `requests`
        self._compare = None
        digests = compare(digest(sample))
        if len(set(digests)) > 1:
            odd = next(rank for rank, one in enumerate(digests) if one != digests[0])
            raise DatasetError(
                f"the dataset of rank {odd} differs from that of rank 0",
                where="sample 0",
                why="its values differ; often the dataset draws random numbers when it is constructed",
                fix="make the dataset the same on all ranks: construct it after tm.init(), or use a"
                " generator with a seed",
            )

    def _shares(self) -> Iterator[Share]:
        """Yield the remaining shares; a `break` may have ended the loop within a step."""
        shares = self._division.shares(self._rank, self.position)
        return itertools.islice(shares, self._micro_batches_done, None)

    def _next(
        self, batches: Iterator[Any], shares: Iterator[Share]
    ) -> tuple[Share, torch.Tensor, Any] | None:
        share = next(shares, None)
        if share is None:
            return None
        ids, batch = next(batches)
        return share, ids, batch

    def _take(self, share: Share, ids: torch.Tensor) -> None:
        step_state = self._step_state
        step_state.weight, step_state.count = share.weight, share.count
        step_state.ends_step = share.ends_step
        step_state.accumulates = self.settings.accumulate > 1
        step_state.serial += 1
        if share.count:
            self.ledger.add(ids)
        self._micro_batches_done += 1
        if share.ends_step:
            self.position, self._micro_batches_done = share.position, 0

    def begin_epoch(self, epoch: int, position: int = 0, consumed: Sums | None = None) -> None:
        """Move to `position` of `epoch`; `consumed` is the ledger of the samples before it."""
        self.epoch = epoch
        self.position = position
        self._order = None
        self._micro_batches_done = 0
        self.ledger.start(consumed if consumed is not None else Sums())

    def order(self) -> torch.Tensor:
        """Return the sample ids of this epoch in order: shape `(num_samples,)`, int64."""
        if self._order is None:
            settings = self.settings
            self._order = epoch_order(
                self.num_samples, seed=settings.seed, epoch=self.epoch, shuffle=settings.shuffle
            )
        return self._order

    def epoch_samples(self) -> int | None:
        """Return the number of samples of an epoch; None while the end of a stream is unknown."""
        return self._division.end_from(self.position)

    def expected(self, position: int) -> np.ndarray:
        """Return the ids of the first `position` samples of this epoch."""
        return self.order()[:position].numpy()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader: the same on all ranks."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_samples": self.num_samples,
            "seed": self.settings.seed,
            "shuffle": self.settings.shuffle,
        }

    def order_settings(self) -> dict[str, Any]:
        """Return the settings that determine the order of samples, for the record.

        Two runs with equal settings have the same order.
        """
        order = {k: v for k, v in self.state_dict().items() if k not in ("epoch", "position")}
        return {**order, "global_batch_size": self.global_batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position in `state`.

        Raises:
            DatasetError: The dataset or the order has changed since it was saved.
        """
        now = self.state_dict()
        words = {
            "num_samples": "the dataset had {} samples when the snapshot was made, it has {} now",
            "seed": "the loader's seed was {}, it is {} now",
            "shuffle": "the loader's `shuffle` was {}, it is {} now",
        }
        differs = [
            text.format(state[key], now[key])
            for key, text in words.items()
            if state[key] != now[key]
        ]
        if differs:
            raise DatasetError(
                "; ".join(differs),
                where="World.resume(data=...)",
                why="the order of samples would change: some samples would be lost, some seen twice",
                fix="restore the dataset and the seed, or start over with another folder",
            )
        self.begin_epoch(state["epoch"], state["position"])

    def requests(self) -> Iterator[Request]:
        """Yield the batches to fetch from the position on; without a share repeat a sample."""
        order = self.order()
        if self._compare is not None:
            yield self.epoch, [0]
        for share in self._shares():
            begin, end = share.begin, share.end
            if begin == end:
                begin = min(begin, self.num_samples - 1)
                end = begin + 1
            ids = order[begin:end]
            # Numbers pass through a loader worker's queue more cheaply than a tensor.
            yield self.epoch, ids.tolist() if self.settings.num_workers else ids

    def close(self) -> None:
        """End the loader's worker processes."""
        close_batches(self._batches)


class _Requests(Sampler[Request]):
    """Batch sampler for torch's DataLoader: starts an iteration at the loader's position."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Request]:
        return self._loader.requests()

    def __len__(self) -> int:
        return len(self._loader)


def divide(settings: LoaderSettings, num_samples: int, world_size: int) -> Division:
    """Return the division of an epoch; the per-rank batch size grows with the world.

    Raises:
        UsageError: A size is below one, or both batch sizes or neither are given.
    """
    problems = []
    sizes = {"global_batch_size": settings.global_batch_size, "batch_size": settings.batch_size}
    given = {name: size for name, size in sizes.items() if size is not None}
    if len(given) != 1:
        problems.append("give either global_batch_size or batch_size (per rank)")
    problems += [f"{name} is {size}, below one" for name, size in given.items() if size < 1]
    if settings.accumulate < 1:
        problems.append(f"accumulate is {settings.accumulate}, below one")
    if settings.num_workers < 0:
        problems.append(f"num_workers is {settings.num_workers}, below zero")
    size = settings.global_batch_size or (settings.batch_size or 0) * world_size
    if not problems and settings.drop_last and size > num_samples:
        problems.append(f"drop_last leaves no batch: {num_samples} samples in batches of {size}")
    if problems:
        raise UsageError(
            "the loader can't divide its samples: " + "; ".join(problems), where="World.loader"
        )
    return Division(
        num_samples=num_samples,
        global_batch_size=size,
        world_size=world_size,
        accumulate=settings.accumulate,
        drop_last=settings.drop_last,
    )


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device, copied while the host goes on."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), batch)


class _Batches(DataLoader):
    """torch's DataLoader that tracks its iterators with live worker processes.

    A traceback may keep a non-persistent iterator until the interpreter ends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        if self.num_workers:
            self.iterators.add(iterator)
        return iterator


def open_batches(
    fetch: Any, sampler: Sampler[Any] | None, num_workers: int, options: dict[str, Any]
) -> Any:
    """Return torch's DataLoader over whole batches."""
    options = dict(options)
    if num_workers:
        options.setdefault("persistent_workers", True)
        then = options.get("worker_init_fn")
        options["worker_init_fn"] = functools.partial(begin_quietly, then)
    return _Batches(
        fetch,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        # A separate generator: an iterator draws a seed for its workers, which must not move the
        # script's generator once more in a resumed run.
        generator=torch.Generator(),
        **options,
    )


def close_batches(batches: Any) -> None:
    """End the worker processes of a loader that is no longer needed.

    They are asked to stop first, because torch treats a killed worker as a failure. One that does
    not react is
    killed: it ignores SIGTERM, and the interpreter would wait for it at its end.
    """
    batches._iterator = None
    for iterator in list(batches.iterators):
        with suppress(RuntimeError):
            iterator._shutdown_workers()
        for process in iterator._workers:
            if process.is_alive():
                process.kill()


def _as_it_is(batch: Any) -> Any:
    return batch


def prove(data: Loader) -> dict[str, Any]:
    """Prove by all ranks' ledgers that each sample up to the position was seen once; a collective.

    Returns:
        `samples`, `lost`, `twice`, and `whole`: whether that is the complete epoch.

    Raises:
        DatasetError: Some were lost or seen twice.
    """
    mine = data.ledger.sums()
    rows = gather_json([mine.count, mine.first, mine.second])
    total = sum((Sums(*row) for row in rows), Sums())
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
    total = sum((Sums(*piece) for piece in pieces), Sums())
    if total != sums_of(data.expected(data.position)):
        raise SnapshotError(
            f"the ledger of the snapshot of step {step} doesn't match its position in the data",
            where=f"epoch {data.epoch}, {data.position} samples consumed",
            why=f"{total.count} samples were recorded, or others than this order has",
            fix="check that dataset, seed and shuffle are the same as when the snapshot was made",
        )
    data.ledger.start(total if is_first else Sums())
