"""A stop has a cause: who asked for it, and what the run's end says of it."""

import signal

import pytest

from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import StopCause, better_cause, cause_of_stop, end_by_stop

TERM = signal.SIGTERM


@pytest.mark.parametrize(
    ("signum", "facts", "cause"),
    [
        (signal.SIGINT, {}, StopCause.USER),
        (TERM, {"cancelled": True, "time_is_over": True}, StopCause.USER),
        (TERM, {"time_is_over": True, "node_is_lost": True}, StopCause.TIME),
        (TERM, {"node_is_lost": True}, StopCause.NODE_LOST),
        (TERM, {}, StopCause.OUTSIDE),
        (signal.SIGHUP, {}, StopCause.TERMINAL),
    ],
)
def test_who_asked_for_a_stop(signum, facts, cause):
    assert cause_of_stop(signum, **facts) is cause


def test_the_owner_s_word_beats_an_agent_s_that_came_before():
    assert better_cause(StopCause.OUTSIDE, StopCause.TIME) is StopCause.TIME
    assert better_cause(StopCause.USER, StopCause.OUTSIDE) is StopCause.USER


def end(cause, *, saved=False, lost=None):
    return end_by_stop(cause, TERM, "muster restart r", saved=saved, lost=lost or {})


def test_the_end_of_the_time_is_not_cancelled_by_anybody():
    state, code, report = end(StopCause.TIME)
    assert (state, code) == (RunState.TIMED_OUT, 143)
    assert report.error == "the time limit of the job was reached: the run was stopped with SIGTERM"


def test_what_was_saved_can_be_resumed():
    state, code, report = end(StopCause.TIME, saved=True)
    assert (state, code) == (RunState.PREEMPTED, 75)
    assert report.because == ("the end of the job's time asked to stop with SIGTERM",)


def test_a_job_that_is_ended_while_a_node_is_lost_names_the_node():
    state, code, report = end(StopCause.NODE_LOST, lost={"n2": "no answer for 15 s"})
    assert (state, code) == (RunState.PREEMPTED, 75)
    assert report.error == "n2 was lost, and the job was stopped with SIGTERM then"
    assert report.because == ("n2: no answer for 15 s",)


def test_who_cancelled_it_is_told_so():
    state, code, report = end(StopCause.USER)
    assert (state, code, report.because) == (RunState.CANCELLED, 143, ("you cancelled it",))


@pytest.mark.parametrize(
    ("signum", "code", "why"),
    [(signal.SIGINT, 130, "you cancelled it"), (signal.SIGHUP, 129, "the terminal was closed")],
)
def test_ctrl_c_and_a_closed_terminal_cancel_also_what_was_saved(signum, code, why):
    """A shell loop that runs what was preempted again must not take it for that."""
    cause = cause_of_stop(signum)
    state, exit_code, report = end_by_stop(cause, signum, "muster restart r", saved=True, lost={})
    assert (state, exit_code, report.because) == (RunState.CANCELLED, code, (why,))
    assert report.hint.startswith("muster restart r continues from the last save")
    assert ("--detach" in report.hint) == (signum == signal.SIGHUP)
