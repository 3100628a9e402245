"""Connections inside of a session: the same at both ends, and only to ports that are open to the other end."""

import contextlib
import random
import socket
import threading
import time

import pytest

from torchmuster.launcher.net.relay import Relay, RelayPort
from torchmuster.launcher.net.remote_messages import RelayData, RelayOpen

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


@contextlib.contextmanager
def dialled(end, port):
    """Yield a connection that the other end continues at a port."""
    door = RelayPort(lambda: (end.relay, port))
    with socket.create_connection(("127.0.0.1", door.port), timeout=LIMIT_S) as call:
        yield call
    door.close()


@contextlib.contextmanager
def connected(ends, server, begins=0):
    """Yield both ends of a connection through which a byte has come."""
    port = server.getsockname()[1]
    ends[1 - begins].relay.ports = {port}
    with dialled(ends[begins], port) as call:
        call.sendall(b"1")
        with server.accept()[0] as served:
            served.settimeout(LIMIT_S)
            assert served.recv(1) == b"1"
            yield call, served


@pytest.mark.parametrize("begins", [0, 1])
def test_both_ends_can_begin_a_connection(ends, server, begins):
    with connected(ends, server, begins) as (call, served):
        call.sendall(b"question")
        assert served.recv(100) == b"question"
        served.sendall(b"answer")
        assert call.recv(100) == b"answer"
        served.close()
        assert call.recv(100) == b""


def test_port_that_is_not_open_to_the_other_end_is_not_called(ends, server):
    with dialled(ends[0], server.getsockname()[1]) as call:
        assert call.recv(100) == b""
    server.settimeout(0.05)
    with pytest.raises(TimeoutError):
        server.accept()


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


def test_a_program_that_reads_nothing_holds_up_no_other_and_loses_nothing(ends, server):
    data = random.Random(1).randbytes(64 << 20)
    with connected(ends, server) as (call, served), connected(ends, server) as (other, far):
        sending = threading.Thread(target=call.sendall, args=(data,))
        sending.start()
        sending.join(6.0)
        assert sending.is_alive()  # more than a window, and nobody reads
        for _ in range(100):
            other.sendall(b"?")
            assert far.recv(1) == b"?"
        got = bytearray()
        while len(got) < len(data):
            got += served.recv(1 << 20)
        assert bytes(got) == data
        sending.join(LIMIT_S)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_said_before_an_end_arrives_whatever_is_read_when(ends, server, seed):
    draw = random.Random(seed)
    data = draw.randbytes(draw.randint(0, 4 << 20))
    with connected(ends, server) as (call, served):

        def say():
            with call:
                call.sendall(data)

        saying = threading.Thread(target=say)
        saying.start()
        got = bytearray()
        while len(got) < len(data):
            if draw.random() < 0.1:
                time.sleep(0.01)
            piece = served.recv(draw.choice([1000, 1 << 16, 1 << 20]))
            assert piece, len(got)
            got += piece
        assert bytes(got) == data
        assert served.recv(1) == b""
        saying.join(LIMIT_S)


def test_more_than_a_window_ends_the_connection_alone(ends, server):
    with connected(ends, server) as (_, served), connected(ends, server) as (other, far):
        ends[1].relay.take(RelayData(call_id=1, data=bytes(8 << 20)))
        ends[1].relay.take(RelayData(call_id=1, data=bytes(8 << 20)))
        with contextlib.suppress(ConnectionError):
            while served.recv(1 << 20):
                continue
        other.sendall(b"!")
        assert far.recv(1) == b"!"


def test_an_end_at_one_side_frees_a_program_that_writes_at_the_other(ends, server):
    with connected(ends, server) as (call, served):
        call.sendall(b"unread")
        call.close()
        with contextlib.suppress(ConnectionError):
            served.sendall(bytes(64 << 20))  # more than a window, to nobody: it must not stand
