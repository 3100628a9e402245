"""When a session ends, and that it says so before."""

from dataclasses import replace

import pytest

from kit.sessions import session_setup
from kit.waiting import Clock
from torchmuster.core.files.layout import RunDir
from torchmuster.multirun.server import keeper as server_time
from torchmuster.multirun.server.call import this_process
from torchmuster.multirun.server.keeper import SessionTime


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(1000.0)
    monkeypatch.setattr(server_time, "time", clock)
    return clock


@pytest.fixture
def make(clock, tmp_path):
    """Return a function that makes the clock of a door."""

    def made(*, limit_s=None, idle_s=None, place=0, client=None):
        setup = session_setup(nodes=2, idle_s=idle_s, limit_s=limit_s, client=client)
        return SessionTime(setup, RunDir(str(tmp_path)), place)

    return made


def test_a_session_without_limits_has_no_end(make):
    time = make()
    assert time.left("") == (None, "")
    assert time.look("") is None


def test_what_comes_first_ends_it(make, clock):
    time = make(limit_s=3600.0, idle_s=1800.0)
    assert time.left("") == (1800.0, "no run began for 30 min")
    clock.now += 3000
    time.used_at = clock.now  # a run has ended now
    assert time.left("") == (600.0, "its time limit of 1 h")


def test_a_session_is_not_idle_while_a_run_is_in_it(make, clock):
    time = make(idle_s=1800.0)
    clock.now += 5000
    assert time.left("a-run") == (1800.0, "no run began for 30 min")
    assert time.look("a-run") is None
    assert time.look("") == "no run began for 30 min"


def test_its_end_is_said_once_before_and_then_to_the_doors_of_the_other_nodes(make, clock, capsys):
    first, second = make(limit_s=3600.0), make(limit_s=3600.0, place=1)
    clock.now += 3299
    assert first.look("a-run") is None
    assert capsys.readouterr().out == ""
    for _ in range(2):
        clock.now += 2
        assert first.look("a-run") is None
    said = "muster: the session main ends in 5 min: its time limit of 1 h\n"
    assert capsys.readouterr().out == said
    clock.now += 297
    assert second.look("a-run") is None, "the first node's door decides"
    assert first.look("a-run") == "its time limit of 1 h"
    assert second.look("a-run") == "its time limit of 1 h"


def test_a_short_session_warns_at_half_of_its_time(make, clock, capsys):
    time = make(limit_s=20.0)
    clock.now += 9
    time.look("")
    assert capsys.readouterr().out == ""
    clock.now += 2
    time.look("")
    assert "ends in 9 s" in capsys.readouterr().out


def test_it_ends_with_the_process_that_it_was_started_for_but_not_with_one_of_another_machine(make):
    us = this_process()
    later = replace(us, start_ticks=us.start_ticks + 1)  # has our number, and is another process
    elsewhere = replace(later, machine=("other", "net"))
    assert make(client=us).look("") is None
    assert make(client=elsewhere).look("") is None
    why = make(client=later).look("a-run")
    assert why == "the command that it was started for has ended"
    assert make(client=later, place=1).look("") == why  # told by the first
