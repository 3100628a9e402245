"""What a node makes before its workers start, and what killed agents leave of it."""

import asyncio
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile

import pytest

from kit.command import SOURCE
from kit.values import run_plan
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.plan import NodeSetup
from torchmuster.core.node import setup as node_setup
from torchmuster.core.node.options import AgentOptions, HeadPlace
from torchmuster.errors import MusterError


class Host:
    """An agent that only notes what it is to start with."""

    def __init__(self):
        self.started = []

    def tell(self, text):
        raise AssertionError(text)

    def start_with(self, program, environment):
        self.started.append((program.target, environment["COLOUR"]))


def work_of(tmp_path, setup):
    options = AgentOptions(
        plan=run_plan(python=(sys.executable,), cwd=str(tmp_path), node_setup=setup),
        num_workers=1,
        host="n1",
        head=HeadPlace(addresses=(), secret=b"", join_timeout_s=1.0),
        environment={**os.environ, "TMPDIR": str(tmp_path), "COLOUR": "blue"},
        run_dir=RunDir(str(tmp_path / "run")).path,
        place=0,
    )
    return node_setup.NodeWork(options, DiskWriter())


def test_a_plain_setup_starts_the_program_and_makes_the_scratch_folder(tmp_path):
    host, work = Host(), work_of(tmp_path, NodeSetup(environment=(("COLOUR", "blue"),)))
    asyncio.run(work.run(host.tell, host.start_with))
    try:
        assert work.is_done
        assert host.started == [("t.py", "blue")]
        assert os.listdir(work.scratch) == []
    finally:
        node_setup.remove_scratch(work.scratch)


@pytest.mark.parametrize(
    "setup", [{"lines": ("true",)}, {"before": ("true",)}, {"scratch": "$HOME"}], ids=str
)
def test_what_needs_a_shell_is_refused_rather_than_left_out(tmp_path, setup):
    host, work = Host(), work_of(tmp_path, NodeSetup(**setup))
    with pytest.raises(MusterError, match="setup lines and staging need"):
        asyncio.run(work.run(host.tell, host.start_with))
    assert not work.is_done
    assert not host.started


# The scratch folder: where it lies, whose it is, and its end.


def test_a_named_folder_comes_before_the_schedulers(tmp_path):
    assert node_setup.parent_folder({"SLURM_TMPDIR": "/slurm"}, "/mine") == "/mine"
    assert node_setup.parent_folder({"SLURM_TMPDIR": "/slurm", "TMPDIR": str(tmp_path)}) == "/slurm"
    assert node_setup.parent_folder({"TMPDIR": str(tmp_path)}) == str(tmp_path)


def test_a_tmpdir_that_this_node_lacks_is_not_used():
    assert os.path.isdir(node_setup.parent_folder({"TMPDIR": "/nope/of/the/login/node"}))


def test_two_runs_of_one_name_have_folders_of_their_own(tmp_path):
    names = {
        node_setup.folder_name("r", place, str(tmp_path / home))
        for place in (0, 1)
        for home in "ab"
    }
    assert len(names) == 4


def test_only_the_owner_enters_and_a_second_agent_finds_what_is_there(tmp_path):
    path = node_setup.make_scratch(str(tmp_path), "x")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    os.mkdir(os.path.join(path, "data"))
    assert node_setup.make_scratch(str(tmp_path), "x") == path
    assert os.listdir(path) == ["data"]


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x").symlink_to("elsewhere")
    is_own_and_new(node_setup.make_scratch(str(tmp_path), "x"), tmp_path)
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
    is_own_and_new(node_setup.make_scratch(str(tmp_path), "x"), tmp_path)


def test_a_parent_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(node_setup.ScratchError, match="can't be made"):
        node_setup.make_scratch(str(tmp_path / "nope"), "x")


def test_all_of_it_is_removed_and_links_are_not_followed(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").write_text("x")
    path = node_setup.make_scratch(str(tmp_path), "x")
    os.symlink(tmp_path / "data", os.path.join(path, "data"))
    os.makedirs(os.path.join(path, "closed", "below"))
    os.chmod(os.path.join(path, "closed"), 0o500)
    node_setup.remove_scratch(path)

    assert not os.path.exists(path)
    assert (tmp_path / "data" / "kept").exists()


def test_the_folder_that_it_lies_in_keeps_its_mode(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    path = node_setup.make_scratch(str(tmp_path), "x")

    def busy(*_args, **_named):
        raise OSError(errno.EBUSY, "somebody else removes it")

    monkeypatch.setattr(os, "rmdir", busy)
    node_setup.remove_scratch(path)

    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


# What killed agents leave: removed by the next one, and nothing else is.


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


@pytest.mark.parametrize(
    ("is_killed", "run", "stay"),
    [(True, "new", []), (False, "new", FOLDERS), (True, "old", FOLDERS)],
    ids=["killed", "living", "scratch for a replacement of the same run"],
)
def test_the_folders_of_an_agent_are_removed_when_nobody_needs_them(
    agent, tmp_path, is_killed, run, stay
):
    process = agent()
    if is_killed:
        end(process)
    node_setup.remove_leftovers(run, (str(tmp_path),))

    assert left(tmp_path) == stay


def test_scratch_that_a_replacement_has_taken_over_stays(agent, tmp_path):
    first = agent()
    agent(number=2)
    end(first)
    node_setup.remove_leftovers("new", (str(tmp_path),))

    assert left(tmp_path) == ["muster-abcdefg2", FOLDERS[1]]


def test_a_folder_without_a_record_of_ours_is_never_touched(tmp_path):
    for name in ("muster-abcdefgh", "muster-data", "muster-abcdefgi", "precious"):
        (tmp_path / name).mkdir()
    node_setup.write_agent_record(str(tmp_path / "muster-abcdefgi"), str(tmp_path / "precious"))
    node_setup.remove_leftovers("new", (str(tmp_path),))

    assert left(tmp_path) == ["muster-abcdefgh", "muster-data", "precious"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make another user's file")
def test_what_another_user_has_written_is_no_record(agent, tmp_path):
    end(agent())
    os.chown(tmp_path / FOLDERS[0] / "owner.json", 12345, 12345)
    node_setup.remove_leftovers("new", (str(tmp_path),))

    assert left(tmp_path) == FOLDERS


def test_a_link_or_nothing_can_not_be_held(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)

    assert not node_setup.hold(str(tmp_path / "link"))
    assert not node_setup.hold(str(tmp_path / "gone"))


def test_only_we_can_enter_the_folder_and_its_name_fits_a_socket():
    folder = node_setup.make_socket_folder()

    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert len(os.path.join(folder, "agent.sock")) < 108
    assert os.listdir(folder) == ["owner.json"]
    shutil.rmtree(folder)


def test_a_long_temporary_folder_is_not_used(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = node_setup.make_socket_folder()

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
    assert not node_setup.hold(folder)
