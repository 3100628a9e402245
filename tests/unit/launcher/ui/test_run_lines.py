"""Rows of ranks, of which the slow one stands out with its cost, and the status of a run in one or two rows that fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.launcher.model.live import LiveTask, ProgressBar
from torchmuster.launcher.ui.ranks import SORTS, choose, rank_rows, slowest
from torchmuster.launcher.ui.run_lines import status_rows
from unit.launcher.model.samples import run_of, sample_of


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


def test_two_rows_say_how_long_still_and_who_is_slow():
    run = run_of(sample_of(4, slow=3, gpu_percent=(90, 90, 90, 30)))
    assert status_rows(run, 140, 2) == [
        (
            "train-3f2a running 13 min | step 350/500 20 steps/s 8 s left | loss 0.1312 | saved 300 12 s ago"
            " | job ends in 1 h 20 min"
        ),
        (
            "4 ranks on 2 nodes | slowest rank 3 on n2 +20 ms in data | waits 40% | CPU 2.0 | MEM 1.0G"
            " | GPU 75% | attempt 1: after SIGKILL"
        ),
    ]


def test_what_does_not_fit_is_left_out_whole():
    run = run_of(sample_of(4))
    assert status_rows(run, 80, 1) == [
        "train-3f2a running 13 min | step 350/500 20 steps/s 8 s left | loss 0.1312"
    ]


def test_a_wait_is_the_status():
    waiting = run_of(state="waiting", waits="waiting for 1 of 2 nodes: n2 (not here); 42 s left")
    assert "waiting for 1 of 2 nodes" in status_rows(waiting, 100, 1)[0]


def test_a_plain_script_and_a_workflow():
    bar = ProgressBar(done=5, total=10, speed="2it/s", left="00:02")
    plain = run_of(sample_of(2, plain=True), training=None, bar=bar, ends_at=None)
    assert status_rows(plain, 100, 1) == ["train-3f2a running 13 min | bar 5/10 2it/s | 00:02 left"]
    tasks = tuple(
        LiveTask(group="g", name=str(n), state=state, attempt=0, why="")
        for n, state in enumerate(["RUNNING", "COMPLETED", "RUNNING"])
    )
    assert "3 tasks: 2 RUNNING, 1 COMPLETED" in status_rows(run_of(tasks=tasks), 100, 1)[0]


def test_a_run_that_is_over_has_no_status():
    assert status_rows(run_of(is_final=True, state="succeeded"), 80, 2) == []


@pytest.mark.parametrize("num_rows", [1, 2])
@given(columns=st.integers(0, 200))
def test_rows_are_shorter_than_the_terminal(num_rows, columns):
    rows = status_rows(run_of(sample_of(4, slow=1)), columns, num_rows)
    assert len(rows) <= num_rows
    assert all(len(row) < max(columns, 1) for row in rows)
