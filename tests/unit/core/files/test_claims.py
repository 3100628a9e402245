"""The folder of claims: each term is given once, whatever its file system can do."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kit.values import term
from kit.work import do_together
from torchmuster.core.files.claims import Claims


def claim(number, holder="a", place=1):
    return term(number, holder=holder, place=place, node="n2", members=(0, 1))


@pytest.fixture
def claims(tmp_path):
    return Claims(str(tmp_path))


def test_a_term_is_given_once_and_the_newest_is_the_highest(claims):
    assert claims.newest() is None
    for number in (0, 1, 9, 10):
        assert claims.take(claim(number))
    assert not claims.take(claim(10, holder="b"))
    assert claims.newest() == claim(10)
    assert claims.read(9) == claim(9)
    assert not [name for name in os.listdir(claims.folder) if not name.startswith("term-")]


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_claim_one_term_at_once_one_gets_it(claims, links, monkeypatch):
    if not links:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    for number in range(20):
        won = []

        def take(who, won=won, number=number):
            if claims.take(claim(number, holder=str(who))):
                won.append(str(who))

        do_together(8, take)
        assert won == [claims.newest().holder]


def refuse(number):
    def link(*_):
        raise OSError(number, os.strerror(number))

    return link


def test_a_link_whose_answer_was_lost_is_ours(claims, monkeypatch):
    link = os.link

    def lose_the_answer(old, new):
        link(old, new)
        raise FileExistsError(errno.EEXIST, "it was made by the call before")

    monkeypatch.setattr(os, "link", lose_the_answer)
    assert claims.take(claim(3))


def test_a_disk_that_fails_is_an_error_and_leaves_nothing(claims, monkeypatch):
    monkeypatch.setattr(os, "link", refuse(errno.EIO))
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        claims.take(claim(3))
    assert os.listdir(claims.folder) == []


def test_votes_are_of_one_term_and_can_be_taken_back(claims):
    claims.vote(3, 1)
    claims.vote(3, 1)
    claims.vote(3, 12)
    claims.vote(31, 2)
    assert claims.votes(3) == {1, 12}
    claims.withdraw(3, 1)
    claims.withdraw(3, 1)
    assert claims.votes(3) == {12}
    assert claims.votes(1) == set()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"number": 7}', b"\xff\xfe", b"null", b'{"number": "7"}' * 99],
)
def test_what_is_no_claim_is_not_read_as_one(claims, content):
    claims.take(claim(6))
    Path(claims.folder, "term-7.json").write_bytes(content)
    assert claims.newest() is None
    assert not claims.take(claim(7))


def test_a_claim_that_stays_unreadable_is_nobodys_and_its_term_is_passed_over(tmp_path):
    now = [0.0]
    claims = Claims(str(tmp_path), clock=lambda: now[0])
    claims.take(claim(6))
    for name in ("term-7.json", "term-9.json"):
        (tmp_path / name).write_text("nonsense")
    os.symlink("/dev/zero", tmp_path / "term-11.json")
    for _ in range(3):
        assert claims.newest() is None  # each of them gets its time
        now[0] += 11
    newest = claims.newest()
    assert newest == replace(claim(6), number=11)
    assert claims.damaged.endswith("term-11.json") or claims.damaged.endswith("term-7.json")
    assert claims.take(claim(12))
    assert claims.newest() == claim(12)


def test_a_claim_by_another_number_is_none(claims):
    claims.take(claim(6))
    os.link(os.path.join(claims.folder, "term-6.json"), os.path.join(claims.folder, "term-8.json"))
    assert claims.read(8) is None


def test_where_a_head_listens_is_told_by_term_and_an_old_one_overwrites_nothing(claims):
    assert claims.announced(fresh=True) is None
    claims.announce(4, ["10.0.0.2:4"])
    claims.announce(12, ["10.0.0.3:5"])
    claims.announce(4, ["10.0.0.2:6"])
    assert claims.announced(fresh=True) == (12, ["10.0.0.3:5"])
    claims.forget_heads()
    assert claims.announced(fresh=False) is None


def test_names_that_are_none_of_ours_are_passed_over(claims):
    claims.take(claim(6))
    others = ("term-x.json", "term-8.json.tmp", "lost-6", "lost-6.x", "lost-6.1.2", "estate.json")
    for name in others:
        Path(claims.folder, name).touch()
    assert claims.newest() == claim(6)
    assert claims.votes(6) == set()
