"""Requests to a broker: they end as the agent ended, are withdrawn with their callers, and strangers are not heard."""

import contextlib
import socket
import threading

import pytest

from torchmuster.core.net import ipc
from torchmuster.launcher.net import remote_messages
from torchmuster.launcher.net.broker import AgentBroker, AgentRequest, request_agent
from torchmuster.launcher.net.remote_messages import GONE, LeaveHost, StartNode

LIMIT_S = 60.0
REQUEST = remote_messages.encode(StartNode(place=1, host="n1")).decode()


class Broker(AgentBroker):
    """A broker that keeps what comes."""

    def __init__(self, take=lambda request: None):
        self.withdrawn, self.taken, self.requests = threading.Event(), threading.Event(), []

        def note(request):
            self.requests.append(request)
            self.taken.set()
            take(request)

        super().__init__(note, lambda _: self.withdrawn.set())


@pytest.fixture
def make_broker():
    with contextlib.ExitStack() as made:
        yield lambda **options: made.enter_context(contextlib.closing(Broker(**options)))


@contextlib.contextmanager
def calling(broker):
    """Give a connection to a broker on which nothing has been said."""
    with socket.socket(socket.AF_UNIX) as call:
        call.settimeout(LIMIT_S)
        call.connect(f"\0{broker.name}")
        yield call


def test_a_request_ends_with_the_status_and_the_reason_of_the_agent(make_broker):
    broker = make_broker(take=lambda request: request.end(-9, f"of {request.start.host}"))
    assert request_agent(broker.name, REQUEST) == (-9, "of n1")


def test_a_request_that_was_withdrawn_sends_nothing():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        request = AgentRequest(StartNode(place=1, host="n1"), ours)
        assert request.close()
        assert not request.close()
        request.end(0)  # it was withdrawn: its caller is gone
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def test_a_caller_that_goes_withdraws_its_request(make_broker):
    broker = make_broker()
    with calling(broker) as call:
        call.sendall(ipc.pack(StartNode(place=1, host="n1")))
        assert broker.taken.wait(LIMIT_S)
        assert not broker.withdrawn.is_set()
    assert broker.withdrawn.wait(LIMIT_S)


def test_a_request_that_has_ended_is_not_withdrawn(make_broker):
    broker = make_broker(take=lambda request: request.end(0))
    for _ in range(20):
        assert request_agent(broker.name, REQUEST) == (0, None)
    assert not broker.withdrawn.is_set()


def test_a_request_ends_once(make_broker):
    def twice(request):
        request.end(1)
        request.end(2)

    assert request_agent(make_broker(take=twice).name, REQUEST)[0] == 1


def test_a_broker_that_is_gone_is_said(make_broker):
    broker = make_broker()
    broker.close()
    status, why = request_agent(broker.name, REQUEST)
    assert status == GONE
    assert "can't be reached" in why


@pytest.mark.parametrize(
    "line", [b"\0\0\0\2{}", b"\0\0\0\3[1]", ipc.pack(LeaveHost()), b"{" * 70000]
)
def test_what_is_no_request_gets_no_answer(make_broker, line):
    broker = make_broker()
    with calling(broker) as call:
        try:
            call.sendall(line)
            answer = call.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
    assert answer == b""
    assert not broker.requests
