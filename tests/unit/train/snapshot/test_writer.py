"""A save that fails says so in words, frees its space, and leaves older snapshots whole."""

import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchmuster.core.model.text import render_report, report_of_error
from torchmuster.train.snapshot import folder as fileops
from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.folder import LocalFolder
from torchmuster.train.snapshot.layout import MANIFEST
from torchmuster.train.snapshot.state import ChangedError, SnapshotError
from torchmuster.train.snapshot.writer import Saver
from unit.train.snapshot.making import DATA, crew_of, order_of, read_newest, save, state_of


class FullSink:
    """A file on a disk with room for so many bytes more."""

    def __init__(self, room, fails_in="write"):
        self.room, self.fails_in = room, fails_in

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finish(self):
        if self.fails_in == "finish":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


class FullFolder(LocalFolder):
    """A folder whose data files end in a full disk."""

    def __init__(self, path, sink):
        super().__init__(path)
        self.sink = sink

    def create(self, step, generation, name):
        super().create(step, generation, name).finish()
        return self.sink


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        (FullSink(room=0), "No space left on device"),
        (FullSink(room=200), "No space left on device"),  # the data fit, the manifest does not
        (FullSink(room=10_000, fails_in="finish"), "quota exceeded"),
    ],
)
def test_a_full_disk_gives_words_and_leaves_older_snapshots_whole(tmp_path, sink, words):
    save(LocalFolder(str(tmp_path)), 1)
    with pytest.raises(SnapshotError) as caught:
        save(FullFolder(str(tmp_path), sink), 2)
    report = render_report(report_of_error(caught.value))
    assert "error: the snapshot of step 2 could not be written" in report
    assert f"at: {tmp_path}" in report
    assert "because: " in report
    assert words in report
    assert "hint: free some space, or choose another place with folder=..." in report
    assert os.listdir(tmp_path) == ["step-000000001"]  # what was half written is gone
    assert read_newest(LocalFolder(str(tmp_path)), pytest.fail).manifest.step == 1


OPERATIONS = ("mkdir", "create", "write", "fsync", "fsync directory", "rename")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_error_of_any_file_operation_leaves_older_snapshots_whole(
    tmp_path, monkeypatch, operation
):
    folder = LocalFolder(str(tmp_path))
    save(folder, 1)

    def fail(doing, _path):
        if doing == operation:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fileops, "before", fail)
    with pytest.raises(SnapshotError, match="could not be written") as caught:
        save(folder, 2)
    assert "Input/output error" in caught.value.why
    assert "older snapshots are intact" in caught.value.fix
    assert folder.steps() == [1]
    assert read_newest(folder, pytest.fail).manifest.step == 1


@pytest.fixture
def small_disk(tmp_path):
    """Return a file system of 256 KiB; needs root."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, and the right to mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_disk_that_is_really_full_frees_its_space_again(small_disk):
    folder = LocalFolder(str(small_disk))
    save(folder, 1)
    big = {"model": {"weight": torch.ones(1 << 17)}}
    for step in (2, 3):
        with pytest.raises(SnapshotError, match="could not be written") as caught:
            save(folder, step, state=big)
        assert "No space left on device (0.5 MB were to be written)" in caught.value.why
    save(folder, 4)
    assert folder.steps() == [4, 1]
    assert read_newest(folder, pytest.fail).manifest.step == 4


def test_the_checksum_beside_the_write_is_that_of_the_file(tmp_path):
    """Above 8 MiB it is computed in a thread of its own."""
    folder = LocalFolder(str(tmp_path))
    weight = torch.arange(5 << 20, dtype=torch.float32)
    save(folder, 1, state={"model": {"weight": weight}})
    loaded = read_newest(folder, pytest.fail)
    assert torch.equal(loaded.tensors()["model.weight"], weight)


# Several ranks.


def write_on(crews, orders):
    """Write on several ranks at once; return what each raised."""
    errors = [None] * len(crews)

    def run(index):
        try:
            writer.write(crews[index], orders[index])
        except SnapshotError as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(crews))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
        assert not thread.is_alive(), "a rank waits for another that has failed"
    return errors


def two_ranks(folders, **more):
    store = dist.HashStore()
    return [
        crew_of(folder, rank=rank, world_size=2, store=store, timeout_s=120.0, **more)
        for rank, folder in enumerate(folders)
    ]


def copying_ranks(tmp_path):
    """Return two ranks with a folder each, which keep copies of what rank 0 saves."""
    folders = [LocalFolder(str(tmp_path / str(rank))) for rank in range(2)]
    for folder in folders:
        folder.claim_generation()
    return folders, two_ranks(folders, copies=True)


def sharded_orders(step, number):
    return [
        order_of(
            step,
            {"model": {f"of{rank}": torch.full((2,), float(step))}},
            kind="sharded",
            file=f"data-{rank:05d}.bin",
            number=number,
        )
        for rank in range(2)
    ]


def test_two_writers_make_one_snapshot(tmp_path):
    folder = LocalFolder(str(tmp_path))
    crews = two_ranks([folder, folder])
    for number in range(3):
        assert write_on(crews, sharded_orders(number + 1, number)) == [None, None]
        writer.wait_for_outcome(crews[1], number)
    manifest = read_newest(folder, pytest.fail).manifest
    assert sorted(manifest.files) == ["data-00000.bin", "data-00001.bin"]
    assert sorted(manifest.tensors) == ["model.of0", "model.of1"]
    assert sorted(manifest.ranks) == [0, 1]


def test_the_keys_of_a_save_are_gone_from_the_store_after_the_next(tmp_path):
    """They hold the generators' states: a long run would fill the store's memory."""
    folders, crews = copying_ranks(tmp_path)
    sizes = []
    for number in range(4):
        orders = [order_of(number, state_of(number), number=number) for _ in range(2)]
        assert write_on(crews, orders) == [None, None]
        sizes.append(crews[0].store.num_keys())
    assert sizes[1:] == [sizes[1]] * 3
    assert [folder.steps() for folder in folders] == [[3, 2, 1]] * 2


def test_a_copy_does_not_wait_for_the_buffers_of_a_rank_0_that_gave_up(tmp_path):
    """Its loop would wait, too, while rank 0 is in the next step: nothing would move any more."""
    folders, crews = copying_ranks(tmp_path)
    writer.refuse(crews[0], 0, 1, ChangedError("a parameter was changed"))
    other = Saver(crews[1])
    other.submit(order_of(1, state_of(1), number=0, buffers=((0, 8),)))
    with pytest.raises(SnapshotError) as caught:
        other.wait()
    assert caught.value.what == "rank 0 gave the snapshot of step 1 up"
    assert caught.value.why == "a parameter was changed"
    assert folders[1].steps() == []


@pytest.mark.parametrize("kind", ["begin", "data", "commit"])
def test_the_other_ranks_hear_at_once_that_rank_0_failed(tmp_path, kind):
    class Failing(LocalFolder):
        def begin(self, step, generation):
            self._fail("begin")
            super().begin(step, generation)

        def create(self, step, generation, name):
            self._fail("commit" if name == MANIFEST else "data")
            return super().create(step, generation, name)

        def _fail(self, at):
            if at == kind:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    crews = two_ranks([Failing(str(tmp_path)), LocalFolder(str(tmp_path))])
    mine, other = write_on(crews, sharded_orders(1, 0))
    assert "No space left" in mine.why
    if other is not None:
        assert "No space left" in other.why or "No such file" in other.why
    with pytest.raises(SnapshotError, match="rank 0 could not commit"):
        writer.wait_for_outcome(crews[1], 0)
    crews[0] = crew_of(LocalFolder(str(tmp_path)), rank=0, world_size=2, store=crews[1].store)
    assert write_on(crews, sharded_orders(2, 1)) == [None, None]


def test_a_rank_that_cannot_write_is_named_by_rank_0(tmp_path):
    folders = [LocalFolder(str(tmp_path)), FullFolder(str(tmp_path), FullSink(room=0))]
    mine, other = write_on(two_ranks(folders), sharded_orders(1, 0))
    assert "rank 1 could not write its part" in mine.what
    assert "No space left" in mine.why
    assert "No space left" in other.why
    assert os.listdir(tmp_path) == []


def test_an_error_that_nobody_foresaw_is_told_to_rank_0_too(tmp_path):
    class Odd(LocalFolder):
        def create(self, step, generation, name):
            raise ZeroDivisionError("odd")

    crews = two_ranks([LocalFolder(str(tmp_path)), Odd(str(tmp_path))])
    savers = [Saver(crew) for crew in crews]
    for saver, order in zip(savers, sharded_orders(1, 0), strict=True):
        saver.submit(order)
    with pytest.raises(SnapshotError, match="rank 1 could not write") as caught:
        savers[0].wait()
    assert "ZeroDivisionError" in caught.value.why
    with pytest.raises(SnapshotError, match="step 1 failed"):
        savers[1].wait()


def test_a_rank_that_never_comes_is_waited_for_so_long_only(tmp_path):
    crew = crew_of(LocalFolder(str(tmp_path)), world_size=2, timeout_s=0.1)
    with pytest.raises(SnapshotError, match="given up") as caught:
        writer.write(crew, order_of(1, state_of(1), number=0))
    assert "did not arrive within 0.1 s" in caught.value.why
    with pytest.raises(SnapshotError, match="could not commit"):
        writer.wait_for_outcome(crew, 0)
    with pytest.raises(SnapshotError, match="did not confirm"):
        writer.wait_for_outcome(crew, 1)


# The saver.


def test_a_background_error_is_raised_once(tmp_path):
    saver = Saver(crew_of(FullFolder(str(tmp_path), FullSink(room=0))))
    saver.submit(order_of(1, state_of(1)))
    with pytest.raises(SnapshotError, match="could not be written"):
        saver.wait()
    saver.wait()
    saver.check()


def test_a_saver_is_busy_until_its_write_has_ended(tmp_path, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(fileops, "before", lambda *_: go_on.wait(20))
    saver = Saver(crew_of(LocalFolder(str(tmp_path))))
    saver.submit(order_of(4, state_of(4)))
    assert saver.is_busy
    go_on.set()
    saver.wait()
    assert not saver.is_busy
    assert saver.last_s > 0
    assert (Path(tmp_path) / "step-000000004" / DATA).exists()
