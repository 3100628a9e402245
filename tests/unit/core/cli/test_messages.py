import re

import pytest

from kit.values import run_result
from torchmuster.core.cli.messages import is_worth_a_report, paint_report, summary
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import render_report
from torchmuster.core.model.verdict import Report

REPORT = Report(error="it broke", at="a.py:1", because=("first", "second"), hint="mend it")


def result(**given):
    return run_result(**{"elapsed_s": 12.34, **given})


def test_colour_changes_no_letter_of_a_report():
    plain, painted = (paint_report(REPORT, colour=colour) for colour in (False, True))

    assert plain == render_report(REPORT) != painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "succeeded after 12.3 s (1 attempt)"),
        (
            {"attempts": 3, "lost_s": 0.51},
            "succeeded after 12.3 s (3 attempts, 510 ms between them)",
        ),
        (
            {"state": RunState.FAILED, "logs_lost_lines": 7},
            "failed after 12.3 s (1 attempt, 7 log lines lost)",
        ),
        ({"trained_step": 125, "saved_step": 125}, "succeeded after 12.3 s (1 attempt)"),
        (
            {"trained_step": 9, "saved_step": None},
            "succeeded after 12.3 s (1 attempt); step 9, its end, is not saved: there is no snapshot",
        ),
    ],
)
def test_the_last_line_of_a_run_says_how_it_went(given, text):
    assert summary(result(**given)) == text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"elapsed_s": 0.0}, "failed: it never started"),
        ({"elapsed_s": 600.04}, "failed after 10 min: it never started"),
        ({"elapsed_s": 0.0, "state": RunState.CANCELLED}, "cancelled: it never started"),
        # e.g. checks alone, as asked for
        ({"state": RunState.SUCCEEDED}, "succeeded after 12.3 s (0 attempts)"),
    ],
)
def test_a_run_without_an_attempt_never_started(given, text):
    assert summary(result(**{"state": RunState.FAILED, "attempts": 0, **given})) == text


def test_a_run_that_was_no_success_ends_with_how_it_goes_on():
    stopped = result(state=RunState.CANCELLED)
    assert summary(stopped, "saved at step 125") == (
        "cancelled after 12.3 s (1 attempt); saved at step 125"
    )


def test_only_what_failed_has_more_to_tell():
    assert is_worth_a_report(result(state=RunState.FAILED, report=REPORT))
    assert not is_worth_a_report(result(state=RunState.FAILED))
    assert not is_worth_a_report(result(report=REPORT))
