"""Room before a start: bytes, inodes, quotas."""

import os
from types import SimpleNamespace

import pytest

from torchmuster.core import proc
from torchmuster.core.owner.create import check_room, parse_quota, quota_warnings, room_warnings

GIB = 1 << 30
QUOTA = """\
Disk quotas for user me (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
/dev/sda1  4194304* 4194304 5242880   6days  9500   10000   11000
nfs:/home  100 0 0 0 10 0 0 0
"""
LUSTRE = "/scratch 104857600 0 105000000 - 200 0 1000 -\n"


def disk(free_bytes=8 * GIB, inodes=1_000_000, all_inodes=2_000_000):
    blocks = {"f_bavail": free_bytes // 4096, "f_frsize": 4096}
    return lambda path: SimpleNamespace(**blocks, f_files=all_inodes, f_favail=inodes)


def test_a_disk_with_room_is_no_news(tmp_path):
    check_room(str(tmp_path), disk())
    assert room_warnings(str(tmp_path), disk()) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [(disk(free_bytes=3 << 20), "No space left"), (disk(inodes=0), "No inode is left")],
)
def test_a_full_disk_is_refused(tmp_path, facts, words):
    with pytest.raises(OSError, match=words):
        check_room(str(tmp_path), facts)


def test_a_file_system_that_counts_no_inodes_is_taken(tmp_path):
    check_room(str(tmp_path), disk(inodes=0, all_inodes=0))
    assert room_warnings(str(tmp_path), disk(inodes=0, all_inodes=0)) == []


def test_what_will_soon_be_short_is_said(tmp_path):
    said = room_warnings(str(tmp_path / "not/there/yet"), disk(free_bytes=500 << 20, inodes=7))
    assert said == [
        f"{tmp_path} has only 500 MiB free: `muster prune` makes room",
        f"{tmp_path} can take only 7 more files: `muster prune` helps",
    ]


def test_quotas_are_read():
    assert parse_quota(QUOTA) == [("/dev/sda1", 0, "KiB"), ("/dev/sda1", 500, "files")]
    assert parse_quota(LUSTRE) == [("/scratch", 142400, "KiB"), ("/scratch", 800, "files")]


@pytest.mark.parametrize(
    "text", ["", "none\n", "Disk quotas for user me (uid 1): none\n", "/x a b"]
)
def test_no_quota_is_none(text):
    assert parse_quota(text) == []


@pytest.fixture
def tools(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "quota").write_text("")
    (tmp_path / "quota").chmod(0o755)


def answer(status, stdout=b""):
    return lambda argv: proc.CommandOutput(status=status, stdout=stdout, stderr=b"")


def test_a_quota_that_is_nearly_used_up_is_said(tools, tmp_path):
    assert quota_warnings(str(tmp_path), answer(1, QUOTA.encode())) == [
        "your quota on /dev/sda1 leaves 0 MiB (`quota -w`)",
        "your quota on /dev/sda1 leaves 500 files",
    ]


def test_a_tool_that_hangs_is_left(tools, tmp_path):
    assert quota_warnings(str(tmp_path), answer(None)) == []


def test_without_tools_nothing_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert quota_warnings(str(tmp_path), pytest.fail) == []


def test_this_disk_can_be_looked_at(tmp_path):
    check_room(os.fspath(tmp_path))
