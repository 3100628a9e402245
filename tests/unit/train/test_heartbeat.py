"""A beat is written in place and never stops a step."""

import os
from types import SimpleNamespace

import pytest

from kit.waiting import Clock
from torchmuster.core.model import progress as heartbeat
from torchmuster.core.model.progress import RankPhase
from torchmuster.train import heartbeat as beats
from torchmuster.train.heartbeat import Heartbeat, open_heartbeat


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(beats, "time", made)
    return made


@pytest.fixture
def told(tmp_path, clock):
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


def test_a_save_is_no_part_of_a_step(told, clock):
    made, read = told
    made.step(1)
    clock.now += 0.01
    with made.during(RankPhase.EVALUATE):
        clock.now += 5.0
    made.step(2)
    beat = read()
    assert beat.seconds[RankPhase.EVALUATE] == pytest.approx(5.0)
    assert beat.durations == pytest.approx((0.01,), rel=1e-3)


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


def test_a_short_step_costs_two_writes_in_place_and_no_other_system_call(told, clock, monkeypatch):
    made, _ = told
    made.step(1)
    sizes = []
    system = SimpleNamespace(pwrite=lambda fd, data, offset: sizes.append(len(data)))
    with monkeypatch.context() as patch:
        patch.setattr(beats, "os", system)  # which has no other call
        for number in range(2, 5):
            for phase in (RankPhase.DATA, RankPhase.COMPUTE, RankPhase.FORWARD, RankPhase.COMPUTE):
                made.enter(phase)
                clock.now += 0.0025
            made.step(number)
    duration, record = sizes[:2]
    assert duration < record < heartbeat.PAGE_BYTES
    assert sizes == [duration, record] * 3


def test_beats_without_a_file_are_mute():
    assert Heartbeat()._fd is None
