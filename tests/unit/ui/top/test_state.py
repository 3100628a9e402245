"""Keys change what is looked at; a run is cancelled only by two answers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.ui.top.frame import Known, draw
from torchmuster.ui.top.state import (
    CancelRun,
    Leave,
    OnScreen,
    OpenRun,
    Page,
    ShowLog,
    ShowStacks,
    ViewState,
    press,
)
from unit.ui.top.samples import run_of, sample_of

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
        *"qjkgGlsacf/o?hynN3 ",
    ]
)


@given(st.lists(KEYS, max_size=40), st.integers(1, 100), st.integers(1, 30))
def test_no_order_of_keys_breaks_the_view_or_the_picture(keys, columns, rows):
    known = Known(runs=[], run=run_of(sample_of(9, slow=2)), text=["a", "b"] * 30)
    state = RUN
    for key in keys:
        frame = draw(state, known, columns, rows)
        assert len(frame.lines) == max(rows, 2)
        state, _ = press(state, key, frame.shown)
