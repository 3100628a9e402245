"""What the check of a cluster runs in two pods: each stays until the other has reached it."""

import json
import socket
import threading

import pytest

from kit.ports import reserve_port
from kit.waiting import wait_until
from torchmuster.kubernetes.pods import probe

LIMIT_S = 60.0


@pytest.fixture
def port(monkeypatch):
    found = reserve_port()
    monkeypatch.setattr(probe, "PORT", found)
    return found


def calls(port):
    """Say whether somebody answers at the port of the probe."""
    try:
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as call:
            return call.recv(16) == b"muster"
    except OSError:
        return False


def test_a_pod_that_is_done_stays_until_the_other_one_has_called(port, monkeypatch):
    monkeypatch.setattr(probe.platform, "node", lambda: "check-0")
    monkeypatch.setattr(probe, "STAY_S", LIMIT_S)
    monkeypatch.setattr(probe, "reach", lambda host: {"ok": True, "words": host})
    monkeypatch.setattr(probe, "look", lambda folders: {"folders": folders})
    told = []
    monkeypatch.setattr("builtins.print", lambda line, **_: told.append(json.loads(line)))
    thread = threading.Thread(target=probe.main, args=([],))
    thread.start()
    wait_until(lambda: told, "the findings")
    assert thread.is_alive()
    wait_until(lambda: calls(port), "an answer")
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert told == [
        {"folders": [], "reached": {"check-1.check": {"ok": True, "words": "check-1.check"}}}
    ]


def test_a_pod_that_nobody_calls_goes_in_the_end(port, monkeypatch):
    monkeypatch.setattr(probe.platform, "node", lambda: "check-0")
    monkeypatch.setattr(probe, "STAY_S", 0.0)
    monkeypatch.setattr(probe, "reach", lambda host: {"ok": False, "words": ""})
    monkeypatch.setattr(probe, "look", lambda folders: {})
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    probe.main([])
