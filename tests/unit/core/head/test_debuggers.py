"""Which ranks somebody debugs."""

import pytest

from torchmuster.core.head.training_policy import Debuggers
from torchmuster.core.net.messages import Debugger


@pytest.fixture
def debuggers():
    return Debuggers()


def test_a_rank_that_waits_is_told_to_the_client_and_held(debuggers):
    assert debuggers.take(Debugger(rank=3, active=True, waits="debugpy", folder="/code"))
    assert debuggers == {3}


def test_of_ranks_that_failed_only_the_first_is_looked_at(debuggers):
    assert debuggers.take(Debugger(rank=1, active=True, waits="pdb", folder="/code"))
    assert not debuggers.take(Debugger(rank=0, active=True, waits="pdb", folder="/code"))
    assert not debuggers.take(Debugger(rank=1, active=True))
    assert debuggers == {1}
    debuggers.take(Debugger(rank=1, active=False))
    assert not debuggers


def test_who_fails_because_the_first_is_gone_is_not_looked_at_before_the_next_attempt(debuggers):
    told = Debugger(rank=0, active=True, waits="pdb", folder="/code")
    debuggers.take(Debugger(rank=1, active=True, waits="pdb", folder="/code"))
    debuggers.take(Debugger(rank=1, active=False))
    assert not debuggers.take(told)
    assert not debuggers
    debuggers.clear()
    assert debuggers.take(told)


def test_a_debugger_of_the_script_is_held_and_needs_nobody(debuggers):
    assert not debuggers.take(Debugger(rank=0, active=True))
    assert debuggers == {0}


def test_a_rank_that_stops_and_goes_on_can_stop_again_and_fail(debuggers):
    stops = Debugger(rank=1, active=True, waits="pdb:stops", folder="/code")
    for told in (stops, stops, Debugger(rank=1, active=True, waits="pdb", folder="/code")):
        assert debuggers.take(told)
        assert debuggers == {1}
        debuggers.take(Debugger(rank=1, active=False))
        assert not debuggers
