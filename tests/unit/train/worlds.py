"""Worlds of many ranks in one process: a loader for each rank, driven in step."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils.data import Dataset, IterableDataset

from torchmuster.train.batches.loader import Loader, LoaderSettings
from torchmuster.train.batches.order import Sums
from torchmuster.train.batches.stream import StreamLoader
from torchmuster.train.heartbeat import StepState

_DEFAULTS = {
    "global_batch_size": None,
    "batch_size": None,
    "shuffle": False,
    "seed": 0,
    "accumulate": 1,
    "drop_last": False,
    "num_workers": 0,
}


class Numbers(Dataset):
    """Samples that are their own index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Compared:
    """What a comparison between ranks would gather, for ranks that come one after another."""

    def __init__(self):
        self.values = []

    def __call__(self, value):
        self.values.append(value)
        return list(self.values)


def open_loader(dataset, *, rank=0, world_size=1, collate=None, compare=None, **settings):
    """Return one rank's loader; a map-style dataset is compared between ranks only if asked for."""
    kind = Loader
    if isinstance(dataset, IterableDataset):
        kind, compare = StreamLoader, compare or (lambda value: [value])
    cpu = torch.device("cpu")
    world = SimpleNamespace(rank=rank, world_size=world_size, device=cpu, step_state=StepState())
    return kind(
        world,
        dataset,
        LoaderSettings(**{**_DEFAULTS, **settings}),
        collate=collate,
        options={},
        compare=compare,
    )


@contextmanager
def world_of(world_size, dataset, state=None, **settings):
    """Give the loaders of all ranks, standing at `state`; end their workers at the end."""
    loaders = []
    try:
        for rank in range(world_size):
            own = copy.deepcopy(dataset)  # as each process has
            loaders.append(open_loader(own, rank=rank, world_size=world_size, **settings))
            if state is not None:
                loaders[-1].load_state_dict(state)
        yield loaders
    finally:
        for loader in loaders:
            loader.close()


def take(loaders, num_steps=None):
    """Return the global batches (lists of samples, in order) of that many steps, or of all left."""
    steps, samples = [], []
    iterators = [iter(loader) for loader in loaders]
    while num_steps is None or len(steps) < num_steps:
        batches = [next(iterator, None) for iterator in iterators]
        ended = [batch is None for batch in batches]
        assert len(set(ended)) == 1, "ranks have different numbers of batches"
        if ended[0]:
            break
        for loader, batch in zip(loaders, batches, strict=True):
            samples += batch.tolist()[: loader.count]
        if loaders[0].ends_step:
            steps.append(samples)
            samples = []
    for iterator in iterators:
        iterator.close()
    return steps


def alone(dataset, num_epochs=1, **settings):
    """Return the global batches of one process, a list an epoch."""
    with world_of(1, dataset, **settings) as loaders:
        return [take(loaders) for _ in range(num_epochs)]


def sums_in(loaders):
    """Return the sums of the samples that all ranks have seen."""
    return sum((loader.ledger.sums() for loader in loaders), Sums())


def stand(loaders):
    """Return where all ranks stand, which must be the same."""
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return states[0]
