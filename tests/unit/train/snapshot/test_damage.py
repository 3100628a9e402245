"""A changed byte anywhere in a snapshot is found, named, and costs only that snapshot."""

import random
from pathlib import Path

import pytest
import torch

from torchmuster.train.snapshot.folder import LocalFolder
from torchmuster.train.snapshot.layout import MANIFEST
from torchmuster.train.snapshot.load import read_newest
from torchmuster.train.snapshot.state import SnapshotError, unpack
from unit.train.snapshot.making import DATA, save, state_of

NUM_HARMS = 1000


@pytest.fixture
def folder(tmp_path):
    """Return a folder with good snapshots of steps 1 and 2."""
    made = LocalFolder(str(tmp_path))
    save(made, 1)
    save(made, 2)
    return made


def path_of(folder, step, name):
    return Path(folder.url) / f"step-{step:09d}" / name


def flip(raw, draw):
    harmed = bytearray(raw)
    harmed[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    return bytes(harmed)


def truncate(raw, draw):
    return raw[: draw.randrange(len(raw))]


def zero(raw, draw):
    """Return what a file system may leave after a power cut: a tail of zeros."""
    begin = draw.randrange(len(raw.rstrip(b"\0")))
    return raw[:begin] + bytes(len(raw) - begin)


def lengthen(raw, draw):
    return raw + draw.randbytes(draw.randint(1, 9))


HARMS = (flip, flip, flip, flip, flip, flip, truncate, truncate, zero, lengthen)


def check_found(folder, name):
    """Load; see that step 2's file was named and set aside, and step 1 is what was saved."""
    said = []
    loaded = read_newest(folder, said.append)
    assert loaded is not None
    assert loaded.manifest.step == 1
    values = unpack(loaded.manifest.state["model"], loaded.tensors())
    assert torch.equal(values["weight"], state_of(1)["model"]["weight"])
    (words,) = said
    assert "error: snapshot step-000000002 is damaged" in words
    assert f"at: {path_of(folder, 2, name)}\n" in words
    assert "hint: it was set aside as bad-step-000000002" in words


def test_a_thousand_flips_and_truncations_are_found_and_named(folder):
    draw = random.Random(7)
    whole = {name: path_of(folder, 2, name).read_bytes() for name in (DATA, MANIFEST)}
    bad = Path(folder.url) / "bad-step-000000002"
    for number in range(NUM_HARMS):
        name = draw.choice(sorted(whole))
        harm = HARMS[number % len(HARMS)]
        path_of(folder, 2, name).write_bytes(harm(whole[name], draw))
        check_found(folder, name)
        assert sorted(p.name for p in bad.iterdir()) == sorted(whole)
        (bad / name).write_bytes(whole[name])
        bad.rename(path_of(folder, 2, "x").parent)
    assert read_newest(folder, pytest.fail).manifest.step == 2


@pytest.mark.parametrize("name", [DATA, MANIFEST])
def test_a_missing_file_is_found_and_named(folder, name):
    path_of(folder, 2, name).unlink()
    check_found(folder, name)


def test_a_file_that_is_a_directory_is_found_and_named(folder):
    path_of(folder, 2, DATA).unlink()
    path_of(folder, 2, DATA).mkdir()
    check_found(folder, DATA)


def test_a_snapshot_under_another_steps_name_is_found(folder):
    path_of(folder, 1, "x").parent.rename(path_of(folder, 3, "x").parent)
    said = []
    assert read_newest(folder, said.append).manifest.step == 2
    assert "the manifest is that of step 1" in said[0]


def test_two_damaged_ones_of_a_step_are_both_kept(folder):
    for _ in range(2):
        path_of(folder, 2, DATA).write_bytes(b"x")
        check_found(folder, DATA)
        save(folder, 2)
    names = sorted(p.name for p in Path(folder.url).iterdir())
    assert names == [
        "bad-step-000000002",
        "bad-step-000000002-2",
        "step-000000001",
        "step-000000002",
    ]


def test_when_none_is_good_the_run_does_not_begin_anew_in_silence(folder):
    path_of(folder, 1, DATA).write_bytes(b"x")
    path_of(folder, 2, MANIFEST).write_bytes(b"x")
    with pytest.raises(SnapshotError, match="no good snapshot") as caught:
        read_newest(folder, lambda _: None)
    assert f"step-000000002/{MANIFEST}" in caught.value.why
    assert f"step-000000001/{DATA}" in caught.value.why


def test_an_empty_folder_is_no_error(tmp_path):
    assert read_newest(LocalFolder(str(tmp_path / "none")), pytest.fail) is None
