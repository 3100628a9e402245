import json
import os
import signal
import subprocess
import threading

import pytest

from kit.waiting import wait_until
from torchmuster.workflow.data import faults
from torchmuster.workflow.data.checkpoint import CheckpointUploader
from torchmuster.workflow.data.dataset import DatasetStore
from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.remote import open_store
from torchmuster.workflow.data.transfer import download, upload

MIB = 1 << 20
DATA = ("-m", "torchmuster.workflow.data")


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "folder"
    (place / "deep/er").mkdir(parents=True)
    (place / "a.txt").write_bytes(b"a")
    (place / "empty").write_bytes(b"")
    (place / "deep/er/b[1] *?.bin").write_bytes(os.urandom(9 * MIB + 1))
    return place


def test_a_folder_comes_back_as_it_was_sent(bucket, folder, tmp_path):
    upload(str(folder), f"{bucket}/some/where")

    download(f"{bucket}/some/where", str(tmp_path / "back"))

    assert tree(tmp_path / "back") == tree(folder)


def test_what_is_there_is_not_moved_again(bucket, folder, tmp_path):
    upload(str(folder), f"{bucket}/x")
    download(f"{bucket}/x", str(tmp_path / "back"))

    assert upload(str(folder), f"{bucket}/x").num_skipped == 3
    assert download(f"{bucket}/x", str(tmp_path / "back")).num_skipped == 3


def test_a_file_that_was_changed_in_the_store_is_fetched_again(bucket, folder, tmp_path):
    upload(str(folder), f"{bucket}/x")
    download(f"{bucket}/x", str(tmp_path / "back"))
    (folder / "a.txt").write_bytes(b"b")
    upload(str(folder), f"{bucket}/x")

    moved = download(f"{bucket}/x", str(tmp_path / "back"))

    assert moved.num_skipped == 2
    assert (tmp_path / "back/a.txt").read_bytes() == b"b"


def test_a_regex_is_matched_from_the_start_of_the_relative_path(bucket, folder, tmp_path):
    upload(str(folder), f"{bucket}/x")

    download(f"{bucket}/x", str(tmp_path / "back"), regex=r"deep/|.*\.txt")

    assert set(tree(tmp_path / "back")) == {"a.txt", "deep/er/b[1] *?.bin"}


def test_a_prefix_that_another_name_begins_with_is_not_mixed_up(bucket, folder, tmp_path):
    place = open_store(bucket)
    place.write("run/a", b"1")
    place.write("run-2/a", b"2")

    download(f"{bucket}/run", str(tmp_path / "back"))

    assert tree(tmp_path / "back") == {"a": b"1"}


def test_one_object_is_downloaded_under_its_own_name(bucket, tmp_path):
    open_store(bucket).write("deep/model.pth", b"model")

    download(f"{bucket}/deep/model.pth", str(tmp_path / "back"))

    assert tree(tmp_path / "back") == {"model.pth": b"model"}


def test_a_name_that_leads_out_of_the_folder_writes_nothing(bucket, tmp_path):
    place = open_store(bucket)
    place.write("x/good", b"1")
    place.write("x/a/../../../evil", b"2")

    with pytest.raises(DataError, match="unsafe") as caught:
        download(f"{bucket}/x", str(tmp_path / "back"))

    assert "outside the folder" in caught.value.why
    assert not caught.value.may_pass
    assert not (tmp_path / "back").exists()


def test_a_missing_bucket_is_said_without_another_try(s3_env, bucket, monkeypatch):
    monkeypatch.setattr(faults, "_FIRST_PAUSE_S", 3600.0)

    with pytest.raises(DataError) as caught:
        upload(__file__, "s3://no-such-bucket/x")

    assert not caught.value.may_pass
    assert "no such file, folder or bucket" in caught.value.what


def test_a_download_that_was_killed_goes_on_where_it_was(bucket, tmp_path, python):
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "0-first").write_bytes(b"first")
    (sent / "1-large").write_bytes(os.urandom(64 * MIB))
    upload(str(sent), f"{bucket}/x")
    back = tmp_path / "back"
    words = [*DATA, "download", f"{bucket}/x", "--to", str(back)]
    part = back / ".1-large.muster.part"

    child = python(*words, "--parallel", "1", stdout=subprocess.DEVNULL)

    def far_enough():
        assert child.poll() is None, "it ended before it could be killed"
        return part.exists() and part.stat().st_size >= 8 * MIB

    wait_until(far_enough, "8 MiB")
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    kept = part.stat().st_size
    first = (back / "0-first").stat().st_mtime_ns
    asked, store = [], open_store(f"{bucket}/x")
    read = store._read
    store._read = lambda name, begin, end: asked.append(begin) or read(name, begin, end)
    moved = download(store, str(back))

    assert moved.num_skipped == 1
    assert min(asked) == kept > 0
    assert (back / "0-first").stat().st_mtime_ns == first
    assert tree(back) == tree(sent)


def test_two_processes_that_upload_one_dataset_make_two_versions(bucket, folder, python):
    words = [*DATA, "dataset-upload", "--name", "d", "--from", str(folder)]
    words += ["--store", f"{bucket}/sets"]
    children = [python(*words, stdout=subprocess.PIPE) for _ in range(2)]
    ends = [json.loads(child.communicate(timeout=180)[0].splitlines()[-1]) for child in children]

    assert {end["done"]["version"] for end in ends} == {1, 2}
    store = DatasetStore(f"{bucket}/sets")
    assert store.info("d:1").checksum == store.info("d:2").checksum


def test_many_writers_at_once_each_get_a_number_of_their_own(bucket, tmp_path):
    store, numbers = DatasetStore(f"{bucket}/sets"), []
    (tmp_path / "one").write_bytes(b"1")
    threads = [
        threading.Thread(target=lambda: numbers.append(store.upload("d", str(tmp_path / "one"))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]


def test_an_unchanged_file_is_stored_once(bucket, folder):
    store = DatasetStore(f"{bucket}/sets")
    store.upload("d", str(folder))
    before = open_store(f"{bucket}/sets").entries("objects")
    (folder / "new").write_bytes(b"new")
    store.upload("d", str(folder))
    after = open_store(f"{bucket}/sets").entries("objects")

    assert len(after) == len(before) + 1
    assert {entry.tag for entry in before} < {entry.tag for entry in after}


def test_a_damaged_object_is_found_and_never_delivered(bucket, folder, tmp_path):
    store = DatasetStore(f"{bucket}/sets")
    store.upload("d", str(folder))
    file = store.info("d").files["a.txt"]
    place = open_store(f"{bucket}/sets")
    place.write(f"objects/{file.sha256[:2]}/{file.sha256}", b"X")

    assert store.verify("d") == ["`a.txt`: its object is damaged"]
    with pytest.raises(DataError, match="damaged in the store"):
        store.download("d", str(tmp_path / "back"))
    assert not (tmp_path / "back/a.txt").exists()


def test_checkpoints_are_downloaded_under_their_plain_names(bucket, tmp_path):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/snapshot.pth").write_bytes(b"one")
    uploader = CheckpointUploader(str(tmp_path / "ck"), f"{bucket}/ck", 60)
    uploader.upload_once()
    (tmp_path / "ck/snapshot.pth").write_bytes(b"two")
    uploader.upload_once()

    download(f"{bucket}/ck", str(tmp_path / "back"))

    assert tree(tmp_path / "back") == {"snapshot.pth": b"two"}


def test_the_checkpoint_process_uploads_once_more_at_the_end_of_its_input(bucket, tmp_path, python):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/snapshot.pth").write_bytes(b"last")
    words = [*DATA, "checkpoint", "--path", str(tmp_path / "ck")]
    words += ["--url", f"{bucket}/ck", "--frequency-s", "3600"]
    child = python(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = child.communicate("", timeout=180)

    assert child.returncode == 0
    assert json.loads(out.splitlines()[-1])["done"]["number"] == 1
    download(f"{bucket}/ck", str(tmp_path / "back"))
    assert tree(tmp_path / "back") == {"snapshot.pth": b"last"}


def test_denied_and_missing_end_the_process_with_11(bucket, tmp_path, python):
    words = [*DATA, "download", f"{bucket}/none", "--to", str(tmp_path / "x")]
    child = python(*words, stdout=subprocess.PIPE)
    out, _ = child.communicate(timeout=180)

    assert child.returncode == 11
    assert json.loads(out)["error"]["what"] == "there is nothing to download"
