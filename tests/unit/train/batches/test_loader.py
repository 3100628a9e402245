"""The loader: one global sequence of batches, whatever the world, its workers and its restarts."""

import itertools
import random

import numpy as np
import numpy.random  # an import within a dataset counts as a draw
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from torchmuster.errors import UsageError
from torchmuster.train.batches.loader import DatasetError, KeyedFetch, digest, num_samples_of
from torchmuster.train.batches.order import Sums, sums_of
from torchmuster.train.rng import cheap_state, moved_since
from unit.train.worlds import Compared, Numbers, alone, open_loader, stand, sums_in, take, world_of

# Forked workers of a process that has threads, or more of them than cores: both are meant here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]
PRIME = 101
WORLDS = (4, 3, 7, 1, 8)


class Noisy(Dataset):
    """Samples with augmentation from torch's generator."""

    def __len__(self):
        return PRIME

    def __getitem__(self, index):
        return index + torch.rand((), dtype=torch.float64)


class Stops:
    """A gate that notes what the loader tells it."""

    def __init__(self):
        self.boundaries = 0

    is_in_epoch = True

    def between_steps(self):
        self.boundaries += 1

    def waiting_for_data(self):
        return torch.no_grad()

    def stop(self):
        raise AssertionError("nothing asked for a stop")


def through_worlds(worlds, dataset, steps_each, **settings):
    """Return the global batches of one epoch when the world changes in its middle, and the sums."""
    state, batches, sums = None, [], Sums()
    for number, world_size in enumerate(worlds):
        last = number == len(worlds) - 1
        with world_of(world_size, dataset, state, **settings) as loaders:
            batches += take(loaders, None if last else steps_each)
            sums = sums + sums_in(loaders)
            state = stand(loaders)
    return batches, sums


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [7, 13])
def test_a_changing_world_sees_the_global_batches_of_one_process(batch_size, num_workers):
    settings = {"global_batch_size": batch_size, "shuffle": True, "seed": 3}
    settings["num_workers"] = num_workers
    batches, sums = through_worlds(WORLDS, Numbers(PRIME), 1, **settings)
    expected = alone(Numbers(PRIME), **{**settings, "num_workers": 0})[0]
    assert batches == expected
    assert sorted(itertools.chain(*batches)) == list(range(PRIME))
    assert sums == sums_of(np.arange(PRIME))


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_any_changes_of_the_world_keep_the_global_batches(
    worlds, batch_size, accumulate, steps_each, shuffle, drop_last
):
    settings = {"global_batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    expected = alone(Numbers(47), **settings)[0]
    # Else the changes would not be in the middle of the epoch.
    assume(steps_each * (len(worlds) - 1) < len(expected))
    batches, _ = through_worlds(worlds, Numbers(47), steps_each, accumulate=accumulate, **settings)
    assert batches == expected


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_size_per_rank_loses_nothing_when_the_world_changes(drop_last):
    settings = {"batch_size": 3, "shuffle": True, "drop_last": drop_last}
    batches, sums = through_worlds(WORLDS, Numbers(PRIME), 1, **settings)
    sizes = [12, 9, 21, 3, 24, 24]
    assert [len(batch) for batch in batches] == (sizes if drop_last else [*sizes, PRIME - 93])
    seen = list(itertools.chain(*batches))
    order = list(itertools.chain(*alone(Numbers(PRIME), batch_size=1, shuffle=True)[0]))
    assert seen == order[: len(seen)]
    assert sums == sums_of(torch.tensor(seen).numpy())


def test_the_rest_that_drop_last_leaves_out_is_counted_from_where_the_epoch_stands():
    # 20 samples: 8 in a world of 4, then 6 + 6 in a world of 3, which alone would have used 18.
    settings = {"batch_size": 2, "drop_last": True}
    batches, _ = through_worlds((4, 3), Numbers(20), 1, **settings)
    assert [len(batch) for batch in batches] == [8, 6, 6]
    # 18 in a world of 3; the 2 that are left are no batch of 8: the next epoch begins.
    with world_of(3, Numbers(20), **settings) as loaders:
        take(loaders)
        state = stand(loaders)
    with world_of(4, Numbers(20), state, **settings) as loaders:
        assert take(loaders)[0] == list(range(8))
        assert {loader.epoch for loader in loaders} == {1}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_is_the_same_in_any_world(num_workers):
    settings = {"global_batch_size": 17, "shuffle": True, "num_workers": num_workers}
    batches, _ = through_worlds((2, 3), Noisy(), 2, **settings)
    assert batches == alone(Noisy(), global_batch_size=17, shuffle=True)[0]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_epochs_have_orders_of_their_own_in_any_world(num_workers):
    settings = {"global_batch_size": 13, "shuffle": True, "num_workers": num_workers}
    with world_of(3, Numbers(PRIME), **settings) as loaders:
        epochs = [take(loaders) for _ in range(3)]
    assert epochs == alone(Numbers(PRIME), 3, global_batch_size=13, shuffle=True)
    assert len({str(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_goes_on_after_a_break(num_workers):
    loader = open_loader(Numbers(20), global_batch_size=3, num_workers=num_workers)
    seen = []
    for stop_at in (2, 5, None):
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == stop_at:
                break
    loader.close()
    assert list(itertools.chain(*seen)) == list(range(20))
    assert loader.ledger.sums() == sums_of(np.arange(20))
    assert (loader.epoch, len(seen)) == (0, 7)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_break_in_the_middle_of_an_accumulated_step_goes_on_there(num_workers):
    settings = {"global_batch_size": 6, "accumulate": 3, "num_workers": num_workers}
    loader = open_loader(Numbers(16), **settings)
    seen, left = [], []
    for _ in range(9):
        left.append(len(loader))
        for batch in loader:
            seen += batch.tolist()
            break
    loader.close()
    assert seen == list(range(16))
    assert left == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert loader.ledger.sums() == sums_of(np.arange(16))
    assert (loader.position, len(loader)) == (16, 0)


def test_a_position_counts_whole_steps_only():
    loader = open_loader(Numbers(12), global_batch_size=6, accumulate=2)
    positions = [(loader.position, loader.ends_step) for _ in loader]
    assert positions == [(0, False), (6, True), (6, False), (12, True)]


def test_the_length_is_what_is_left():
    loader = open_loader(Numbers(10), global_batch_size=4, accumulate=2)
    lengths = [len(loader) for batch in loader if loader.ends_step]
    assert lengths == [4, 2, 0]
    assert (loader.steps_per_epoch, loader.global_batch_size) == (3, 4)


def test_more_ranks_than_samples_in_a_batch_repeat_one_with_weight_zero():
    with world_of(5, Numbers(7), global_batch_size=3) as loaders:
        iterators = [iter(loader) for loader in loaders]
        for batch in ([0, 1, 2], [3, 4, 5], [6]):
            shares = [next(iterator).tolist() for iterator in iterators]
            assert all(len(share) == 1 for share in shares)  # nobody's batch is empty
            counts = [loader.count for loader in loaders]
            assert [s[0] for s, c in zip(shares, counts, strict=True) if c] == batch
            weights = [loader._step_state.weight for loader in loaders]
            assert weights == [count * 5 / len(batch) for count in counts]
        assert [next(iterator, None) for iterator in iterators] == [None] * 5
        assert sums_in(loaders) == sums_of(np.arange(7))


def test_outside_of_the_loop_no_batch_is_in_hand():
    loader = open_loader(Numbers(5), global_batch_size=2)
    for _ in loader:
        assert loader.count == 2
        assert loader._step_state.count == 2
        break
    assert loader.count == 0
    assert loader._step_state.count is None
    assert loader.ends_step


def test_boundaries_are_between_steps_only():
    loader = open_loader(Numbers(8), global_batch_size=4, accumulate=2)
    loader.gate = Stops()
    told = [loader.gate.boundaries for _ in loader]
    # Each boundary twice: before the wait for data, and after it.
    assert told == [2, 2, 4, 4]
    assert loader.gate.boundaries == 5
    assert list(loader) == []  # the run, not the loop, begins the next epoch


HAD_20 = "the dataset had 20 samples when the snapshot was made, it has "
OTHER_SEED = "the loader's seed was 1, it is 2 now"


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        ({"length": 20}, {"length": 21}, f"{HAD_20}21 now"),
        ({"seed": 1}, {"seed": 2}, OTHER_SEED),
        ({"shuffle": True}, {"shuffle": False}, "the loader's `shuffle` was True, it is False now"),
        ({"length": 20, "seed": 1}, {"length": 10, "seed": 2}, f"{HAD_20}10 now; {OTHER_SEED}"),
    ],
)
def test_another_order_than_the_snapshots_is_refused(saved, now, words):
    def make(length=20, **settings):
        return open_loader(Numbers(length), global_batch_size=4, **settings)

    state = make(**saved).state_dict()
    with pytest.raises(DatasetError) as caught:
        make(**now).load_state_dict(state)
    error = caught.value
    assert error.what == words
    assert error.where == "World.resume(data=...)"
    assert error.why == (
        "the order of samples would change: some samples would be lost, some seen twice"
    )
    assert error.fix == ("restore the dataset and the seed, or start over with another folder")


GIVE_ONE = "give either global_batch_size or batch_size (per rank)"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, GIVE_ONE),
        ({"global_batch_size": 8, "batch_size": 4}, GIVE_ONE),
        ({"global_batch_size": 0}, "global_batch_size is 0, below one"),
        ({"batch_size": -1}, "batch_size is -1, below one"),
        ({"batch_size": 1, "accumulate": 0}, "accumulate is 0, below one"),
        ({"batch_size": 1, "num_workers": -1}, "num_workers is -1, below zero"),
        (
            {"global_batch_size": 0, "accumulate": 0},
            "global_batch_size is 0, below one; accumulate is 0, below one",
        ),
        (
            {"global_batch_size": 11, "drop_last": True},
            "drop_last leaves no batch: 10 samples in batches of 11",
        ),
    ],
)
def test_sizes_that_divide_nothing_are_refused(settings, problem):
    with pytest.raises(UsageError) as caught:
        open_loader(Numbers(10), **settings)
    assert caught.value.what == f"the loader can't divide its samples: {problem}"
    assert caught.value.where == "World.loader"


def test_an_empty_dataset_is_refused():
    with pytest.raises(DatasetError) as caught:
        open_loader([], global_batch_size=1)
    assert (caught.value.what, caught.value.where) == ("the dataset is empty", "list")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_does_not_move_the_scripts_generator(num_workers):
    before = torch.get_rng_state()
    with world_of(1, Noisy(), global_batch_size=20, num_workers=num_workers) as loaders:
        take(loaders)
        take(loaders, 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_comparing_the_ranks_datasets_takes_no_sample_from_the_epoch(num_workers):
    compare = Compared()
    loader = open_loader(Noisy(), global_batch_size=30, num_workers=num_workers, compare=compare)
    first, second = take([loader]), take([loader])
    loader.close()
    assert [first, second] == alone(Noisy(), 2, global_batch_size=30)
    assert len(compare.values) == 1


def test_ranks_with_other_datasets_are_refused():
    compare = Compared()
    loaders = [
        open_loader(range(at, 9 + at), global_batch_size=3, compare=compare) for at in (0, 0, 1)
    ]
    assert next(iter(loaders[0])).tolist() == [0, 1, 2]
    next(iter(loaders[1]))
    with pytest.raises(DatasetError) as caught:
        next(iter(loaders[2]))
    assert caught.value.what == "the dataset of rank 2 differs from that of rank 0"


def test_closed_loaders_leave_no_process():
    loader = open_loader(Numbers(30), global_batch_size=2, num_workers=2)
    next(iter(loader))
    (iterator,) = loader._batches.iterators
    processes = list(iterator._workers)
    assert len(processes) == 2
    loader.close()
    for process in processes:
        process.join(timeout=20)
        assert not process.is_alive()
    loader.close()  # safe to repeat


# Fetching by what a sample is: the same augmentation wherever it lands, and no generator moved.


class Augmented(Dataset):
    """Draws from the generators of the named libraries; counts what was fetched."""

    def __init__(self, *libraries):
        self.libraries = libraries
        self.fetched = []

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.fetched.append(index)
        draws = {
            "torch": lambda: torch.rand(()).item(),
            "numpy": np.random.random,
            "random": random.random,
        }
        return torch.tensor([index, *(draws[name]() for name in self.libraries)]).double()


class DrawsForSome(Augmented):
    """Draws for odd samples only."""

    def __getitem__(self, index):
        noise = torch.rand(()).item() if index % 2 else 0.0
        return torch.tensor([index, noise]).double()


class ManyAtOnce(Augmented):
    """Fetches a batch in one call."""

    def __getitems__(self, indices):
        self.calls = [*getattr(self, "calls", []), list(indices)]
        return [torch.tensor([index]) for index in indices]


class Breaks(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        torch.rand(1)
        raise OSError("no such image")


def by_id(fetch, epoch, *batches):
    """Return `{id: sample}` of all batches."""
    found = {}
    for batch in batches:
        ids, samples = fetch[epoch, batch]
        found |= {int(i): tuple(sample.tolist()) for i, sample in zip(ids, samples, strict=True)}
    return found


@pytest.mark.parametrize(
    "libraries", [("torch",), ("numpy",), ("random",), ("torch", "numpy", "random")]
)
def test_a_sample_is_augmented_alike_whatever_the_batches(libraries):
    torch.manual_seed(1)
    whole = by_id(KeyedFetch(Augmented(*libraries), seed=3), 5, list(range(12)))
    torch.manual_seed(2)
    other = KeyedFetch(Augmented(*libraries), seed=3)
    assert by_id(other, 5, [11, 0, 4], [7], [10, 9, 8], [1, 2, 3, 5, 6]) == whole
    assert len({sample[1:] for sample in whole.values()}) == 12


def test_another_epoch_and_another_seed_augment_otherwise():
    samples = [
        by_id(KeyedFetch(Augmented("torch", "numpy", "random"), seed=seed), epoch, [7])[7]
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    for column in range(1, 4):
        assert len({sample[column] for sample in samples}) == 4


def test_a_dataset_that_draws_for_some_samples_is_keyed_from_the_first_draw_on():
    whole = by_id(KeyedFetch(DrawsForSome(), seed=0), 0, list(range(8)))
    apart = by_id(KeyedFetch(DrawsForSome(), seed=0), 0, [0, 2, 4], [6, 1], [3, 5, 7])
    assert apart == whole
    assert [whole[i][1] == 0.0 for i in range(4)] == [True, False, True, False]


@given(st.permutations(range(10)), st.integers(1, 10))
def test_any_cut_of_any_order_gives_the_same_samples(order, size):
    fetch = KeyedFetch(Augmented("torch"), seed=1)
    batches = [order[at : at + size] for at in range(0, 10, size)]
    expected = by_id(KeyedFetch(Augmented("torch"), seed=1), 2, list(range(10)))
    assert by_id(fetch, 2, *batches) == expected


def test_a_dataset_without_draws_is_fetched_once_a_sample():
    dataset = Augmented()
    fetch = KeyedFetch(dataset, seed=0)
    by_id(fetch, 0, [3, 1], [2])
    assert dataset.fetched == [3, 1, 2]


def test_a_dataset_that_draws_is_fetched_twice_in_its_first_batch_only():
    dataset = Augmented("numpy")
    by_id(KeyedFetch(dataset, seed=0), 0, [3, 1], [2, 4])
    assert dataset.fetched == [3, 1, 3, 1, 2, 4]


@pytest.mark.parametrize("libraries", [(), ("torch",), ("numpy",), ("random",)])
def test_fetching_moves_no_generator(libraries):
    fetch = KeyedFetch(Augmented(*libraries), seed=0)
    before = cheap_state()
    by_id(fetch, 0, [0, 1], [2])
    assert not moved_since(before)


def test_a_failing_dataset_moves_no_generator():
    before = cheap_state()
    with pytest.raises(OSError, match="no such image"):
        KeyedFetch(Breaks(), seed=0)[0, [1]]
    assert not moved_since(before)


def test_a_dataset_of_batches_is_asked_for_whole_batches():
    dataset = ManyAtOnce()
    assert by_id(KeyedFetch(dataset, seed=0), 0, [4, 2], [1]) == {4: (4,), 2: (2,), 1: (1,)}
    assert dataset.calls == [[4, 2], [1]]
    assert dataset.fetched == []


def test_tensors_are_indexed_as_a_whole_and_equal_to_one_by_one():
    dataset = TensorDataset(torch.randn(20, 3), torch.arange(20), torch.rand(20) > 0.5)
    indices = [17, 3, 3, 0]
    ids, quick = KeyedFetch(dataset, seed=0)[0, indices]
    slow_ids, slow = KeyedFetch(Subset(dataset, range(20)), seed=0)[0, indices]
    assert ids.tolist() == slow_ids.tolist() == indices
    assert type(quick) is type(slow) is list
    for a, b in zip(quick, slow, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


def test_tensors_with_a_collate_function_go_through_it():
    dataset = TensorDataset(torch.arange(6))
    _, batch = KeyedFetch(dataset, seed=0, collate=lambda samples: [s[0] * 2 for s in samples])[
        0, [1, 5]
    ]
    assert [int(value) for value in batch] == [2, 10]


def test_a_dataset_derived_from_tensors_keeps_its_own_items():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return 2 * super().__getitem__(index)[0]

    assert KeyedFetch(Doubled(torch.arange(6)), seed=0)[0, [1, 5]][1].tolist() == [2, 10]


def test_a_dataset_without_a_length_is_refused():
    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    with pytest.raises(DatasetError) as caught:
        num_samples_of(Endless())
    assert caught.value.what == "the dataset has no length"
    assert caught.value.where == "Endless"
    assert "has no len()" in caught.value.why
    assert caught.value.fix == (
        "give it __len__ and __getitem__, or derive it from IterableDataset"
    )


class Opaque:
    """Has no text of its own: `repr` gives its address."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3),
        lambda: torch.tensor(True),
        lambda: torch.ones(2, 3, dtype=torch.bfloat16).T,
        lambda: torch.empty(0),
        lambda: {"x": torch.arange(4), "y": (1, 2.5, None, "word", b"bytes")},
        lambda: [np.arange(3), np.float32(2)],
        lambda: np.array([Opaque()], dtype=object),
        lambda: (Opaque(), 1),
    ],
)
def test_the_same_values_have_one_digest(make):
    first, second = make(), make()
    assert digest(first) == digest(second) > 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(3), torch.tensor(4)),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (np.arange(3), np.arange(1, 4)),
        ({"x": 1, "y": 2}, {"x": 2, "y": 1}),
        ("a", "b"),
        ((Opaque(), 1), (Opaque(), 2)),
        (True, False),
    ],
)
def test_other_values_have_another_digest(one, other):
    assert digest(one) != digest(other)
