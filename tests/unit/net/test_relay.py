"""Connections inside of a session: the same at both ends, and only to ports that are open to the other end."""

import contextlib
import socket

import pytest

from torchmuster.net.relay import Relay, RelayPort
from torchmuster.net.remote_messages import RelayOpen

LIMIT_S = 60.0


class End:
    """One end of a session; what it sends is taken by the other at once."""

    def __init__(self, first_id):
        self.relay = Relay(self, first_id)
        self.other = None

    def send(self, message, *, bulk=False):
        self.other.relay.take(message)
        return True


@pytest.fixture
def ends():
    near, far = End(1), End(2)
    near.other, far.other = far, near
    yield near, far
    near.relay.close()
    far.relay.close()


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(LIMIT_S)
        yield listening


def dial(end, port):
    """Return a connection that the other end continues at a port."""
    door = RelayPort(lambda: (end.relay, port))
    return socket.create_connection(("127.0.0.1", door.port), timeout=LIMIT_S), door


@contextlib.contextmanager
def connected(ends, server):
    """Yield both ends of a connection through which a byte has come."""
    port = server.getsockname()[1]
    ends[1].relay.ports = {port}
    call, door = dial(ends[0], port)
    with call, server.accept()[0] as served:
        served.settimeout(LIMIT_S)
        call.sendall(b"1")
        assert served.recv(1) == b"1"
        yield call, served
    door.close()


@pytest.mark.parametrize("begins", [0, 1])
def test_both_ends_can_begin_a_connection(ends, server, begins):
    port = server.getsockname()[1]
    ends[1 - begins].relay.ports = {port}
    call, door = dial(ends[begins], port)
    with call:
        call.sendall(b"question")
        served, _ = server.accept()
        with served:
            served.settimeout(LIMIT_S)
            assert served.recv(100) == b"question"
            served.sendall(b"answer")
            assert call.recv(100) == b"answer"
        assert call.recv(100) == b""
    door.close()


def test_port_that_is_not_open_to_the_other_end_is_not_called(ends, server):
    call, door = dial(ends[0], server.getsockname()[1])
    with call:
        assert call.recv(100) == b""
    server.settimeout(0.05)
    with pytest.raises(TimeoutError):
        server.accept()
    door.close()


def test_connections_end_with_the_session(ends, server):
    with connected(ends, server) as (_, served):
        ends[1].relay.close()
        assert served.recv(100) == b""


def test_connection_that_cannot_go_on_now_is_ended():
    door = RelayPort(lambda: None)
    with socket.create_connection(("127.0.0.1", door.port), timeout=LIMIT_S) as call:
        assert call.recv(100) == b""
    door.close()


def test_number_that_is_taken_is_not_given_to_another_connection(ends, server):
    with connected(ends, server):
        ends[1].relay.take(RelayOpen(call_id=1, port=server.getsockname()[1]))
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
