"""Keys change what is looked at; a run is cancelled only by two answers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.launcher.model.live import LiveTask
from torchmuster.report.top import (
    CancelRun,
    Known,
    Leave,
    OnScreen,
    OpenRun,
    Page,
    ShowFile,
    ShowLog,
    ShowStacks,
    ViewState,
    draw,
    press,
)
from unit.launcher.model.samples import run_of, sample_of

RUN = ViewState(page=Page.RUN, run_id="train-3f2a")
SHOWN = OnScreen(ranks=tuple(range(100)), num_rows=10)


def type_in(state, keys, shown=SHOWN):
    orders = []
    for key in keys:
        state, order = press(state, key, shown)
        orders += [order] if order is not None else []
    return state, orders


def test_cancel_is_asked_twice():
    assert type_in(RUN, ["c"])[1] == []
    assert type_in(RUN, ["c", "y"])[1] == []
    assert type_in(RUN, ["c", "y", "y"])[1] == [CancelRun()]


@pytest.mark.parametrize("keys", ["cc", "cyn", "cny", "cyq", "yy", "ycy"])
def test_anything_else_than_two_answers_cancels_nothing(keys):
    assert CancelRun() not in type_in(RUN, keys)[1]


def test_a_run_that_has_ended_is_not_cancelled():
    _state, orders = type_in(RUN, ["c", "y", "y"], replace(SHOWN, is_over=True))
    assert orders == []


def test_the_way_into_a_run_its_log_and_back():
    state, orders = type_in(ViewState(), ["down", "enter"], OnScreen(runs=("a", "b"), num_rows=5))
    assert (state.page, orders) == (Page.RUN, [OpenRun("a")])
    state, orders = type_in(state, ["j", "j", "l"])
    assert (state.page, orders) == (Page.TEXT, [ShowLog(1)])
    state, orders = type_in(state, ["q", "s"])
    assert (state.page, orders) == (Page.TEXT, [ShowStacks(1)])
    state, orders = type_in(state, ["escape", "?", "q", "q", "q"])
    assert (state.page, orders) == (Page.OVERVIEW, [OpenRun(None), Leave()])


def test_a_run_that_was_named_ends_with_q():
    assert type_in(replace(RUN, is_alone=True), ["q"])[1] == [Leave()]
    assert type_in(replace(RUN, is_alone=True), ["escape"])[1] == []


def test_a_filter_is_typed_and_taken_away():
    state, orders = type_in(RUN, ["f", *"n1x", "backspace", "enter"])
    assert (state.word, orders) == ("n1", [])
    assert type_in(state, ["escape"])[0].word == ""
    assert type_in(RUN, ["f", *"cyy", "q"])[1] == [], "letters of a filter are no keys"


def test_the_chosen_rank_stays_on_the_screen():
    state, _ = type_in(RUN, ["down"] * 15)
    assert (state.chosen_rank, state.first) == (14, 5)
    state, _ = type_in(state, ["end"])
    assert (state.chosen_rank, state.first) == (99, 90)
    state, _ = type_in(state, ["home"])
    assert (state.chosen_rank, state.first) == (0, 0)


ATTEMPTS = run_of().attempts[::-1]  # the newest first, as they are listed


def test_the_log_of_an_earlier_attempt_is_that_of_the_rank_that_ended_it():
    ended = (ATTEMPTS[0], replace(ATTEMPTS[1], cause_rank=1))
    listed = replace(SHOWN, attempts=ended, num_ranks=4)
    state, orders = type_in(RUN, ["a", "down", "enter"], listed)
    assert (state.page, state.title) == (Page.TEXT, "log of rank 1 in attempt 0")
    assert orders == [ShowLog(1, attempt=0)]
    state, orders = type_in(state, ["n", "n", "n", "p"], listed)
    assert orders[-1] == ShowLog(3, attempt=0), "behind the last comes the first"
    state, _ = type_in(state, ["q"], listed)
    assert state.page is Page.ATTEMPTS
    assert type_in(state, ["q"], listed)[0].page is Page.RUN


def test_a_task_and_a_member_open_their_own_run_and_lead_back():
    tasks = (
        LiveTask(group="0", name="lr=1", state="running", attempt=0, why="", log="/log"),
        LiveTask(
            group="1", name="lr=2", state="failed", attempt=0, why="", folder="/m/1", log="/l"
        ),
    )
    shown = OnScreen(tasks=tasks, num_rows=10)
    state, orders = type_in(RUN, ["enter"], shown)
    assert (state.page, orders) == (Page.TEXT, [ShowFile("/log")]), "it has no folder yet"
    state, orders = type_in(state, ["q", "down", "enter"], shown)
    assert (state.page, state.run_id, orders) == (Page.RUN, "/m/1", [OpenRun("/m/1")])
    state, orders = type_in(state, ["q"], replace(SHOWN, ranks=(0,)))
    assert (state.page, state.run_id, orders) == (Page.RUN, "train-3f2a", [OpenRun("train-3f2a")])
    assert type_in(state, ["down", "l"], shown)[1] == [ShowFile("/l")]


KEYS = st.sampled_from(
    [
        "up",
        "down",
        "page-up",
        "page-down",
        "home",
        "end",
        "enter",
        "escape",
        "backspace",
        "left",
        *"qjkgGlsacf/o?hynpN3 ",
    ]
)


@given(st.lists(KEYS, max_size=40), st.integers(1, 100), st.integers(1, 30), st.integers(0, 3))
def test_no_order_of_keys_breaks_the_view_or_the_picture(keys, columns, rows, num_tasks):
    task = LiveTask(group="g", name="t", state="FAILED", attempt=1, why="", folder="/f", log="/l")
    run = run_of(sample_of(9, slow=2), tasks=(task,) * num_tasks)
    known = Known(runs=[], run=run, text=["a", "b"] * 30)
    state = RUN
    for key in keys:
        frame = draw(state, known, columns, rows)
        assert len(frame.lines) == max(rows, 2)
        state, _ = press(state, key, frame.shown)
