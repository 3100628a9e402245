"""The order of samples, its division and its ledger: pure arithmetic, checked for any sizes."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from torchmuster.train.batches.order import (
    Division,
    Ledger,
    Sums,
    epoch_order,
    mix,
    name_faults,
    split,
    sums_of,
)

DIVISIONS = st.builds(
    Division,
    num_samples=st.integers(1, 120),
    global_batch_size=st.integers(1, 40),
    world_size=st.integers(1, 9),
    accumulate=st.integers(1, 4),
    drop_last=st.booleans(),
)


def by_micro_batch(division, position=0):
    """Return a list of micro-batches, each the list of all ranks' shares."""
    ranks = [list(division.shares(rank, position)) for rank in range(division.world_size)]
    return list(zip(*ranks, strict=True))


def by_step(division, position=0):
    """Return a list of steps, each the list of shares in the order of their samples."""
    steps, step = [], []
    for shares in by_micro_batch(division, position):
        step += shares
        if shares[0].ends_step:
            steps.append(step)
            step = []
    assert not step, "an epoch ended in the middle of a step"
    return steps


@given(DIVISIONS)
def test_the_shares_of_all_ranks_are_each_global_batch_exactly_once(division):
    position = 0
    for step in by_step(division):
        for share in step:
            assert share.begin == position
            position = share.end
        assert {share.position for share in step} == {position}
    rest = division.num_samples % division.global_batch_size if division.drop_last else 0
    assert position == division.num_samples - rest


@given(DIVISIONS)
def test_the_shares_of_a_micro_batch_differ_by_at_most_one(division):
    for shares in by_micro_batch(division):
        counts = [share.count for share in shares]
        assert max(counts) - min(counts) <= 1


@given(DIVISIONS)
def test_the_micro_batches_of_a_step_differ_by_at_most_one(division):
    for step in by_step(division):
        counts = [share.count for share in step]
        size = division.world_size
        micro = [sum(counts[i : i + size]) for i in range(0, len(counts), size)]
        assert len(micro) == division.accumulate
        assert max(micro) - min(micro) <= 1


@given(DIVISIONS)
def test_the_weights_of_a_step_sum_to_the_world_size(division):
    for step in by_step(division):
        assert math.isclose(sum(share.weight for share in step), division.world_size)


@given(DIVISIONS)
def test_a_weighted_mean_over_shares_is_the_mean_over_the_global_batch(division):
    for step in by_step(division):
        begin, end = step[0].begin, step[-1].end
        means = [sum(range(s.begin, s.end)) / s.count if s.count else 0.0 for s in step]
        weighted = sum(m * s.weight for m, s in zip(means, step, strict=True))
        assert math.isclose(weighted / division.world_size, sum(range(begin, end)) / (end - begin))


@given(DIVISIONS, st.integers(1, 9), st.integers(1, 4))
def test_the_steps_do_not_depend_on_world_size_or_accumulation(division, world_size, accumulate):
    other = Division(
        num_samples=division.num_samples,
        global_batch_size=division.global_batch_size,
        world_size=world_size,
        accumulate=accumulate,
        drop_last=division.drop_last,
    )
    ends = [[step[0].position for step in by_step(one)] for one in (division, other)]
    assert ends[0] == ends[1]


@given(DIVISIONS)
def test_the_number_of_steps_is_the_number_of_steps_yielded(division):
    steps = by_step(division)
    assert division.steps_from(0) == len(steps)
    for done, step in enumerate(steps, start=1):
        assert division.steps_from(step[0].position) == len(steps) - done


@given(DIVISIONS, st.data())
def test_an_epoch_goes_on_from_any_position(division, data):
    position = data.draw(st.integers(0, division.num_samples))
    at = position
    for step in by_step(division, position):
        assert step[0].begin == at
        at = step[0].position
        if division.drop_last:
            assert at - step[0].begin == division.global_batch_size
    assert at == division.end_from(position)
    assert division.steps_from(position) == len(by_step(division, position))
    left = division.num_samples - at
    assert left < division.global_batch_size if division.drop_last else left == 0


@given(st.integers(0, 200), st.integers(1, 20))
def test_split_cuts_a_length_into_touching_parts_of_nearly_one_size(length, parts):
    ranges = [split(length, parts, part) for part in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    sizes = [end - begin for begin, end in ranges]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 300), st.integers(0, 2**70), st.integers(0, 1000))
def test_the_order_is_a_permutation_that_seed_and_epoch_give_again(num_samples, seed, epoch):
    torch.manual_seed(num_samples)  # the script's own generator has no part in it
    order = epoch_order(num_samples, seed=seed, epoch=epoch, shuffle=True)
    torch.manual_seed(epoch + 1)
    again = epoch_order(num_samples, seed=seed, epoch=epoch, shuffle=True)
    assert torch.equal(order, again)
    assert order.dtype == torch.int64
    assert order.sort().values.tolist() == list(range(num_samples))


def test_the_order_does_not_move_the_scripts_generator():
    before = torch.get_rng_state()
    epoch_order(100, seed=1, epoch=2, shuffle=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_epoch_and_another_seed_have_another_order():
    orders = {
        tuple(epoch_order(50, seed=seed, epoch=epoch, shuffle=True).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25  # also (seed, epoch) and (epoch, seed) differ


def test_without_shuffle_the_order_is_that_of_the_dataset():
    assert epoch_order(5, seed=3, epoch=4, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_order_of_a_seed_is_the_same_in_every_release():
    # A snapshot names seed and epoch, not the order: another order would break old snapshots.
    assert mix(0) == 3980143261097177850
    assert mix(7, 3) == 3886292919388257628
    assert epoch_order(8, seed=7, epoch=3, shuffle=True).tolist() == [4, 0, 6, 1, 7, 3, 5, 2]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=4, unique=True))
def test_mix_depends_on_the_order_of_its_words(words):
    assert mix(*words) != mix(*reversed(words))
    assert 0 <= mix(*words) < 2**63


@pytest.mark.parametrize("bit", range(64))
def test_mix_depends_on_every_bit(bit):
    assert mix(1 << bit, 5) != mix(0, 5)


# The ledger: sums that add up over any partition, and faults that are found and named.


IDS = st.lists(st.integers(0, 2**62), max_size=60)


def ids_of(ids):
    return np.array(ids, dtype=np.int64)


def sums(ids):
    return sums_of(ids_of(ids))


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
    assert name_faults(ids_of(ids), ids_of(rest)) == f"1 lost (samples {lost})"


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=60), st.data())
def test_an_id_seen_twice_is_found(ids, data):
    ids = sorted(ids)
    twice = data.draw(st.sampled_from(ids))
    seen = [*ids, twice]
    assert sums(seen) != sums(ids)
    assert name_faults(ids_of(ids), ids_of(seen)) == f"1 seen twice (samples {twice})"


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
    assert name_faults(ids_of([0, 1, 2]), ids_of([0, 1, 2, 9])) == "1 out of place (samples 9)"


def test_all_faults_are_named_and_few_of_each():
    named = name_faults(ids_of(range(10)), ids_of([8, 8, 9, 40]))
    assert named == (
        "8 lost (samples 0, 1, 2, 3, 4, ...), 1 seen twice (samples 8), 1 out of place (samples 40)"
    )


def test_without_a_fault_here_an_earlier_attempt_is_named():
    assert name_faults(ids_of([1, 2]), ids_of([2, 1])) == "what earlier attempts recorded differs"


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
