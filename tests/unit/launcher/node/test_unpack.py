"""A job's node unpacks its environment from a file that all nodes see."""

import json
import os
import threading
from dataclasses import replace

import pytest

from torchmuster.core import proc
from torchmuster.core.model import codec
from torchmuster.core.model.plan import ShippedEnvironment, UnpackOrder
from torchmuster.errors import MusterError
from torchmuster.launcher.node.shelf import unpack
from unit.launcher.node.parcels import Packed


@pytest.fixture
def shipped(tmp_path):
    packed = Packed(tmp_path / "environment.parcel", megabytes=1)
    return ShippedEnvironment(archive=packed.path, needs=packed.needs)


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def nothing(done, total):
    """Hear how far it is."""


def test_it_is_unpacked_once_and_then_used(shipped, scratch):
    path = unpack(shipped, str(scratch), tries=False, tell=nothing)
    assert len(os.listdir(os.path.join(path, "env"))) == 4
    inode = os.stat(path).st_ino
    os.unlink(shipped.archive)  # what is there needs no archive
    assert unpack(shipped, str(scratch), tries=False, tell=nothing) == path
    assert os.stat(path).st_ino == inode


def test_of_several_agents_of_a_node_one_reads_it(shipped, scratch):
    told, paths = [], []

    def work():
        tell = lambda done, total: told.append(done)  # noqa: E731
        paths.append(unpack(shipped, str(scratch), tries=False, tell=tell))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 6
    assert told.count(0) == 1  # the first piece, once
    left = [n for n in os.listdir(os.path.dirname(paths[0])) if n.startswith(".unpacking")]
    assert left == []


def test_a_damaged_archive_leaves_nothing(shipped, scratch):
    with open(shipped.archive, "r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    with pytest.raises(MusterError, match="can't be unpacked") as refused:
        unpack(shipped, str(scratch), tries=False, tell=nothing)
    assert "is damaged" in refused.value.why
    (folder,) = scratch.iterdir()
    assert [name for name in os.listdir(folder) if not name.startswith(".lock")] == []


def test_an_archive_that_is_gone_is_said_with_its_place(shipped, scratch):
    os.unlink(shipped.archive)
    with pytest.raises(MusterError, match="can't be unpacked") as refused:
        unpack(shipped, str(scratch), tries=False, tell=nothing)
    assert refused.value.where == shipped.archive


def test_the_program_says_where_it_is_or_why_not(shipped, scratch):
    order = UnpackOrder(parent=str(scratch), tries=False, shipped=shipped)
    said = proc.ask_spared(proc.node_program("unpack", codec.to_word(order)), 60.0)
    last = json.loads(said.stdout.splitlines()[-1])
    assert os.path.isdir(last["done"]["path"])
    other = replace(shipped, needs=replace(shipped.needs, machine="vax"))
    order = replace(order, shipped=other)
    said = proc.ask_spared(proc.node_program("unpack", codec.to_word(order)), 60.0)
    assert said.status == 1
    assert "another processor" in json.loads(said.stdout.splitlines()[-1])["error"]["what"]
