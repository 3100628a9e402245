"""An environment on its way: from the client, from host to host, broken and gone on with."""

import os
import socket
import threading

import pytest

from kit.waiting import wait_until
from torchmuster.launcher.node import arrival as hops
from torchmuster.launcher.node.arrival import ComingEnvironment
from torchmuster.launcher.node.shelf import Shelf
from unit.launcher.node.parcels import Packed

SECRET = b"s" * 32
SOON_S = 20.0


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return Packed(tmp_path_factory.mktemp("packed") / "p")


class Node:
    """A host that takes it."""

    def __init__(self, folder, packed, secret=SECRET):
        folder.mkdir()
        self.ends, self.failed = [], []
        self.shelf = Shelf(packed.needs, str(folder))
        self.arrival = ComingEnvironment(self.shelf, secret, self.ends.append)
        self.packed = packed

    def before(self, after, port=None):
        port = after.arrival.port if port is None else port
        self.arrival.pass_on(("127.0.0.1",), port, self.failed.append)
        return self

    def is_last(self):
        self.arrival.pass_on((), 0, self.failed.append)
        return self

    def wait(self):
        wait_until(lambda: self.ends, "the end", SOON_S)
        return self.ends

    def go_on(self):
        """Get the rest from the client, whatever came from the host before."""
        self.arrival.supersede(None)
        self.packed.feed(self.arrival, first=self.arrival.wants)

    def has_all(self):
        names = [f"f{number}" for number in range(16)]
        return sorted(os.listdir(os.path.join(self.shelf.path, "env"))) == sorted(names)

    def left(self):
        return [name for name in os.listdir(self.shelf.folder) if name.startswith(".")]


@pytest.fixture
def node(tmp_path, packed):
    made = []

    def make(**given):
        made.append(Node(tmp_path / f"node{len(made)}", packed, **given))
        return made[-1]

    yield make
    for one in made:
        one.arrival.close(SOON_S)


def test_it_goes_from_host_to_host_and_all_have_the_same(node, packed):
    third = node().is_last()
    second = node().before(third)
    first = node().before(second)
    packed.feed(first.arrival)
    assert [one.wait() for one in (first, second, third)] == [[None]] * 3
    assert all(one.has_all() and not one.left() for one in (first, second, third))
    assert first.failed == second.failed == []


def test_the_next_host_is_told_of_late_and_gets_all_of_it(node, packed):
    second, first = node().is_last(), node()
    packed.feed(first.arrival)
    assert first.wait() == [None]
    first.before(second)
    assert second.wait() == [None]


def test_a_piece_that_is_damaged_on_its_way_is_not_taken(node, packed):
    one = node().is_last()
    packed.feed(one.arrival, end=2)
    damaged = bytearray(packed.pieces[2])
    damaged[7] ^= 1
    assert not one.arrival.take(2, bytes(damaged))
    assert one.arrival.wants == 2
    packed.feed(one.arrival, first=2)
    assert one.wait() == [None]
    assert one.has_all()


def test_one_that_comes_damaged_again_and_again_is_given_up(node, packed):
    one = node()
    packed.feed(one.arrival, end=1)
    for _ in range(3):
        one.arrival.take(1, b"x")
    (why,) = one.wait()
    assert "came damaged" in why
    wait_until(lambda: not one.left(), "nothing is left", SOON_S)
    assert not os.path.exists(one.shelf.path)


def test_who_goes_on_is_told_from_where(node, packed):
    one = node().is_last()
    packed.feed(one.arrival, end=2)
    assert one.arrival.wants == 2
    packed.feed(one.arrival, first=0)  # what is there already is dropped
    assert one.wait() == [None]


def test_a_link_that_is_cut_in_the_middle_is_made_again_and_goes_on(node, packed):
    second = node().is_last()
    with Cutting(second.arrival.port, cut_after=1_500_000) as between:
        first = node().before(second, between.port)
        packed.feed(first.arrival)
        assert second.wait() == [None]
        assert second.has_all()
        assert between.num_calls == 2
        # What had come was not sent again, but for what was under way.
        assert between.num_bytes < packed.needs.size_bytes * 1.7


def test_a_host_that_dies_while_it_forwards_leaves_the_next_to_the_client(node, packed):
    second = node().is_last()
    first = node().before(second)
    packed.feed(first.arrival, end=2)
    wait_until(lambda: second.arrival.wants == 2, "what the first had", SOON_S)
    first.arrival.close(SOON_S)
    second.go_on()
    assert second.wait() == [None]
    assert second.has_all()


def test_a_next_host_that_does_not_answer_is_said(node, packed, monkeypatch):
    monkeypatch.setattr(hops, "_AGAIN_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first = node().before(node(), port)
    packed.feed(first.arrival)
    assert first.wait() == [None]
    wait_until(lambda: first.failed, "the failed hop", SOON_S)
    assert "does not answer at 127.0.0.1" in first.failed[0]


def test_a_link_that_carries_nothing_any_more_is_given_up(node, packed, monkeypatch):
    for name in ("SILENCE_S", "_CALL_LIMIT_S"):
        monkeypatch.setattr(hops, name, 1.0)
    second = node()
    with Cutting(second.arrival.port, stall_after=1_500_000) as between:
        first = node().before(second, between.port)
        packed.feed(first.arrival)
        wait_until(lambda: first.failed, "the failed hop", SOON_S)
    second.is_last()
    second.go_on()
    assert second.wait() == [None]


def test_a_caller_that_does_not_know_the_key_brings_nothing(node, packed, monkeypatch):
    monkeypatch.setattr(hops, "_AGAIN_S", 0.01)
    second = node(secret=b"t" * 32)
    first = node().before(second)
    packed.feed(first.arrival)
    wait_until(lambda: first.failed, "the refusal", SOON_S)
    assert second.arrival.wants == -1


def test_nothing_half_is_ever_in_its_place(node, packed):
    one = node()
    packed.feed(one.arrival, end=3)
    one.arrival.close(SOON_S)
    assert not os.path.exists(one.shelf.path)
    assert one.left() == []


class Cutting:
    """A relay that cuts its first connection after so many bytes, or lets it stand still, and all that follow at once."""

    def __init__(self, port, cut_after=None, stall_after=None):
        self._to, self._cut, self._stall = port, cut_after, stall_after
        self.num_calls = self.num_bytes = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._open = []
        threading.Thread(target=self._work, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for one in self._open:
            one.close()

    def _work(self):
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            self.num_calls += 1
            there = socket.create_connection(("127.0.0.1", self._to))
            self._open += [caller, there]
            limit = self._cut or self._stall
            if self.num_calls > 1:
                limit = 0 if self._stall else None
            for args in ((there, caller, None), (caller, there, limit)):
                threading.Thread(target=self._carry, args=args, daemon=True).start()

    def _carry(self, source, target, limit):
        carried = 0
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
                carried += len(data)
                if limit is not None:
                    self.num_bytes += len(data)
                    if carried > limit:
                        if self._stall:
                            return
                        break
            for one in (source, target):
                one.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
