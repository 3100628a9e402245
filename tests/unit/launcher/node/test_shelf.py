"""The shelf of a node: what may lie there, what stays, what goes."""

import errno
import fcntl
import json
import os
import threading
from dataclasses import replace

import pytest

from kit.programs import shell_program
from torchmuster.core import proc
from torchmuster.core.cli.messages import print_errors
from torchmuster.core.model import codec
from torchmuster.core.model.plan import UnpackOrder
from torchmuster.errors import MusterError
from torchmuster.launcher.node import shelf as shelves
from unit.launcher.node.parcels import Packed, shipped_in


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return Packed(tmp_path_factory.mktemp("packed") / "p", megabytes=1)


@pytest.fixture
def make(packed, tmp_path):
    return lambda **needs: shelves.Shelf(replace(packed.needs, **needs), str(tmp_path))


@pytest.mark.parametrize(
    ("needs", "what", "why"),
    [
        ({"glibc": 999}, "newer C library", "need glibc 2.999"),
        ({"base": "/no/such/python3.11"}, "base interpreter", "/no/such/python3.11 does not exist"),
        ({"base": "/usr/bin/env"}, "base interpreter", "does not exist"),
    ],
)
def test_a_node_that_can_t_run_it_says_so_before_anything_comes(packed, needs, what, why):
    with pytest.raises(MusterError, match=what) as refused:
        shelves.check_fit(replace(packed.needs, **needs))
    assert why in refused.value.why


@pytest.mark.parametrize("needs", [{"unpacked_bytes": 1 << 60}, {"num_files": 1 << 50}])
def test_a_node_without_room_for_bytes_or_files_says_so(make, needs):
    with pytest.raises(MusterError, match="no room") as refused:
        make(**{"unpacked_bytes": 0, **needs}).check_room()
    assert "are free, it needs" in refused.value.why


def test_a_disk_that_is_full_in_the_middle_is_said_with_what_is_needed(make, packed, monkeypatch):
    unpacking = shelves.Unpacking(shelf := make())

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
    shelves.forget_old(one.folder, keep=0)
    assert os.path.isdir(one.path)
    os.close(one._hold)
    shelves.forget_old(one.folder, keep=0)
    assert os.listdir(one.folder) == []


def test_of_old_ones_those_go_that_nobody_uses(make):
    one = make()
    for number, name in enumerate(["old", "used", "new", "newer"]):
        path = os.path.join(one.folder, name)
        os.mkdir(path)
        os.utime(path, (number, number))
    hold = os.open(os.path.join(one.folder, "used"), os.O_RDONLY)
    fcntl.flock(hold, fcntl.LOCK_SH)
    shelves.forget_old(one.folder, keep=2)
    os.close(hold)
    assert sorted(os.listdir(one.folder)) == ["new", "newer", "used"]


def test_what_a_killed_process_has_begun_is_removed_and_what_another_unpacks_is_not(make):
    one = make()
    left = os.path.join(one.folder, ".unpacking-left")
    os.makedirs(os.path.join(left, "env"))
    other = shelves.Unpacking(one)
    shelves.forget_old(one.folder, keep=3)
    (name,) = os.listdir(one.folder)
    assert name != ".unpacking-left"
    other.close()
    assert os.listdir(one.folder) == []


def test_of_two_that_unpack_the_same_at_once_the_first_stays(make, packed):
    first, second = make(), make()
    both = [shelves.Unpacking(first), shelves.Unpacking(second)]
    for unpacking in both:
        for index in range(packed.needs.num_pieces):
            unpacking.feed(packed.pieces[index])
    both[0].finish()
    inode = os.stat(first.path).st_ino
    both[1].finish()
    assert os.stat(second.path).st_ino == inode
    assert os.listdir(first.folder) == [os.path.basename(first.path)]


def test_what_users_read_where_it_can_t_live(packed, tmp_path, golden, capsys, monkeypatch):
    monkeypatch.setattr(shelves, "_own_glibc", lambda: 28)
    monkeypatch.setattr(shelves, "show_size", lambda size: "SIZE")
    python = shell_program(tmp_path / "python3", "echo 3.9")
    broken = "echo first >&2; echo no libcudart >&2; exit 1"
    shell_program(tmp_path / "t/env/bin/python", broken)
    needs = replace(packed.needs, machine="riscv64", python="3.11", has_torch=True)
    here = replace(needs, machine=os.uname().machine)
    monkeypatch.setattr(
        shelves.os, "uname", lambda: os.uname_result(("", "", "", "", here.machine))
    )
    large = shelves.Shelf(replace(here, unpacked_bytes=1 << 60), str(tmp_path))
    tries = {
        "another_processor": lambda: shelves.check_fit(needs),
        "an_older_c_library": lambda: shelves.check_fit(replace(here, glibc=35)),
        "another_minor_of_python": lambda: shelves.check_fit(replace(here, base=str(python))),
        "no_room": large.check_room,
        "no_torch_there": lambda: shelves.try_torch(str(tmp_path / "t"), here),
    }
    for case, attempt in tries.items():
        with pytest.raises(MusterError) as refused:
            attempt()
        print_errors([refused.value])
        text = capsys.readouterr().err.replace(str(tmp_path), "/scratch")
        text = text.replace(here.machine, "MACHINE")
        text = text.replace(shelves.folder_name(), "muster-environments-UID")
        golden("environments.txt", case, text)


# A job's node unpacks its environment from a file that all nodes see.


@pytest.fixture
def shipped(tmp_path):
    return shipped_in(tmp_path)


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def unpacked(shipped, scratch, tell=lambda done, total: None):
    return shelves.unpack(shipped, str(scratch), tries=False, tell=tell)


def test_it_is_unpacked_once_and_then_used(shipped, scratch):
    path = unpacked(shipped, scratch)
    assert len(os.listdir(os.path.join(path, "env"))) == 4
    inode = os.stat(path).st_ino
    os.unlink(shipped.archive)  # what is there needs no archive
    assert unpacked(shipped, scratch) == path
    assert os.stat(path).st_ino == inode


def test_of_several_agents_of_a_node_one_reads_it(shipped, scratch):
    told, paths = [], []

    def work():
        paths.append(unpacked(shipped, scratch, lambda done, total: told.append(done)))

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
        unpacked(shipped, scratch)
    assert "is damaged" in refused.value.why
    (folder,) = scratch.iterdir()
    assert [name for name in os.listdir(folder) if not name.startswith(".lock")] == []


def test_an_archive_that_is_gone_is_said_with_its_place(shipped, scratch):
    os.unlink(shipped.archive)
    with pytest.raises(MusterError, match="can't be unpacked") as refused:
        unpacked(shipped, scratch)
    assert refused.value.where == shipped.archive


def test_the_program_says_where_it_is_or_why_not(shipped, scratch):
    def ask(shipped):
        order = UnpackOrder(parent=str(scratch), tries=False, shipped=shipped)
        said = proc.ask_spared(proc.node_program("unpack", codec.to_word(order)), 60.0)
        return said.status, json.loads(said.stdout.splitlines()[-1])

    _, last = ask(shipped)
    assert os.path.isdir(last["done"]["path"])
    status, last = ask(replace(shipped, needs=replace(shipped.needs, machine="vax")))
    assert status == 1
    assert "another processor" in last["error"]["what"]
