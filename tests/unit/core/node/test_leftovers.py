"""What killed agents leave: removed by the next one, and nothing else is."""

import fcntl
import os
import shutil
import stat
import subprocess
import sys

import pytest

from kit.command import SOURCE
from torchmuster.core.node.setup import (
    hold,
    make_socket_folder,
    remove_leftovers,
    write_agent_record,
)

AGENT = """
import os, sys
from torchmuster.core.node.setup import hold, write_agent_record
folder, scratch = sys.argv[1:]
for path in (folder, scratch):
    os.makedirs(path, exist_ok=True)
    assert hold(path)
write_agent_record(folder, scratch)
print("here", flush=True)
sys.stdin.read()
"""
FOLDERS = ["muster-abcdefg1", "muster-old-0-01234567"]


@pytest.fixture
def agent(tmp_path):
    """Start an agent that has made its two folders; return it."""
    started = []

    def start(number=1):
        folder, scratch = tmp_path / f"muster-abcdefg{number}", tmp_path / FOLDERS[1]
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", AGENT, str(folder), str(scratch)],
            env={"PYTHONPATH": SOURCE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout.readline() == b"here\n"
        (scratch / "data").mkdir(exist_ok=True)
        (scratch / "data").chmod(0o500)  # as it may come out of an archive
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def end(process):
    process.kill()
    process.wait(60)


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_folders_of_a_killed_agent_are_removed(agent, tmp_path):
    end(agent())
    remove_leftovers("new", (str(tmp_path),))

    assert left(tmp_path) == []


def test_a_living_agent_keeps_its_folders(agent, tmp_path):
    agent()
    remove_leftovers("new", (str(tmp_path),))

    assert left(tmp_path) == FOLDERS


def test_scratch_that_a_replacement_has_taken_over_stays(agent, tmp_path):
    first = agent()
    agent(number=2)
    end(first)
    remove_leftovers("new", (str(tmp_path),))

    assert left(tmp_path) == ["muster-abcdefg2", FOLDERS[1]]


def test_an_agent_of_the_same_run_leaves_the_scratch_to_a_replacement(agent, tmp_path):
    end(agent())
    remove_leftovers("old", (str(tmp_path),))

    assert left(tmp_path) == FOLDERS


def test_a_folder_without_a_record_of_ours_is_never_touched(tmp_path):
    for name in ("muster-abcdefgh", "muster-data", "muster-abcdefgi", "precious"):
        (tmp_path / name).mkdir()
    write_agent_record(str(tmp_path / "muster-abcdefgi"), str(tmp_path / "precious"))
    remove_leftovers("new", (str(tmp_path),))

    assert left(tmp_path) == ["muster-abcdefgh", "muster-data", "precious"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make another user's file")
def test_what_another_user_has_written_is_no_record(agent, tmp_path):
    end(agent())
    os.chown(tmp_path / FOLDERS[0] / "owner.json", 12345, 12345)
    remove_leftovers("new", (str(tmp_path),))

    assert left(tmp_path) == FOLDERS


def test_a_link_or_nothing_can_not_be_held(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)

    assert not hold(str(tmp_path / "link"))
    assert not hold(str(tmp_path / "gone"))


def test_only_we_can_enter_the_folder_and_its_name_fits_a_socket():
    folder = make_socket_folder()

    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert len(os.path.join(folder, "agent.sock")) < 108
    assert os.listdir(folder) == ["owner.json"]
    shutil.rmtree(folder)


def test_a_long_temporary_folder_is_not_used(monkeypatch, tmp_path):
    import tempfile

    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = make_socket_folder()

    assert len(folder) < 80
    assert os.listdir(long) == []
    assert os.listdir(folder) == ["owner.json"]
    shutil.rmtree(folder)


def test_a_folder_that_is_renamed_before_it_is_locked_is_not_held(tmp_path, monkeypatch):
    folder = str(tmp_path / "muster-gone")
    os.mkdir(folder)
    lock = fcntl.flock

    def late(fd, kind):
        os.rename(folder, f"{folder}.gone")
        lock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    assert not hold(folder)
