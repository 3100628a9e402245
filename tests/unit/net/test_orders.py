"""Orders at a desk: they end as they ended, are withdrawn with their callers, and strangers are not heard."""

import socket
import threading

import pytest

from torchmuster.net.orders import GONE, OrderDesk, place_order

LIMIT_S = 10.0


class Desk:
    """A desk that keeps what comes."""

    def __init__(self, take=lambda order: None):
        self.withdrawn = threading.Event()
        self.taken = threading.Event()
        self.orders = []
        self._do = take
        self.desk = OrderDesk(self._take, lambda _: self.withdrawn.set())

    def _take(self, order):
        self.orders.append(order)
        self.taken.set()
        self._do(order)


@pytest.fixture
def make_desk():
    made = []

    def make(**options):
        made.append(Desk(**options))
        return made[-1]

    yield make
    for one in made:
        one.desk.close()


def test_an_order_ends_with_the_status_and_the_reason_that_the_desk_gives(make_desk):
    desk = make_desk(take=lambda order: order.end(-9, f"of {order.request['host']}"))
    assert place_order(desk.desk.name, {"host": "n1"}) == (-9, "of n1")


def test_a_caller_that_goes_withdraws_its_order(make_desk):
    desk = make_desk()
    with socket.socket(socket.AF_UNIX) as call:
        call.connect(f"\0{desk.desk.name}")
        call.sendall(b'{"host": "n1"}\n')
        assert desk.taken.wait(LIMIT_S)
        assert not desk.withdrawn.is_set()
    assert desk.withdrawn.wait(LIMIT_S)


def test_an_order_that_has_ended_is_not_withdrawn(make_desk):
    desk = make_desk(take=lambda order: order.end(0))
    for _ in range(20):
        assert place_order(desk.desk.name, {}) == (0, None)
    assert not desk.withdrawn.is_set()


def test_an_order_ends_once(make_desk):
    def twice(order):
        order.end(1)
        order.end(2)

    assert place_order(make_desk(take=twice).desk.name, {})[0] == 1


def test_a_desk_that_is_gone_is_said(make_desk):
    desk = make_desk()
    desk.desk.close()
    status, why = place_order(desk.desk.name, {})
    assert status == GONE
    assert "can't be called" in why


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"{" * 70000 + b"\n"])
def test_what_is_no_order_gets_no_answer(make_desk, line):
    desk = make_desk()
    with socket.socket(socket.AF_UNIX) as call:
        call.settimeout(LIMIT_S)
        call.connect(f"\0{desk.desk.name}")
        try:
            call.sendall(line)
            answer = call.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
    assert answer == b""
    assert not desk.orders
