"""Folders: whole or not there, on a disk and on an object store; older starts may not commit."""

import functools
import os
from pathlib import Path

import pytest

from torchmuster.train.snapshot import folder as fileops
from torchmuster.train.snapshot.folder import LocalFolder, UrlFolder, open_folder
from torchmuster.train.snapshot.layout import MANIFEST
from torchmuster.train.snapshot.state import SnapshotError
from torchmuster.train.snapshot.writer import keep_newest
from unit.train.snapshot.making import DATA, read_newest, save


@pytest.fixture
def memory():
    """Return the URL of an object store in memory, empty before and after."""
    import fsspec

    yield "memory://muster/run[1]*"
    fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path, memory):
    return open_folder(str(tmp_path / "snapshots") if request.param == "local" else memory)


def file_of(folder, step, name):
    buffer = bytearray(folder.size(step, name))
    assert folder.read_into(step, name, memoryview(buffer)) == len(buffer)
    return bytes(buffer)


def test_the_kind_of_the_folder_follows_from_the_url(tmp_path, memory):
    assert isinstance(open_folder(str(tmp_path)), LocalFolder)
    assert isinstance(open_folder(memory), UrlFolder)
    assert open_folder(f"file://{tmp_path}").url == str(tmp_path)


def test_a_url_that_nothing_here_knows_is_refused():
    with pytest.raises(SnapshotError, match="kind of URL") as caught:
        open_folder("nosuch://bucket/run")
    assert caught.value.where == "nosuch://bucket/run"


def test_what_was_saved_is_listed_the_newest_first_and_loads(folder):
    for step in (1, 10, 2):
        save(folder, step)
    assert folder.steps() == [10, 2, 1]
    assert read_newest(folder, pytest.fail).manifest.step == 10


def test_each_start_takes_a_higher_number(folder):
    assert folder.newest_generation() == 0
    assert [folder.claim_generation() for _ in range(3)] == [1, 2, 3]
    assert folder.claim_generation(at_least=9) == 9
    assert folder.newest_generation() == 9
    assert folder.exists_here("generation-9")
    assert not folder.exists_here("generation-10")


def test_two_starts_at_once_never_take_the_same_number(tmp_path, monkeypatch):
    """The second start claims between the first one's look and its own claim."""
    first, second = LocalFolder(str(tmp_path)), LocalFolder(str(tmp_path))
    taken = []

    def come_between(operation, _path):
        if operation == "claim" and not taken:
            taken.append(None)
            taken[0] = second.claim_generation()

    monkeypatch.setattr(fileops, "before", come_between)
    assert first.claim_generation() == 2
    assert taken == [1]


def test_an_older_start_cannot_commit_and_touches_nothing_of_the_newer(folder):
    old, new = folder.claim_generation(), folder.claim_generation()
    save(folder, 4, generation=new)
    before = {name: file_of(folder, 4, name) for name in (DATA, MANIFEST)}
    for step in (4, 5):
        with pytest.raises(SnapshotError, match=f"generation {new}, ours is {old}"):
            save(folder, step, generation=old)
    assert folder.steps() == [4]
    assert {name: file_of(folder, 4, name) for name in before} == before


def test_an_older_start_that_was_in_the_middle_of_a_save_cannot_commit(folder):
    old = folder.claim_generation()
    folder.begin(7, old)
    sink = folder.create(7, old, DATA)
    new = folder.claim_generation()
    sink.finish()
    with pytest.raises(SnapshotError, match="a newer start"):
        folder.commit(7, old, b"a manifest")
    save(folder, 7, generation=new)
    assert read_newest(folder, pytest.fail).manifest.generation == new


def test_without_its_manifest_nothing_is_committed_on_an_object_store(memory):
    folder = open_folder(memory)
    folder.begin(3, 1)
    sink = folder.create(3, 1, DATA)
    sink.write(b"data")
    sink.finish()
    assert folder.steps() == []
    folder.commit(3, 1, b"a manifest")
    assert folder.steps() == [3]


def test_the_manifest_is_the_last_file_on_an_object_store(memory, monkeypatch):
    folder, written = open_folder(memory), []
    store = folder._store._fs
    pipe, open_ = store.pipe_file, store.open
    record = {"pipe_file": pipe, "open": open_}
    for name, method in record.items():

        @functools.wraps(method)
        def call(path, *args, method=method, **kwargs):
            written.append(path.rsplit("/", 1)[-1])
            return method(path, *args, **kwargs)

        monkeypatch.setattr(store, name, call)
    save(folder, 3)
    assert written[0] == DATA
    assert MANIFEST not in written[: written.index(DATA) + 1]
    assert folder.steps() == [3]


def test_what_was_left_half_written_is_tidied_by_the_next_start(folder):
    generation = folder.claim_generation()
    save(folder, 1, generation=generation)
    folder.begin(2, generation)
    folder.create(2, generation, DATA).finish()
    folder.tidy(folder.claim_generation())
    assert folder.steps() == [1]
    if isinstance(folder, LocalFolder):
        assert sorted(os.listdir(folder.url)) == ["generation-2", "step-000000001"]
    else:
        assert not folder._store._fs.exists(f"{folder._store._root}/step-000000002")


def test_an_object_store_that_gives_errors_loses_nothing_by_tidying(memory, monkeypatch):
    """fsspec's exists() takes any error for an absence."""
    folder = open_folder(memory)
    save(folder, 1)

    def fail(*_args, **_kwargs):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(folder._store._fs, "exists", lambda *_: False)
        folder.tidy(folder.claim_generation())
        patch.setattr(folder._store._fs, "ls", fail)
        with pytest.raises(OSError, match="Input/output"):
            folder.tidy(2)
    assert folder.steps() == [1]
    assert read_newest(folder, pytest.fail).manifest.step == 1


def test_tidying_leaves_the_own_generation_and_other_peoples_files_alone(tmp_path):
    folder = LocalFolder(str(tmp_path))
    for name in (".step-000000002.3.tmp", ".step-000000001.deleted", ".step-000000002.2.tmp"):
        (tmp_path / name).mkdir()
    for name in ("notes.txt", "step-9", ".step-x.1.tmp", "generation-3"):
        (tmp_path / name).touch()
    folder.tidy(3)
    kept = [".step-000000002.3.tmp", ".step-x.1.tmp", "generation-3", "notes.txt", "step-9"]
    assert sorted(os.listdir(tmp_path)) == kept
    assert folder.steps() == []


@pytest.mark.parametrize("keep", [-1, 0, 1, 2, 99])
def test_retention_never_deletes_the_last_one(folder, keep):
    for step in (1, 2, 3):
        save(folder, step)
        keep_newest(folder, keep)
    left = max(min(keep, 3), 1)
    assert folder.steps() == [3, 2, 1][:left]
    assert read_newest(folder, pytest.fail).manifest.step == 3


def test_signs_of_a_pattern_in_a_url_touch_no_other_folder(memory):
    """fsspec's rm() and copy() take them for one."""
    patterned, other = open_folder(memory), open_folder("memory://muster/run1")
    for folder in (patterned, other):
        save(folder, 1)
        save(folder, 2)
    patterned.delete(1)
    patterned.set_aside(2)
    assert patterned.steps() == []
    assert other.steps() == [2, 1]
    assert read_newest(other, pytest.fail).manifest.step == 2


def test_saves_keep_as_many_as_were_asked_for(folder):
    for step in range(1, 7):
        save(folder, step, keep=2)
    assert folder.steps() == [6, 5]


def test_a_damaged_one_is_set_aside_and_outlives_the_next_starts(folder):
    generation = folder.claim_generation()
    save(folder, 1, generation=generation)
    save(folder, 2, generation=generation)
    before = {name: file_of(folder, 2, name) for name in (DATA, MANIFEST)}
    bad = folder.set_aside(2)
    assert folder.steps() == [1]
    generation = folder.claim_generation()
    folder.tidy(generation)
    save(folder, 2, generation=generation, keep=1)
    assert folder.steps() == [2]
    assert {name: _set_aside_file(folder, bad, name) for name in before} == before


def _set_aside_file(folder, bad, name):
    if isinstance(folder, LocalFolder):
        return (Path(folder.url) / bad / name).read_bytes()
    return folder._store._fs.cat_file(f"{folder._store._root}/{bad}/{name}")


def test_a_step_that_is_done_again_does_not_overwrite(tmp_path):
    folder = LocalFolder(str(tmp_path))
    save(folder, 5)
    save(folder, 5)
    assert folder.steps() == [5]
    assert "bad-step-000000005" in os.listdir(folder.url)


def test_a_folder_that_is_a_file_is_an_error_in_words(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="can't be read"):
        LocalFolder(str(tmp_path / "file")).steps()


def test_a_file_beyond_its_end_gives_what_there_is(folder):
    save(folder, 1)
    size = folder.size(1, DATA)
    assert folder.read_into(1, DATA, memoryview(bytearray(50)), size - 20) == 20


def test_a_folder_that_has_vanished_is_said_and_not_made_anew(tmp_path):
    folder = LocalFolder(str(tmp_path / "run" / "snapshots"))
    generation = folder.claim_generation()
    (tmp_path / "run").rename(tmp_path / "gone")
    with pytest.raises(SnapshotError, match="has vanished, so step 4 is not saved") as caught:
        folder.begin(4, generation)
    assert caught.value.where == folder.url
    assert not (tmp_path / "run").exists()
