"""The scratch folder: where it lies, whose it is, and its end."""

import errno
import os
import stat

import pytest

from torchmuster.core.node.setup import (
    ScratchError,
    folder_name,
    make_scratch,
    parent_folder,
    remove_scratch,
)


def test_a_named_folder_comes_before_the_schedulers(tmp_path):
    assert parent_folder({"SLURM_TMPDIR": "/slurm"}, "/mine") == "/mine"
    assert parent_folder({"SLURM_TMPDIR": "/slurm", "TMPDIR": str(tmp_path)}) == "/slurm"
    assert parent_folder({"TMPDIR": str(tmp_path)}) == str(tmp_path)


def test_a_tmpdir_that_this_node_lacks_is_not_used():
    assert os.path.isdir(parent_folder({"TMPDIR": "/nope/of/the/login/node"}))


def test_two_runs_of_one_name_have_folders_of_their_own(tmp_path):
    names = {folder_name("r", place, str(tmp_path / home)) for place in (0, 1) for home in "ab"}
    assert len(names) == 4


def test_only_the_owner_enters_and_a_second_agent_finds_what_is_there(tmp_path):
    path = make_scratch(str(tmp_path), "x")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    os.mkdir(os.path.join(path, "data"))
    assert make_scratch(str(tmp_path), "x") == path
    assert os.listdir(path) == ["data"]


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x").symlink_to("elsewhere")
    is_own_and_new(make_scratch(str(tmp_path), "x"), tmp_path)
    assert os.listdir(tmp_path / "elsewhere") == []


def is_own_and_new(path, parent):
    """Somebody who has planted a folder has planted no other one."""
    assert os.path.dirname(path) == str(parent)
    assert os.path.basename(path).startswith("x-")
    assert os.lstat(path).st_uid == os.getuid()
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make another user's folder")
def test_another_users_folder_is_left_alone(tmp_path):
    (tmp_path / "x").mkdir()
    os.chown(tmp_path / "x", 65534, 65534)
    is_own_and_new(make_scratch(str(tmp_path), "x"), tmp_path)


def test_a_parent_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ScratchError, match="can't be made"):
        make_scratch(str(tmp_path / "nope"), "x")


def test_all_of_it_is_removed_and_links_are_not_followed(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").write_text("x")
    path = make_scratch(str(tmp_path), "x")
    os.symlink(tmp_path / "data", os.path.join(path, "data"))
    os.makedirs(os.path.join(path, "closed", "below"))
    os.chmod(os.path.join(path, "closed"), 0o500)
    remove_scratch(path)

    assert not os.path.exists(path)
    assert (tmp_path / "data" / "kept").exists()


def test_the_folder_that_it_lies_in_keeps_its_mode(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    path = make_scratch(str(tmp_path), "x")

    def busy(*_args, **_named):
        raise OSError(errno.EBUSY, "somebody else removes it")

    monkeypatch.setattr(os, "rmdir", busy)
    remove_scratch(path)

    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
