"""The record of the training library, as `muster status` shows it."""

import pytest

from kit.records import event
from kit.training import fold_training, view_training

LEDGER = {"samples": 101, "lost": 0, "twice": 0, "whole": True}


def epoch(number, step, loss, **ledger):
    told = {"elapsed_s": 1.5, "values": {"loss": loss}, "ledger": LEDGER | ledger}
    return {"event": "epoch", "epoch": number, "step": step, **told}


def test_no_record_is_no_training():
    assert view_training([]) is None


def test_the_last_step_save_and_metrics_count():
    view = view_training(
        [
            {"event": "resumed", "step": 0},
            {"event": "metrics", "step": 50, "values": {"loss": 2.0}},
            {"event": "save", "step": 60},
            {"event": "saved", "step": 62, "saved": 60},
            {"event": "save", "step": 90},
            {"event": "metrics", "step": 100, "values": {"loss": 1.0}},
        ]
    )
    assert (view.step, view.saved_step, view.values) == (100, 60, {"loss": 1.0})


def test_a_run_that_begins_with_a_snapshot_has_it_saved():
    assert view_training([{"event": "resumed", "step": 60}]).saved_step == 60
    assert view_training([{"event": "resumed", "step": 0}]).saved_step is None


def test_an_epoch_that_was_done_again_is_shown_once():
    view = view_training([epoch(0, 8, 3.0), epoch(1, 16, 2.0), epoch(1, 16, 2.5)])
    assert [(e.epoch, e.values["loss"]) for e in view.epochs] == [(0, 3.0), (1, 2.5)]
    assert view.epochs[0].samples == 101


def test_an_epoch_that_was_left_early_says_so():
    view = view_training([epoch(0, 4, 3.0, samples=52, whole=False)])
    assert not view.epochs[0].is_whole


def test_an_epoch_without_our_loader_has_no_ledger():
    without = epoch(0, 4, 3.0) | {"ledger": {}}
    assert view_training([without]).epochs[0].samples is None


@pytest.mark.parametrize(
    "damaged",
    [
        {"event": "metrics", "step": float("inf"), "values": {}},
        {"event": "metrics", "step": 3, "values": None},
        {"event": "metrics", "step": 3, "values": {"loss": {}}},
        {"event": "saved"},
        {"event": "saved", "saved": {}},
        {"event": "epoch", "epoch": None, "step": 1, "elapsed_s": 1.0},
        {"event": "epoch", "epoch": 1, "step": 1, "elapsed_s": 1.0, "ledger": "x"},
        {"event": [], "step": "x"},
    ],
)
def test_a_line_of_another_version_is_left_out_and_the_others_count(damaged):
    good = [
        {"event": "metrics", "step": 7, "values": {"loss": 0.5}},
        {"event": "saved", "step": 7, "saved": 7},
    ]
    found = view_training([damaged, *good])
    assert (found.step, found.saved_step, found.values) == (7, 7, {"loss": 0.5})
    assert found.epochs == ()
    assert view_training([*good, damaged]).saved_step == 7


def test_a_line_before_the_library_began_is_no_start_of_it():
    began = [event(10, "code", files=[]), event(10, "resumed", step=400)]
    lines = [*began, event(10, "metrics", step=450, values={"loss": 1.0})]
    assert [(one.step, one.last_step) for one in fold_training(lines).starts] == [(400, 450)]
    assert [(one.step, one.last_step) for one in fold_training(lines[2:]).starts] == [(0, 450)]
