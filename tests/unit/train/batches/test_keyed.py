"""Fetching by what a sample is: the same augmentation wherever it lands, and no generator moved."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from torchmuster.train.batches.loader import DatasetError, KeyedFetch, digest, num_samples_of
from torchmuster.train.rng import cheap_state, moved_since


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


def test_an_empty_dataset_is_refused():
    with pytest.raises(DatasetError) as caught:
        num_samples_of([])
    assert (caught.value.what, caught.value.where) == ("the dataset is empty", "list")


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
