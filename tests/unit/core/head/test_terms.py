"""A head shows for each attempt that it is the head still."""

import errno
import os

import pytest

from kit.values import term
from torchmuster.core.files.claims import Claims
from torchmuster.core.head.membership import claim_attempt, is_deposed
from torchmuster.core.head.options import HeadCredentials
from torchmuster.errors import HeadLostError


@pytest.fixture
def credentials(tmp_path):
    claims = Claims(str(tmp_path))
    claims.take(claim(0, "ours", "n1"))
    return HeadCredentials(claims=claims, term=0, holder="ours", place=0, node="n1")


def claim(number, holder, node):
    return term(number, holder=holder, node=node, next_attempt=0)


def start(credentials, attempt, said=None):
    claim_attempt(credentials, attempt, (0, 1, 2), 1, (said if said is not None else []).append)


def test_each_attempt_takes_the_next_term(credentials):
    start(credentials, 4)
    start(credentials, 5)
    assert credentials.term == 2
    newest = credentials.claims.newest()
    assert (newest.number, newest.holder, newest.members) == (2, "ours", (0, 1, 2))
    assert (newest.next_attempt, newest.restarts_spent) == (6, 1)


def test_a_head_whose_term_another_has_taken_ends_and_names_it(credentials):
    credentials.claims.take(claim(1, "theirs", "n3"))
    with pytest.raises(HeadLostError, match="n3 has become the head of this run"):
        start(credentials, 4)
    assert credentials.term == 0


def test_a_head_that_was_away_for_several_terms_does_not_take_the_next_one(credentials):
    for number in (1, 2, 3):
        credentials.claims.take(claim(number, "theirs", "n3"))
    with pytest.raises(HeadLostError, match="n3"):
        start(credentials, 4)


def fail(monkeypatch, number):
    def open_(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("torchmuster.core.files.claims.os.open", open_)


def test_on_a_full_disk_the_run_goes_on_and_says_what_that_means(credentials, monkeypatch):
    said = []
    real = os.open
    fail(monkeypatch, errno.ENOSPC)
    monkeypatch.setattr(
        "torchmuster.core.files.claims.open_own", lambda path: os.fdopen(real(path, 0), "rb")
    )
    start(credentials, 4, said)
    assert said == [
        "the disk is full: until there is space, no other node can take the head's place"
    ]


def test_on_a_full_disk_a_head_that_was_replaced_ends(credentials, monkeypatch):
    credentials.claims.take(claim(1, "theirs", "n3"))
    real = os.open
    fail(monkeypatch, errno.ENOSPC)
    monkeypatch.setattr(
        "torchmuster.core.files.claims.open_own", lambda path: os.fdopen(real(path, 0), "rb")
    )
    with pytest.raises(HeadLostError):
        start(credentials, 4)


def test_a_head_that_can_not_know_whether_it_is_one_ends(credentials, monkeypatch):
    fail(monkeypatch, errno.EIO)
    with pytest.raises(HeadLostError, match="can't know whether it is still the head") as caught:
        start(credentials, 4)
    assert caught.value.why is not None


def test_a_head_sees_whether_another_one_has_followed_it(credentials):
    start(credentials, 4)
    assert not is_deposed(credentials)
    credentials.claims.take(claim(2, "theirs", "n3"))
    assert is_deposed(credentials)
