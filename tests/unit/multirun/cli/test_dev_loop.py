"""What `muster dev` does next: one run at a time, the newest wish wins, and a wish to leave wins over all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.multirun.cli.dev import Act, DevLoop, name_for, status_of


def test_a_save_during_a_run_cancels_it_and_the_new_code_starts():
    loop = DevLoop()
    loop.start()

    assert loop.saved() is Act.CANCEL
    assert loop.saved() is None  # it is being ended already
    assert loop.ended(143) is Act.START


def test_a_save_after_a_run_starts_the_next_at_once():
    loop = DevLoop()
    loop.start()

    assert loop.ended(0) is None
    assert loop.saved() is Act.START


@pytest.mark.parametrize("keys", ["\n", "\r", "r", "xr"])
def test_a_key_runs_again(keys):
    assert DevLoop().pressed(keys) is Act.START


def test_until_error_goes_on_until_a_run_fails_and_then_waits():
    loop = DevLoop(until_error=True)
    loop.start()

    assert loop.ended(0) is Act.START
    loop.start()
    assert loop.ended(1) is None
    assert loop.saved() is Act.START


def test_who_leaves_during_a_run_ends_it_first_and_no_later_save_keeps_him():
    loop = DevLoop(until_error=True)
    loop.start()

    assert loop.pressed("q") is Act.CANCEL
    assert loop.saved() is None
    assert loop.ended(0) is Act.QUIT


@given(st.lists(st.sampled_from(["saved", "r", "q", "x", "ended", "failed"]), max_size=30))
def test_no_run_begins_beside_another_and_every_wish_is_answered(words):
    loop = DevLoop()
    loop.start()
    runs, cancelled, leaves = 1, False, False
    for word in words:
        is_end = word in ("ended", "failed")
        if is_end and not runs:
            continue
        if is_end:
            act = loop.ended(0 if word == "ended" else 1)
            assert act is not None or not cancelled
            runs, cancelled = 0, False
        else:
            act = loop.saved() if word == "saved" else loop.pressed(word)
        leaves = leaves or word == "q"
        if act is Act.QUIT:
            assert leaves
            assert not runs
            return
        if act is Act.CANCEL:
            assert runs
            cancelled = True
        if act is Act.START:
            assert not runs
            assert not leaves
            loop.start()
            runs = 1


def test_the_line_below_says_what_was_saved_how_it_went_and_what_is_awaited():
    line = status_of(0, 0.42, ("train.py", "model.py"), "12:03:11", has_keys=False)
    assert line == "saved train.py and 1 more 12:03:11; ran 420 ms; waiting for a change"

    assert status_of(1, 250.0, (), "", has_keys=True) == (
        "failed in 4 min 10 s (exit code 1); waiting for a change (Enter: again, q: quit)"
    )


def test_a_session_has_the_name_of_its_folder_unless_another_folder_has_taken_it():
    assert name_for("/home/ada/my project", {}) == "dev-my-project"
    assert name_for("/", {}) == "dev-root"
    assert name_for("/a/x", {"dev-x": "/a/x"}) == "dev-x"
    assert name_for("/b/x", {"dev-x": "/a/x", "main": "/b/x"}) == "dev-x-2"
