"""Fetches and collates a batch in a loader worker, with random numbers keyed by sample.

Random augmentation inside `__getitem__` is keyed by (seed, epoch, sample): a sample is augmented in
the same way on every rank and in every loader worker. Seeding costs 11 us per sample, so it begins
only when a dataset has drawn random numbers: a batch that advanced a generator is fetched again,
keyed. Not covered: generators that the dataset creates itself without a seed, `collate_fn`, and the
device.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset, default_collate

from torchmuster.errors import MusterError
from torchmuster.train import rng
from torchmuster.train.batches.order import mix

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
