"""The shelf of a node: what may lie there, what stays, what goes."""

import dataclasses
import errno
import fcntl
import json
import os
import threading
from dataclasses import replace

import pytest

from torchmuster.core import proc
from torchmuster.core.cli.messages import print_errors
from torchmuster.core.model import codec
from torchmuster.core.model.plan import ShippedEnvironment, UnpackOrder
from torchmuster.errors import MusterError
from torchmuster.launcher.node import shelf as shelves
from torchmuster.launcher.node.shelf import (
    Shelf,
    Unpacking,
    check_fit,
    forget_old,
    try_torch,
    unpack,
)
from unit.launcher.node.parcels import Packed


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return Packed(tmp_path_factory.mktemp("packed") / "p", megabytes=1)


@pytest.fixture
def make(packed, tmp_path):
    return lambda **needs: Shelf(dataclasses.replace(packed.needs, **needs), str(tmp_path))


@pytest.mark.parametrize(
    ("needs", "what", "why"),
    [
        ({"machine": "vax"}, "another processor", "for vax"),
        ({"glibc": 999}, "newer C library", "need glibc 2.999"),
        ({"base": "/no/such/python3.11"}, "base interpreter", "/no/such/python3.11 does not exist"),
        ({"base": "/usr/bin/env"}, "base interpreter", "does not exist"),
    ],
)
def test_a_node_that_can_t_run_it_says_so_before_anything_comes(packed, needs, what, why):
    with pytest.raises(MusterError, match=what) as refused:
        check_fit(dataclasses.replace(packed.needs, **needs))
    assert why in refused.value.why


def test_an_interpreter_of_another_minor_is_named(packed, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 3.9\n")
    python.chmod(0o755)
    with pytest.raises(MusterError, match="base interpreter") as refused:
        check_fit(dataclasses.replace(packed.needs, base=str(python)))
    assert f"{python} is Python 3.9" in refused.value.why


def test_a_node_without_room_says_how_much_it_needs_and_has(make):
    with pytest.raises(MusterError, match="no room") as refused:
        make(unpacked_bytes=1 << 60).check_room()
    assert "are free, it needs 1.0 EiB" in refused.value.why or "are free" in refused.value.why
    with pytest.raises(MusterError, match="no room"):
        make(num_files=1 << 50, unpacked_bytes=0).check_room()


def test_a_disk_that_is_full_in_the_middle_is_said_with_what_is_needed(make, packed, monkeypatch):
    unpacking = Unpacking(shelf := make())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shelves.os, "write", full)
    with pytest.raises(MusterError, match="no room") as refused:
        unpacking.feed(packed.pieces[0])
    monkeypatch.undo()
    assert "free now" in refused.value.why
    unpacking.close()
    assert os.listdir(shelf.folder) == []


def test_what_is_there_is_used_and_not_removed_while_it_is(make):
    one = make()
    assert not one.take()
    os.mkdir(one.path)
    assert one.take()
    forget_old(one.folder, keep=0)
    assert os.path.isdir(one.path)
    os.close(one._hold)
    forget_old(one.folder, keep=0)
    assert os.listdir(one.folder) == []


def test_of_old_ones_those_go_that_nobody_uses(make):
    one = make()
    for number, name in enumerate(["old", "used", "new", "newer"]):
        path = os.path.join(one.folder, name)
        os.mkdir(path)
        os.utime(path, (number, number))
    hold = os.open(os.path.join(one.folder, "used"), os.O_RDONLY)
    fcntl.flock(hold, fcntl.LOCK_SH)
    forget_old(one.folder, keep=2)
    os.close(hold)
    assert sorted(os.listdir(one.folder)) == ["new", "newer", "used"]


def test_what_a_killed_process_has_begun_is_removed_and_what_another_unpacks_is_not(make):
    one = make()
    left = os.path.join(one.folder, ".unpacking-left")
    os.makedirs(os.path.join(left, "env"))
    other = Unpacking(one)
    forget_old(one.folder, keep=3)
    (name,) = os.listdir(one.folder)
    assert name != ".unpacking-left"
    other.close()
    assert os.listdir(one.folder) == []


def test_of_two_that_unpack_the_same_at_once_the_first_stays(make, packed):
    first, second = make(), make()
    both = [Unpacking(first), Unpacking(second)]
    for unpacking in both:
        for index in range(packed.needs.num_pieces):
            content = packed.pieces[index]
            unpacking.feed(content)
    both[0].finish()
    inode = os.stat(first.path).st_ino
    both[1].finish()
    assert os.stat(second.path).st_ino == inode
    assert os.listdir(first.folder) == [os.path.basename(first.path)]


def test_a_program_that_does_not_run_there_is_said_with_its_last_line(packed, tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho first >&2; echo no libcudart >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(MusterError, match="`import torch` fails") as refused:
        try_torch(str(tmp_path), dataclasses.replace(packed.needs, has_torch=True))
    assert refused.value.why == "no libcudart"


def test_what_users_read_where_it_can_t_live(packed, tmp_path, golden, capsys, monkeypatch):
    monkeypatch.setattr(shelves, "_own_glibc", lambda: 28)
    monkeypatch.setattr(shelves, "show_size", lambda size: "SIZE")
    for path, text in (
        ("python3", "echo 3.9"),
        ("t/env/bin/python", "echo no libcudart >&2; exit 1"),
    ):
        script = tmp_path / path
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    needs = dataclasses.replace(packed.needs, machine="riscv64", python="3.11", has_torch=True)
    here = dataclasses.replace(needs, machine=os.uname().machine)
    monkeypatch.setattr(
        shelves.os, "uname", lambda: os.uname_result(("", "", "", "", here.machine))
    )
    tries = {
        "another_processor": lambda: check_fit(needs),
        "an_older_c_library": lambda: check_fit(dataclasses.replace(here, glibc=35)),
        "another_minor_of_python": lambda: check_fit(
            dataclasses.replace(here, base=str(tmp_path / "python3"))
        ),
        "no_room": lambda: Shelf(
            dataclasses.replace(here, unpacked_bytes=1 << 60), str(tmp_path)
        ).check_room(),
        "no_torch_there": lambda: try_torch(str(tmp_path / "t"), here),
    }
    for case, attempt in tries.items():
        with pytest.raises(MusterError) as refused:
            attempt()
        print_errors([refused.value])
        text = capsys.readouterr().err.replace(str(tmp_path), "/scratch")
        text = text.replace(here.machine, "MACHINE").replace(
            shelves.folder_name(), "muster-environments-UID"
        )
        golden("environments.txt", case, text)


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
