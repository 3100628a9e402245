"""A rank is slow by its own work: what it waits for others does not count."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model.progress import RankPhase
from torchmuster.launcher.head.hang_watch import (
    StepParts,
    Stragglers,
    median_without,
    waits_s,
)
from torchmuster.launcher.model.progress import RankProgress


def words(rank, steps, data_s, forward_s, step_s, aside_s=0.0):
    seconds = [0.0] * len(RankPhase)
    seconds[RankPhase.DATA], seconds[RankPhase.FORWARD] = data_s * steps, forward_s * steps
    seconds[RankPhase.EVALUATE] = aside_s
    return RankProgress(
        rank=rank,
        state="S",
        active_s=0.0,
        beat_age_s=0.0,
        steps_here=steps + 10,
        step_at=100.0 + step_s * steps + aside_s,
        seconds=tuple(seconds),
    )


def play(own, num_windows=4, window=30, step_s=None):
    """Return what is told when ranks need (data, forward) seconds; all steps take as long as the slowest."""
    stragglers = Stragglers(nodes={rank: f"n{rank + 1}" for rank in range(len(own))})
    step_s = step_s or max(sum(one) for one in own) + 0.02
    told = []
    for number in range(num_windows + 1):
        ranks = [
            words(rank, number * window, data, forward, step_s)
            for rank, (data, forward) in enumerate(own)
        ]
        told += stragglers.take(10.0 * number, ranks)
    return told


def test_a_rank_with_slow_data_is_named_once_with_numbers():
    (one,) = play([(0.02, 0.02), (0.02, 0.02), (0.02, 0.02), (0.08, 0.02)])
    assert one.tell() == (
        "rank 3 on n4 is 100 % slower than the others for 60 steps:"
        " data takes 80 ms of 120 ms (others 20)"
    )


def test_a_rank_with_slow_computation_is_named():
    (one,) = play([(0.01, 0.03), (0.01, 0.06), (0.01, 0.03)])
    assert (one.rank, one.part) == (1, "forward")


def test_a_rank_that_is_slow_in_its_backward_is_named_where_waits_are_measured():
    stragglers = Stragglers(nodes={0: "n1", 1: "n2", 2: "n3"})
    told = []
    for number in range(5):
        steps = number * 30
        ranks = [words(rank, steps, 0.01, 0.01, 0.1) for rank in range(3)]
        for rank, waited_s in enumerate((0.051, 0.001, 0.05)):
            ranks[rank] = waiting(ranks[rank], waited_s * steps)
        told += stragglers.take(10.0 * number, ranks)
    (one,) = told
    assert one.tell() == (
        "rank 1 on n2 is 98 % slower than the others for 60 steps:"
        " what follows its forward takes 80 ms of 100 ms (others 31)"
    )


def test_where_one_rank_does_not_measure_its_waits_the_shortest_rest_is_compared():
    parts = {rank: StepParts(0.1, 0.01, 0.01, waited) for rank, waited in enumerate((0.05, 0.0))}
    assert waits_s(parts) == {0: 0.0, 1: 0.0}
    assert waits_s({0: parts[0]}) == {0: 0.0}


def waiting(one, seconds):
    told = list(one.seconds)
    told[RankPhase.WAIT] = seconds
    return replace(one, seconds=tuple(told))


def test_ranks_within_twenty_percent_are_not():
    assert play([(0.02, 0.1), (0.02, 0.11), (0.02, 0.105)]) == []


def test_one_slow_window_is_not_enough():
    assert play([(0.02, 0.02), (0.08, 0.02)], num_windows=1) == []


def test_differences_of_less_than_two_milliseconds_are_noise():
    assert play([(0.0001, 0.0001), (0.0015, 0.0001)], step_s=0.002) == []


def test_a_straggler_is_told_again_after_ten_minutes():
    assert len(play([(0.02, 0.02), (0.08, 0.02)], num_windows=70)) == 2


def test_evaluation_does_not_make_a_step_longer():
    stragglers = Stragglers(nodes={0: "n1", 1: "n1"})
    for number in range(5):
        aside_s = 100.0 * number
        ranks = [
            words(0, 30 * number, 0.01, 0.01, 0.05, aside_s),
            words(1, 30 * number, 0.01, 0.01, 0.05),
        ]
        assert stragglers.take(10.0 * number, ranks) == []


@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)), min_size=2, max_size=6),
)
def test_nobody_is_named_who_is_faster_than_the_median(own):
    told = play(own)
    total = sorted(sum(one) for one in own)
    middle = total[(len(total) - 1) // 2]
    assert all(sum(own[one.rank]) >= middle for one in told)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=9), st.data())
def test_the_median_of_the_others_leaves_one_out(values, data):
    from statistics import median

    at = data.draw(st.integers(0, len(values) - 1))
    others = values[:at] + values[at + 1 :]
    assert median_without(sorted(values), values[at]) == pytest.approx(median(others))
