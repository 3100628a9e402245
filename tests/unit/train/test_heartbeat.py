"""A beat is written in place and never stops a step."""

import os
import time

import pytest

from torchmuster.model import heartbeat
from torchmuster.model.heartbeat import RankPhase
from torchmuster.train.heartbeat import Heartbeat, open_heartbeat


@pytest.fixture
def told(tmp_path):
    """Return beats and a function that reads what they say."""
    environ = {
        "TORCHMUSTER_SOCKET": str(tmp_path / "agent.sock"),
        "TORCHMUSTER_ATTEMPT": "2",
        "RANK": "5",
    }
    made = open_heartbeat(environ)
    yield made, lambda: heartbeat.unpack((tmp_path / "heartbeat-2-5").read_bytes())
    made.close()


def test_steps_and_phases_reach_the_file(told):
    made, read = told
    made.enter(RankPhase.DATA)
    made.enter(RankPhase.COMPUTE)
    made.step(41)
    with made.during(RankPhase.SAVE):
        assert read().phase is RankPhase.SAVE
    made.step(42)
    beat = read()
    assert (beat.step, beat.steps_here, beat.phase) == (42, 2, RankPhase.COMPUTE)
    assert len(beat.durations) == 1


def test_a_save_is_no_part_of_a_step(told):
    made, read = told
    made.step(1)
    with made.during(RankPhase.EVALUATE):
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
    made.step(2)
    beat = read()
    assert beat.seconds[RankPhase.EVALUATE] >= 0.05
    assert max(beat.durations) < 0.05


def test_without_an_agent_nothing_is_written():
    made = open_heartbeat({})
    made.enter(RankPhase.DATA)
    made.step(1)
    made.close()


def test_a_file_that_is_gone_or_closed_stops_no_step(told):
    made, _ = told
    os.close(made._fd)
    made.step(1)
    made.step(2)
    assert made._fd is None


def test_a_step_of_ten_milliseconds_loses_less_than_a_thousandth(told):
    made, _ = told

    def step(number):
        made.enter(RankPhase.DATA)
        made.enter(RankPhase.COMPUTE)
        made.enter(RankPhase.FORWARD)
        made.enter(RankPhase.COMPUTE)
        made.step(number)

    costs = []
    for repeat in range(30):
        began = time.perf_counter()
        for number in range(100):
            step(repeat * 100 + number)
        costs.append((time.perf_counter() - began) / 100)
    assert min(costs) < 1e-3 * 10e-3


def test_beats_without_a_file_are_mute():
    assert Heartbeat()._fd is None
