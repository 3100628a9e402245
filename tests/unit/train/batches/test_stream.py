"""Iterable datasets: one sequence at any world size and number of loader workers."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from torchmuster.errors import UsageError
from torchmuster.train.batches.loader import DatasetError
from torchmuster.train.batches.order import sums_of
from unit.train.worlds import Compared, alone, open_loader, stand, sums_in, take, world_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


class Stream(IterableDataset):
    """Counts up to `length`, from a hundred times the epoch."""

    def __init__(self, length):
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.length):
            yield 100 * self.epoch + number


class Noisy(Stream):
    """Draws from all generators for every sample."""

    def __iter__(self):
        for number in super().__iter__():
            noise = torch.rand(()).item() + np.random.random() + random.random()
            yield torch.tensor(number + noise / 3, dtype=torch.float64)


class Shuffled(Stream):
    """Draws its order when the iteration begins, not when the first sample is read."""

    def __iter__(self):
        return iter(torch.randperm(self.length).tolist())


class Stateful(Stream):
    """Goes on from a state; `opened` says where each iteration began."""

    def __init__(self, length):
        super().__init__(length)
        self.state = {"next": 0}
        self.opened = []

    def state_dict(self):
        return self.state  # the one that it changes, as a careless dataset may

    def load_state_dict(self, state):
        self.state = dict(state)

    def __iter__(self):
        self.opened.append(self.state["next"])
        while self.state["next"] < self.length:
            number = self.state["next"]
            self.state["next"] += 1
            yield 100 * self.epoch + number
        self.state["next"] = 0


class OfWorker(Stream):
    """Shards itself by loader worker, as torch's documentation shows."""

    def __iter__(self):
        worker = get_worker_info()
        return itertools.islice(super().__iter__(), worker.id, None, worker.num_workers)


class OfRank(Stream):
    """Shards itself by rank."""

    def __init__(self, length, rank, world_size):
        super().__init__(length)
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.rank, None, self.world_size)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_global_batches_do_not_depend_on_world_or_workers(world_size, num_workers, accumulate):
    settings = {"global_batch_size": 7, "num_workers": num_workers, "accumulate": accumulate}
    with world_of(world_size, Stream(23), **settings) as loaders:
        epochs = [take(loaders) for _ in range(2)]
    expected = [list(range(at, min(at + 7, 23))) for at in range(0, 23, 7)]
    assert epochs[0] == expected
    assert epochs[1] == [[100 + number for number in batch] for batch in expected]


@settings(max_examples=20)
@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_any_stream_is_divided_without_loss(length, batch_size, world_size, accumulate, drop_last):
    settings = {"global_batch_size": batch_size, "accumulate": accumulate, "drop_last": drop_last}
    with world_of(world_size, Stream(length), **settings) as loaders:
        batches = take(loaders)
        assert all(loader.epoch_samples() == loader.position for loader in loaders)
    used = length - length % batch_size if drop_last else length
    assert list(itertools.chain(*batches)) == list(range(used))
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}
    assert sums_in(loaders) == sums_of(np.arange(used))


@pytest.mark.parametrize("kind", [Stream, Stateful, Noisy, Shuffled])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_stream_goes_on_in_another_world(kind, num_workers):
    settings = {"global_batch_size": 5, "num_workers": num_workers, "seed": 2}
    with world_of(3, kind(23), **settings) as loaders:
        batches = take(loaders, 2)
        state = stand(loaders)
    assert state["position"] == 10
    with world_of(2, kind(23), state, **settings) as loaders:
        batches += take(loaders)
        following = take(loaders)
    assert [batches, following] == alone(kind(23), 2, global_batch_size=5, seed=2)
    assert len(list(itertools.chain(*batches))) == 23


def test_a_stream_with_a_state_is_not_read_from_its_beginning():
    with world_of(2, Stateful(23), global_batch_size=5) as loaders:
        take(loaders[:1], 2)
        state = loaders[0].state_dict()
    assert state["stream"] == {"next": 10}
    with world_of(1, Stateful(23), state, global_batch_size=5) as loaders:
        assert take(loaders)[0] == list(range(10, 15))
        assert loaders[0].dataset.opened == [10]


def test_the_state_that_was_saved_is_that_of_the_step_that_was_done():
    loader = open_loader(Stateful(20), global_batch_size=5)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)  # changes the dict that the dataset gave out
    assert state["stream"] == {"next": 5}


@pytest.mark.parametrize("kind", [Stream, Stateful])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_over_a_stream_goes_on_after_a_break(kind, num_workers):
    loader = open_loader(kind(11), global_batch_size=4, accumulate=2, num_workers=num_workers)
    seen = []
    for _ in range(6):
        for batch in loader:
            seen += batch.tolist()
            break
    assert seen == list(range(11))
    assert loader.ledger.sums() == sums_of(np.arange(11))
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_was_left_early_does_not_shorten_the_next(num_workers):
    with world_of(2, Stateful(11), global_batch_size=4, num_workers=num_workers) as loaders:
        take(loaders, 1)
        for loader in loaders:
            loader.begin_epoch(1)
        assert take(loaders) == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109, 110]]


def test_workers_end_with_their_loader_though_a_traceback_holds_their_iterator():
    # Else the interpreter would wait for them at its end, for they ignore SIGTERM.
    loader = open_loader(OfWorker(40), global_batch_size=4, num_workers=2)
    with pytest.raises(DatasetError) as caught:
        take([loader])
    (iterator,) = loader._batches.iterators
    loader.close()
    for process in iterator._workers:
        process.join(timeout=20)
        assert not process.is_alive()
    assert caught.tb is not None


def test_a_stream_saved_at_its_end_begins_the_next_epoch():
    with world_of(2, Stream(10), global_batch_size=4) as loaders:
        take(loaders)
        state = stand(loaders)
    assert state["is_over"]
    with world_of(3, Stream(10), state, global_batch_size=4) as loaders:
        assert take(loaders)[0] == [100, 101, 102, 103]
        assert {loader.epoch for loader in loaders} == {1}


def test_a_stream_that_became_shorter_is_refused():
    with world_of(1, Stream(20), global_batch_size=6) as loaders:
        take(loaders, 3)
        state = stand(loaders)
    loader = open_loader(Stream(17), global_batch_size=6)
    loader.load_state_dict(state)
    with pytest.raises(DatasetError) as caught:
        next(iter(loader))
    assert caught.value.what == ("the stream ended before sample 18, the position of the snapshot")
    assert caught.value.where == "Stream"
    assert caught.value.fix == "restore the data that the snapshot was made with"


def says_that_it_divides_itself(error, who):
    assert error.what == f"the iterable dataset gives {who} different samples"
    assert error.why == "it shards itself by rank or worker, or shuffles with a seed of its own"
    assert error.fix == (
        "let it yield the whole sequence everywhere, the same for (seed, epoch): the loader"
        " selects each reader's part"
    )


def test_a_stream_that_shards_itself_by_rank_is_refused():
    compare = Compared()
    loaders = [
        open_loader(
            OfRank(20, rank, 3), rank=rank, world_size=3, global_batch_size=6, compare=compare
        )
        for rank in range(3)
    ]
    next(iter(loaders[0]))
    with pytest.raises(DatasetError) as caught:
        next(iter(loaders[1]))
    says_that_it_divides_itself(caught.value, "ranks 0 and 1")


def test_a_stream_that_shards_itself_by_worker_is_refused():
    with world_of(1, OfWorker(20), global_batch_size=4, num_workers=2) as loaders:
        with pytest.raises(DatasetError) as caught:
            take(loaders)
        says_that_it_divides_itself(caught.value, "two loader workers of one rank")


def test_a_stream_with_an_end_on_one_rank_only_is_refused():
    compare = Compared()
    full = open_loader(Stream(4), world_size=2, global_batch_size=4, compare=compare)
    empty = open_loader(Stream(0), rank=1, world_size=2, global_batch_size=4, compare=compare)
    next(iter(full))
    with pytest.raises(DatasetError) as caught:
        next(iter(empty), None)
    says_that_it_divides_itself(caught.value, "ranks 0 and 1")


@pytest.mark.parametrize("kind", [Noisy, Shuffled])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_a_stream_does_not_move_the_scripts_generator(kind, num_workers):
    before = torch.get_rng_state()
    with world_of(1, kind(11), global_batch_size=4, num_workers=num_workers) as loaders:
        take(loaders)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_length_of_a_stream_is_unknown_until_its_end():
    loader = open_loader(Stream(5), global_batch_size=2)
    with pytest.raises(TypeError, match="the length of a stream isn't known"):
        len(loader)
    assert loader.epoch_samples() is None
    take([loader])
    assert loader.epoch_samples() == 5
    assert loader.expected(5).tolist() == [0, 1, 2, 3, 4]


def test_sizes_below_one_are_refused_for_a_stream_too():
    with pytest.raises(UsageError, match="global_batch_size is 0, below one"):
        open_loader(Stream(5), global_batch_size=0)
