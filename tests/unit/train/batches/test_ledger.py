"""The ledger: sums that add up over any partition, and faults that are found and named."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from torchmuster.train.batches.order import Ledger, Sums, name_faults, sums_of

IDS = st.lists(st.integers(0, 2**62), max_size=60)


def array(ids):
    return np.array(ids, dtype=np.int64)


def sums(ids):
    return sums_of(array(ids))


@given(IDS, st.lists(st.integers(0, 5), min_size=60, max_size=60))
def test_sums_add_up_over_any_partition(ids, readers):
    parts = [
        [i for i, who in zip(ids, readers, strict=False) if who == reader] for reader in range(6)
    ]
    total = Sums()
    for part in parts:
        total = total + sums(part)
    assert total == sums(ids)


@given(IDS, st.randoms(use_true_random=False))
def test_sums_do_not_depend_on_the_order(ids, random):
    shuffled = random.sample(ids, len(ids))
    assert sums(shuffled) == sums(ids)


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=60), st.data())
def test_a_lost_id_is_found(ids, data):
    ids = sorted(ids)
    lost = data.draw(st.sampled_from(ids))
    rest = [i for i in ids if i != lost]
    assert sums(rest) != sums(ids)
    assert name_faults(array(ids), array(rest)) == f"1 lost (samples {lost})"


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=60), st.data())
def test_an_id_seen_twice_is_found(ids, data):
    ids = sorted(ids)
    twice = data.draw(st.sampled_from(ids))
    seen = [*ids, twice]
    assert sums(seen) != sums(ids)
    assert name_faults(array(ids), array(seen)) == f"1 seen twice (samples {twice})"


@given(
    st.sets(st.integers(0, 100), min_size=2, max_size=40),
    st.lists(st.integers(0, 100), min_size=2, max_size=40),
)
def test_the_same_number_of_other_ids_is_found(ids, others):
    ids = sorted(ids)
    others = (others * 40)[: len(ids)]
    assume(sorted(others) != ids)
    assert sums(others).count == sums(ids).count
    assert sums(others) != sums(ids)


def test_an_id_beyond_the_expected_is_out_of_place():
    assert name_faults(array([0, 1, 2]), array([0, 1, 2, 9])) == "1 out of place (samples 9)"


def test_all_faults_are_named_and_few_of_each():
    named = name_faults(array(range(10)), array([8, 8, 9, 40]))
    assert named == (
        "8 lost (samples 0, 1, 2, 3, 4, ...), 1 seen twice (samples 8), 1 out of place (samples 40)"
    )


def test_without_a_fault_here_an_earlier_attempt_is_named():
    assert name_faults(array([1, 2]), array([2, 1])) == "what earlier attempts recorded differs"


@pytest.mark.parametrize("num_batches", [1, 4096, 9000])
def test_a_ledger_has_the_sums_of_its_batches(num_batches):
    ledger = Ledger()
    ids = torch.arange(3 * num_batches)
    for batch in ids.split(3):
        ledger.add(batch)
    assert ledger.sums() == sums_of(ids.numpy())
    assert ledger.ids().tolist() == ids.tolist()
    assert ledger.sums().count == 3 * num_batches  # reading changes nothing


def test_a_ledger_goes_on_from_the_sums_of_a_snapshot():
    ledger = Ledger()
    ledger.add(torch.tensor([7]))
    ledger.start(sums([0, 1, 2]))
    ledger.add(torch.tensor([3, 4]))
    assert ledger.sums() == sums(range(5))
    assert ledger.ids().tolist() == [3, 4]


def test_an_empty_ledger_is_zero():
    ledger = Ledger()
    assert ledger.sums() == Sums(0, 0, 0)
    assert ledger.ids().tolist() == []


def test_the_sums_of_an_id_are_the_same_in_every_release():
    # They are in snapshots.
    assert sums([0, 1, 41]) == Sums(3, 7199205467012770161, 5022227603949004931)


def test_what_came_since_a_moment_can_be_taken_off_again():
    ledger = Ledger()
    ledger.start(sums_of(np.array([7, 8])))
    ledger.add(torch.tensor([1, 2, 3]))
    before, noted = ledger.sums(), ledger.noted
    ledger.add(torch.tensor([4, 5]))
    assert ledger.noted == noted + 2
    assert ledger.sums() - sums_of(ledger.ids()[noted:]) == before
