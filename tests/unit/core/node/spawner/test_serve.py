"""When a spawner takes its agent for lost."""

import os
import socket

import pytest

from torchmuster.core import proc
from torchmuster.core.node.spawner import messages, serve


class Agent:
    """What a spawner sees of its agent: how it is, and when."""

    def __init__(self, monkeypatch, *, waits, wrapped=False):
        self.state, self.now = "S", 1000.0
        monkeypatch.setattr(proc, "read_process", lambda pid: self if self.state else None)
        self.control, theirs = socket.socketpair()
        theirs.close()
        self.spawner = serve.Spawner(self.control, "entry.py")
        self.spawner.clock = lambda: self.now
        self.spawner.config = messages.BeginSpawner(
            wrapped=wrapped,
            kind="file",
            target="t.py",
            args=(),
            python=("python",),
            start="fork",
            preload=(),
            macros=False,
            lease_s=10.0,
            socket_path="/s",
        )
        self.spawner.heard_at = self.now
        serve._obey(self.spawner, messages.PingSpawner(waits=waits), [])

    def is_lost_after(self, seconds, state):
        self.now, self.state = self.now + seconds, state
        return serve._agent_is_stopped(self.spawner)

    def close(self):
        self.control.close()
        os.close(self.spawner.wakeup_r)
        os.close(self.spawner.wakeup_w)


@pytest.fixture
def agent(monkeypatch):
    """Return how an agent is made."""
    made = []

    def make(**given):
        made.append(Agent(monkeypatch, **given))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("waits", "state", "after_s", "is_lost"),
    [
        (True, "T", 3600.0, False),  # Ctrl-Z
        (True, "S", 30.0, False),  # slow
        (True, "S", 61.0, True),
        (True, "D", 11.0, True),  # a disk that hangs
        (True, None, 11.0, True),
        (False, "T", 11.0, True),  # another node goes on without it
        (False, "T", 9.0, False),
    ],
)
def test_only_an_agent_without_other_nodes_may_be_stopped_for_long(
    agent, waits, state, after_s, is_lost
):
    assert agent(waits=waits).is_lost_after(after_s, state) is is_lost


def test_an_agent_that_wakes_up_has_its_lease_again(agent):
    stopped = agent(waits=True)
    assert not stopped.is_lost_after(3600.0, "T")
    assert not stopped.is_lost_after(9.0, "S")
    assert stopped.is_lost_after(61.0, "S")


def test_who_stands_behind_a_wrapper_is_not_seen_to_be_stopped(agent):
    assert agent(waits=True, wrapped=True).is_lost_after(11.0, "T")
