"""Memory that an agent holds: parts are whole or not there, the newest whole one is found, and no flipped bit gets through."""

import os
import random

import pytest
import torch

from torchmuster.core.node.workers import MOST_FILES, HeldMemory
from torchmuster.train.memory import (
    PAGE_BYTES,
    HeldFile,
    HeldFolder,
    MemorySaves,
    MemorySettings,
    NodeMemory,
    NodeSite,
    choose_shifts,
    describe_risk,
    look,
    newest_whole,
)
from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.layout import MANIFEST
from torchmuster.train.snapshot.staging import Staging, whole_boxes
from torchmuster.train.snapshot.state import NoRoomError, SnapshotError

NOTHING = (-1, -1)
FLIPS = 1000


class Agent(NodeMemory):
    """The agent of this node in this process: its descriptors are ours."""

    def __init__(self, held):
        super().__init__("")
        self.held = held

    def _call(self, ask):
        return self.held.answer(ask)


@pytest.fixture
def memory():
    held = HeldMemory()
    yield lambda: Agent(held)  # of one attempt after the other
    for descriptor in held._descriptors.values():
        os.close(descriptor)


def crew_of(folder, world, generation):
    return writer.Writers(
        folder=folder,
        store=torch.distributed.PrefixStore(f"held-{generation}", world.connect()),
        rank=0,
        world_size=1,
        generation=generation,
        keep=1,
        timeout_s=10,
        copies=True,
    )


def keep(memory, world, *steps, generation=1, size=300):
    """Write snapshots of steps, with a tensor that tells which step it is of."""
    folder = HeldFolder(memory)
    crew, staging = crew_of(folder, world, generation), Staging(folder.room)
    for number, step in enumerate(steps):
        tensors = {"w": torch.full((size,), float(step)), "empty": torch.empty(0)}
        order = writer.WriteOrder(
            number=number,
            step=step,
            epoch=0,
            kind="whole",
            staged=staging.copy(whole_boxes(tensors), "data-00000.bin"),
            state={"muster": {}},
            rank_state={},
        )
        writer.write(crew, order)


def found(memory, newer_than=NOTHING):
    """Return what a new attempt finds: the tensor, or None."""
    said = []
    snapshot = look(memory.all(), newer_than, said.append)
    return (snapshot.loaded().tensors()["w"] if snapshot is not None else None), said


def test_the_last_two_snapshots_are_held_and_the_newest_is_found(memory, world):
    keep(memory(), world, 1, 2, 3)
    tensor, said = found(memory())
    assert torch.equal(tensor, torch.full((300,), 3.0))
    assert not said
    parts = {(f.part.step, f.part.name) for f in memory().all() if f.part is not None}
    assert {step for step, _ in parts} == {2, 3}


def test_disk_wins_when_it_is_newer_and_a_later_start_is_newer_than_any_step(memory, world):
    keep(memory(), world, 7, generation=2)
    assert found(memory(), newer_than=(2, 7))[0] is None
    assert found(memory(), newer_than=(3, 1))[0] is None
    assert found(memory(), newer_than=(2, 6))[0] is not None
    assert found(memory(), newer_than=(1, 9))[0] is not None


def test_a_part_that_is_being_written_is_none(memory, world):
    keep(memory(), world, 1, 2)
    HeldFolder(memory()).room("data-00000.bin", 1200)  # of step 3, and then the worker was killed
    assert torch.equal(found(memory())[0], torch.full((300,), 2.0))


def test_the_next_snapshot_never_takes_the_place_of_the_one_that_was_loaded(memory, world):
    keep(memory(), world, 1, 2)
    again = HeldFolder(memory())
    again.forget_all_but((1, 1))  # the newer one was not whole on another node
    again.room("data-00000.bin", 1200)
    assert torch.equal(found(memory())[0], torch.full((300,), 1.0))


def test_what_no_later_attempt_needs_is_freed(memory, world):
    keep(memory(), world, 1, 2)
    agent = memory()
    agent.open("data-00005.bin.a")[0].begin(5000)  # of a larger world
    keep(memory(), world, 3, generation=2)
    assert {file.name for file in memory().all()} == {
        *("data-00000.bin.a", "data-00000.bin.b", "manifest.json.a", "manifest.json.b")
    }


def test_a_thousand_flipped_bits_are_all_found(memory, world):
    draw = random.Random(5)
    keep(memory(), world, 1, 2)
    files = [file for file in memory().all() if file.part is not None]
    harmless = 0
    for _ in range(FLIPS):
        file = draw.choice(files)
        at = draw.randrange(PAGE_BYTES + file.part.num_bytes)
        kept = {f.name: snapshot_of(f) for f in files}
        flip(file, at, 1 << draw.randrange(8))
        tensor, said = found(memory())
        is_newest = file.part.step == 2
        if tensor is not None and tensor[0] == 2.0 and is_newest:
            harmless += 1  # in the unused rest of a first page
            assert not said
        assert tensor is None or torch.equal(tensor, torch.full((300,), float(tensor[0])))
        assert tensor is not None, "the other snapshot is still good"
        assert tensor[0] == (2.0 if not is_newest or at < PAGE_BYTES else 1.0) or not said
        if at >= PAGE_BYTES and is_newest:
            assert tensor[0] == 1.0
        for f in files:
            put_back(f, kept[f.name])
    assert harmless < FLIPS / 2


def snapshot_of(file):
    return os.pread(file._descriptor, file.size, 0)


def put_back(file, data):
    os.pwrite(file._descriptor, data, 0)


def flip(file, at, mask):
    (byte,) = os.pread(file._descriptor, 1, at)
    os.pwrite(file._descriptor, bytes([byte ^ mask]), at)


def test_an_agent_holds_a_bounded_number_of_files_with_plain_names(memory):
    with pytest.raises(SnapshotError, match="can't hold") as told:
        memory().open("../x")
    assert "small letters" in told.value.why
    with pytest.raises(SnapshotError) as told:
        memory().open(*(f"f{i}" for i in range(MOST_FILES + 1)))
    assert str(MOST_FILES) in told.value.why


def test_memory_that_the_node_does_not_have_is_refused_and_not_a_signal(memory):
    (file,) = memory().open("data-00000.bin.a")
    with pytest.raises(NoRoomError, match="no memory"):
        file.begin(1 << 60)


def test_snapshots_that_fail_one_after_the_other_have_stopped_and_that_is_said_once(
    memory, world, capfd
):
    folder = HeldFolder(memory())
    saves = MemorySaves(MemorySettings(every_steps=1), crew_of(folder, world, 1), memory(), [0])
    for step in range(5):
        saves.refuse(saves.next_number(), step, SnapshotError("it can't be copied"))
    said = capfd.readouterr().err.splitlines()

    assert len(said) == 2, said
    assert "this snapshot in memory is left out" in said[0]
    assert "snapshots in memory have stopped: the last 3 have failed" in said[1]


def test_a_file_that_was_never_written_holds_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"torchmuster-held 1 crc32=00000000 bytes=9999\n")
    descriptor = os.open(path, os.O_RDWR)
    assert HeldFile("x", descriptor).part is None


@pytest.mark.parametrize(
    ("told", "want"),
    [
        ([[], []], None),
        ([[[1, 4, MANIFEST, {"a": [1, 2]}]], []], None),
        ([[[1, 4, MANIFEST, {"a": [1, 2]}]], [[1, 4, "a", None]]], (1, 4)),
        (
            [
                [[1, 9, MANIFEST, {"a": [1, 2], "b": [1, 2]}], [1, 9, "a", None]],
                [[1, 8, MANIFEST, {"a": [1, 2]}], [1, 8, "a", None]],
            ],
            (1, 8),
        ),
        (
            [
                [[2, 3, MANIFEST, {"a": [1, 2]}], [2, 3, "a", None]],
                [[1, 8, MANIFEST, {"a": [1, 2]}], [1, 8, "a", None]],
            ],
            (2, 3),
        ),
    ],
)
def test_the_newest_snapshot_of_which_every_part_is_somewhere(told, want):
    assert newest_whole(told, NOTHING) == want


def stands(*words):
    return [NodeSite(*word.split("/")) for word in words]


@pytest.mark.parametrize(
    ("nodes", "copies", "want"),
    [
        (stands("a/", "b/"), 1, [1]),
        (stands("a/", "b/", "c/"), 2, [1, 2]),
        (stands("a/s1", "b/s1", "c/s2", "d/s2"), 1, [2]),  # the next one is at the same switch
        (stands("a/", "a/", "b/", "b/"), 1, [2]),  # or on the same machine
        (stands("a/s1", "b/s2", "c/s1", "d/s2"), 1, [1]),
    ],
)
def test_copies_go_to_another_machine_and_another_switch_where_there_is_one(nodes, copies, want):
    assert choose_shifts(nodes, copies) == want


def test_what_shares_a_machine_is_said():
    assert describe_risk(stands("a/", "b/"), [1]) is None
    assert "2 nodes are on 1 machine" in describe_risk(stands("a/", "a/"), [1])
    assert "its workers" in describe_risk(stands("a/"), [])
    assert describe_risk(stands("a/", "a/", "b/", "b/"), [2]) is None
