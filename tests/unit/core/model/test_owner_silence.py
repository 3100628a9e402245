"""Whether the head still answers: silence, stops, and what follows. The time is an argument."""

import signal

import pytest

from torchmuster.core.model.lease import SILENT_S, SLOW_S, OwnClock
from torchmuster.core.model.owner_policy import (
    FAR_SILENT_S,
    FIRST_WORD_S,
    GiveUp,
    OwnerPolicy,
    RestartBudget,
    Say,
)
from torchmuster.core.model.verdict import AT_ONCE

GRACE_S = 30.0


class World:
    def __init__(self, grace_s=GRACE_S):
        self.now = 1000.0
        self.clock = OwnClock(lambda: self.now)
        self.policy = OwnerPolicy("n1", RestartBudget(0), grace_s=grace_s)
        self.policy.begin(self.clock())
        self.policy.hear(self.clock())
        self.said = []

    def pass_time(self, seconds, state="S", *, answers=False):
        """Look once a second; return when the head was given up, and why."""
        for second in range(1, round(seconds) + 1):
            self.now += 1.0
            if answers:
                self.policy.hear(self.clock())
            match self.policy.look(self.clock(), state):
                case Say(text=text):
                    self.said.append(text)
                case GiveUp(why=why):
                    return second, why
        return None

    def stop(self, signum=signal.SIGINT):
        assert self.policy.stops.ask(signum, self.now + len(self.said))
        self.now += 0.6  # less than a look


@pytest.fixture
def world():
    return World()


def test_a_head_that_answers_is_never_spoken_of(world):
    assert world.pass_time(3600, answers=True) is None
    assert world.said == []


@pytest.mark.parametrize("state", ["T", "t", "D"])
def test_a_head_that_stands_still_is_named_after_5_s_and_given_up_after_15(world, state):
    second, why = world.pass_time(60, state)
    assert SILENT_S < second <= SILENT_S + 1
    assert why == "it was silent for 16 s and was killed"
    assert world.said[0] == ("the head of n1 has been silent for 5 s; after 15 s it counts as lost")


def test_a_head_that_waits_for_a_processor_is_waited_for(world):
    assert world.pass_time(SLOW_S) is None
    assert "its process runs, so muster waits for it" in world.said[0]
    assert world.pass_time(2) is not None


def test_a_head_on_another_machine_may_be_silent_as_long_as_its_connection(world):
    second, _ = world.pass_time(60, None)
    assert FAR_SILENT_S < second <= FAR_SILENT_S + 1


def test_a_head_that_starts_has_more_time(world):
    world.policy.begin(world.clock())
    second, _ = world.pass_time(60, "T")
    assert FIRST_WORD_S < second <= FIRST_WORD_S + 1


def test_a_client_that_stood_still_itself_does_not_take_the_head_for_dead(world):
    world.now += 3600.0
    assert world.pass_time(1, "S") is None
    assert world.pass_time(60, "S", answers=True) is None
    assert world.said == []


def test_a_stop_does_not_wait_for_a_head_that_stands_still(world):
    world.stop()
    second, _ = world.pass_time(60, "T")
    assert second <= 6


def test_one_stop_has_a_limit_behind_the_grace(world):
    world.stop()
    second, why = world.pass_time(600, answers=True)
    assert GRACE_S < second < GRACE_S + 60
    assert why == "it did not end in time when it was asked to stop, and was killed"


def test_a_stop_without_a_grace_of_ours_has_no_limit_while_the_head_answers():
    world = World(grace_s=None)
    world.stop()
    world.stop()
    assert world.pass_time(3600, answers=True) is None
    second, _ = world.pass_time(60, "T")
    assert second == 16, "as without a stop"


def test_the_second_stop_is_final(world):
    world.stop()
    world.stop()
    second, _ = world.pass_time(60, answers=True)
    assert second <= 5


def test_the_second_stop_of_a_silent_head_kills_at_once(world):
    world.pass_time(6, "S")
    world.stop()
    world.stop()
    second, _ = world.pass_time(60, "S")
    assert second == 1


def test_one_request_for_an_end_at_once_leaves_the_head_its_time(world):
    world.stop(AT_ONCE)
    second, _ = world.pass_time(600, answers=True)
    assert second > GRACE_S
