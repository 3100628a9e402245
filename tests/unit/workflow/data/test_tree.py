"""Copies of trees: what is in them, what is not, and nothing from elsewhere."""

import errno
import os
import socket

import pytest

from torchmuster.errors import MusterError
from torchmuster.workflow.data.tree import copy_file, copy_tree


@pytest.fixture
def source(tmp_path):
    """Return a folder to copy."""
    folder = tmp_path / "source"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "top.txt").write_text("top")
    (folder / "a" / "b" / "deep.txt").write_text("deep")
    (folder / "a" / "run.sh").write_text("#!")
    (folder / "a" / "run.sh").chmod(0o755)
    (folder / "empty").mkdir()
    return folder


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_copy_has_the_same_files_folders_and_modes(source, tmp_path):
    assert copy_tree(str(source), str(tmp_path / "target")) == 3
    assert names(tmp_path / "target") == names(source)
    assert (tmp_path / "target" / "a" / "b" / "deep.txt").read_text() == "deep"
    assert os.access(tmp_path / "target" / "a" / "run.sh", os.X_OK)


def test_a_regex_chooses_by_the_start_of_the_path_and_makes_no_other_folders(source, tmp_path):
    assert copy_tree(str(source), str(tmp_path / "target"), "a/.*txt") == 1
    assert names(tmp_path / "target") == ["a", "a/b", "a/b/deep.txt"]


def test_links_inside_the_tree_are_followed_to_files_and_folders(source, tmp_path):
    (source / "latest").symlink_to("a/b")
    (source / "one").symlink_to("top.txt")
    (source / "absolute").symlink_to(source / "a" / "b" / "deep.txt")
    copy_tree(str(source), str(tmp_path / "target"))
    target = tmp_path / "target"
    assert (target / "latest" / "deep.txt").read_text() == "deep"
    assert (target / "one").read_text() == "top"
    assert (target / "absolute").read_text() == "deep"
    assert not any(path.is_symlink() for path in target.rglob("*"))


OUTSIDE, CYCLE = "points outside the folder", "form a cycle"


@pytest.mark.parametrize(
    ("links", "what"),
    [
        ({"a/link": "/etc"}, OUTSIDE),
        ({"a/link": "/etc/hostname"}, OUTSIDE),
        ({"a/link": "../../outside"}, OUTSIDE),
        ({"a/link": "../../source-2/x"}, OUTSIDE),
        ({"first": "second", "second": "/etc"}, OUTSIDE),
        ({"a/b/link": "."}, CYCLE),
        ({"a/b/link": ".."}, CYCLE),
        ({"a/b/link": "../b"}, CYCLE),
        ({"a/to-empty": "../empty", "empty/to-a": "../a"}, CYCLE),
    ],
)
def test_a_link_out_of_the_tree_or_in_a_circle_is_refused(source, tmp_path, links, what):
    for name, target in links.items():
        (source / name).symlink_to(target)
    with pytest.raises(MusterError, match=what):
        copy_tree(str(source), str(tmp_path / "target"))


def test_what_is_no_file_is_left_out_and_not_counted(source, tmp_path):
    os.mkfifo(source / "pipe")
    (source / "nothing").symlink_to("missing")
    (source / "itself").symlink_to("itself")
    with socket.socket(socket.AF_UNIX) as listening:
        folder = os.open(source, os.O_RDONLY)  # a path of a socket must be short
        try:
            listening.bind(f"/proc/self/fd/{folder}/socket")
        finally:
            os.close(folder)
        assert copy_tree(str(source), str(tmp_path / "target")) == 3
    copied = ["a", "a/b", "a/b/deep.txt", "a/run.sh", "empty", "top.txt"]
    assert names(tmp_path / "target") == copied


def test_a_source_that_is_a_link_is_the_folder_behind_it(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    assert copy_tree(str(tmp_path / "link"), str(tmp_path / "target")) == 3


def test_a_missing_source_is_an_error_with_its_path(tmp_path):
    with pytest.raises(MusterError) as caught:
        copy_tree(str(tmp_path / "nowhere"), str(tmp_path / "target"))
    assert caught.value.where == str(tmp_path / "nowhere")


def test_a_copy_over_a_copy_brings_the_newer_content(source, tmp_path):
    copy_tree(str(source), str(tmp_path / "target"))
    (source / "top.txt").write_text("newer")
    copy_tree(str(source), str(tmp_path / "target"))
    assert (tmp_path / "target" / "top.txt").read_text() == "newer"


def refuse(reader, writer, size):
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def end_early(real):
    """Return a kernel that copies ten bytes and then says that this is all."""
    sizes = iter((10, 0))
    return lambda reader, writer, size: real(reader, writer, n) if (n := next(sizes)) else 0


@pytest.mark.parametrize("kernel", ["copies", "refuses", "ends early"])
def test_a_file_is_copied_with_its_mode_whatever_the_kernel_can(tmp_path, monkeypatch, kernel):
    source, target, counted = tmp_path / "a", tmp_path / "b", []
    source.write_bytes(bytes(range(256)) * 100)
    source.chmod(0o750)
    target.write_bytes(b"x" * 100_000)
    fakes = {"refuses": refuse, "ends early": end_early(os.copy_file_range)}
    if kernel in fakes:
        monkeypatch.setattr(os, "copy_file_range", fakes[kernel])
    copy_file(str(source), str(target), counted.append)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_mode & 0o7777 == 0o750
    assert sum(counted) == source.stat().st_size
