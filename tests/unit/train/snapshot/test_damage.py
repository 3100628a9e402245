"""A changed byte anywhere in a snapshot is found, named, and costs only that snapshot."""

import errno
import os
import random
from pathlib import Path

import pytest
import torch

from kit.waiting import Clock
from torchmuster.train.snapshot.folder import LocalFolder
from torchmuster.train.snapshot.layout import MANIFEST
from torchmuster.train.snapshot.load import Patience
from torchmuster.train.snapshot.state import (
    NoGoodSnapshotError,
    SnapshotError,
    UnreadableError,
    unpack,
)
from unit.train.snapshot.making import DATA, read_newest, save, state_of

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


def test_when_none_is_good_nothing_is_renamed_and_every_start_says_the_same(folder):
    path_of(folder, 1, DATA).write_bytes(b"x")
    path_of(folder, 2, MANIFEST).unlink()
    before = sorted(p.name for p in Path(folder.url).iterdir())
    for _ in range(3):
        with pytest.raises(NoGoodSnapshotError, match="no good snapshot") as caught:
            read_newest(folder, pytest.fail)
        assert caught.value.muster_final
        assert f"mv {folder.url} {folder.url}-damaged" in caught.value.fix
    assert sorted(p.name for p in Path(folder.url).iterdir()) == before


def test_a_folder_with_nothing_but_what_was_set_aside_is_no_beginning(folder):
    folder.set_aside(1)
    folder.set_aside(2)
    with pytest.raises(NoGoodSnapshotError, match="no good snapshot") as caught:
        read_newest(folder, pytest.fail)
    assert "bad-step-000000001 was set aside as damaged before" in caught.value.why


class Faulty(LocalFolder):
    """Gives an error from a draw of its reads and looks, a number of times."""

    def __init__(self, path, number, times):
        super().__init__(path)
        self.number, self.times, self.renamed = number, times, []

    def fail(self):
        if self.times:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))

    def size(self, step, name):
        self.fail()
        return super().size(step, name)

    def read_into(self, step, name, buffer, begin=0):
        self.fail()
        return super().read_into(step, name, buffer, begin)

    def set_aside(self, step):
        self.renamed.append(step)
        return super().set_aside(step)


def patience(said, clock):
    return Patience(said.append, limit_s=60.0, wait=clock.wait, clock=clock)


READING = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT)


@pytest.mark.parametrize("number", READING)
def test_a_storage_that_recovers_costs_no_snapshot(folder, number):
    said, clock = [], Clock(0.0)
    faulty = Faulty(folder.url, number, times=random.Random(number).randint(1, 12))
    assert read_newest(faulty, pytest.fail, patience(said, clock)).manifest.step == 2
    assert faulty.renamed == []
    assert clock.now <= 60.0
    (words,) = said
    assert f"can't be read ({os.strerror(number)}): trying again for up to 60 s" in words


@pytest.mark.parametrize("number", [*READING, errno.EACCES, errno.EPERM])
def test_a_storage_that_gives_only_errors_is_not_taken_for_damage(folder, number):
    faulty, clock = Faulty(folder.url, number, times=-1), Clock(0.0)
    for _ in range(2):
        with pytest.raises(UnreadableError) as caught:
            read_newest(faulty, pytest.fail, patience([], clock))
        assert caught.value.why == os.strerror(number)
        assert not caught.value.muster_final
    assert faulty.renamed == []
    assert faulty.steps() == [2, 1]
    # Rights do not come back by waiting.
    assert (clock.now == 0) == (number in (errno.EACCES, errno.EPERM))


def test_a_folder_that_goes_away_while_it_is_read_proves_no_damage(folder):
    away = Path(folder.url).with_name("away")

    class Leaving(LocalFolder):
        def size(self, step, name):
            if not away.exists():
                Path(self.url).rename(away)
            return super().size(step, name)

    with pytest.raises(UnreadableError):
        read_newest(Leaving(folder.url), pytest.fail, patience([], Clock(0.0)))
    assert LocalFolder(str(away)).steps() == [2, 1]


@pytest.mark.parametrize("name", [DATA, MANIFEST])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_what_is_not_a_plain_file_is_damage_and_never_waited_for(folder, name, make):
    path_of(folder, 2, name).unlink()
    make(path_of(folder, 2, name))
    check_found(folder, name)
