"""Room before a start: bytes, inodes."""

import os
from types import SimpleNamespace

import pytest

from torchmuster.core.owner.create import check_room, room_warnings

GIB = 1 << 30


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


def test_this_disk_can_be_looked_at(tmp_path):
    check_room(os.fspath(tmp_path))
