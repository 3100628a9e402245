"""Rows of ranks: the slow one stands out with its cost, filters and sorts leave what was asked for."""

import pytest

from torchmuster.launcher.ui.ranks import SORTS, choose, rank_rows, slowest
from unit.launcher.model.samples import sample_of


def test_the_slow_rank_is_named_with_what_it_costs_each_step():
    rows = rank_rows(sample_of(4, slow=3))
    worst = slowest(rows)

    assert (worst.rank, worst.part) == (3, "data")
    assert round(worst.cost_s, 3) == 0.02
    assert [round(row.wait, 2) for row in rows] == [0.4, 0.4, 0.4, 0.0]
    assert [row.needs_attention for row in rows] == [False, False, False, True]


def test_equal_ranks_have_no_slowest():
    assert slowest(rank_rows(sample_of(4))) is None
    assert slowest(rank_rows(sample_of(1))) is None


def test_of_a_plain_script_nothing_is_invented():
    row = rank_rows(sample_of(2, plain=True))[0]
    assert (row.step, row.steps_per_s, row.wait, row.cost_s) == (None, None, None, 0.0)
    assert (row.does, row.cpus, row.rss_mib, row.age_s) == ("sleeps", 0.5, 260, 1.0)


@pytest.mark.parametrize(
    ("word", "ranks"),
    [
        ("", [0, 1, 2, 3, 4, 5]),
        ("3", [3]),
        ("1-3", [1, 2, 3]),
        ("n2", [2, 3]),
        ("slow", [4]),
        ("data", [0, 1, 2, 3, 4, 5]),
        ("none of it", []),
    ],
)
def test_a_filter_takes_ranks_nodes_and_words(word, ranks):
    rows = rank_rows(sample_of(6, slow=4))
    assert [row.rank for row in choose(rows, word, "rank")] == ranks


def test_sorted_by_waiting_the_rank_that_others_wait_for_is_first():
    rows = rank_rows(sample_of(6, slow=4))
    assert choose(rows, "", "wait")[0].rank == 4
    assert choose(rows, "", "memory")[0].rank == 5


@pytest.mark.parametrize("sort", SORTS)
def test_every_sort_takes_ranks_of_which_nobody_knows(sort):
    rows = rank_rows(sample_of(2, plain=True, cpus=(), rss_mib=(), states=("?", "")))
    assert sorted(row.rank for row in choose(rows, "", sort)) == [0, 1]
