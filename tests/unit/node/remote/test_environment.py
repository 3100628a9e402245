"""Whether a host is fit for an environment, and what it takes."""

import dataclasses
import os
import tempfile

import pytest

from torchmuster.errors import MusterError
from torchmuster.model.installed import EnvironmentNeeds
from torchmuster.net.remote_messages import EnvironmentPlaced, FrameError, OfferEnvironment
from torchmuster.node.remote import environment
from torchmuster.node.remote.environment import EnvironmentPlace

NEEDS = EnvironmentNeeds(
    sha="ab" * 32,
    machine=os.uname().machine,
    glibc=0,
    python="3.11",
    base="",
    size_bytes=10,
    unpacked_bytes=10,
    has_torch=False,
)


class Session:
    def __init__(self):
        self.sent = []

    def send(self, message, *, bulk=False):
        self.sent.append(message)
        return True


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def make(**needs):
        offer = OfferEnvironment(needs=dataclasses.replace(NEEDS, **needs), secret="00" * 32)
        return EnvironmentPlace(offer, Session())

    return make


@pytest.mark.parametrize(
    ("needs", "what"),
    [
        ({"machine": "vax"}, "another processor"),
        ({"glibc": 999}, "newer C library"),
        ({"base": "/no/such/python3.11"}, "base interpreter"),
    ],
)
def test_a_host_that_can_t_run_it_says_so_before_anything_comes(place, needs, what):
    with pytest.raises(MusterError, match=what):
        place(**needs)


def test_a_host_without_room_says_how_much_there_is(place):
    with pytest.raises(MusterError, match="no room") as refused:
        place(size_bytes=1 << 60).answer()
    assert "1.0 EiB" in refused.value.why or "are free" in refused.value.why


def test_what_is_there_is_used_as_it_is(place):
    one = place()
    os.mkdir(one.path)
    one.answer()
    assert one._session.sent == [EnvironmentPlaced(has=True)]


def test_more_than_was_offered_and_what_does_not_follow_is_refused(place):
    one = place()
    with pytest.raises(FrameError, match="not asked for"):
        one.take(0, b"x")
    one._file = os.open(os.path.join(one._folder, "archive"), os.O_RDWR | os.O_CREAT)
    one.take(0, b"12345")
    with pytest.raises(FrameError, match="more than"):
        one.take(5, b"1234567")
    with pytest.raises(FrameError):
        one.take(7, b"1")


def test_of_old_ones_those_go_that_nobody_uses(place):
    one = place()
    used = os.path.join(one._folder, "used")
    for number, name in enumerate(["old", "used", "new", "newer"]):
        path = os.path.join(one._folder, name)
        os.mkdir(path)
        os.utime(path, (number, number))
    hold = os.open(used, os.O_RDONLY)
    environment.fcntl.flock(hold, environment.fcntl.LOCK_SH)
    environment._forget_old(one._folder)
    os.close(hold)
    assert sorted(os.listdir(one._folder)) == ["new", "newer", "used"]
