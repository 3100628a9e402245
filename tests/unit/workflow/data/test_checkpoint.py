import contextlib
import hashlib
import os
import threading
import time

import pytest

from torchmuster.workflow.data.checkpoint import CheckpointUploader, read_checkpoint
from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.remote import open_store
from torchmuster.workflow.data.store import FileChangedError
from torchmuster.workflow.data.transfer import download


def settle(path):
    """Let a file look as if it had been written a while ago."""
    moment_ns = time.time_ns() - 10**9
    os.utime(path, ns=(moment_ns, moment_ns))


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    settle(path)


@contextlib.contextmanager
def in_a_thread(work):
    """Let `work(stop)` go on in a thread until it is told to stop."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def test_a_download_gets_the_files_of_the_last_whole_checkpoint(store_url, tree, tmp_path):
    write(tmp_path / "ck/snapshot.pth", b"1")
    write(tmp_path / "ck/log/x", b"same")
    uploader = CheckpointUploader(str(tmp_path / "ck"), store_url, 60)
    assert uploader.upload_once().sent_bytes == 5
    write(tmp_path / "ck/snapshot.pth", b"2")
    assert uploader.upload_once().sent_bytes == 1  # what has not changed is not sent again

    download(store_url, str(tmp_path / "back"))

    assert tree(tmp_path / "back") == {"snapshot.pth": b"2", "log/x": b"same"}


def test_nothing_new_makes_no_checkpoint(store_url, tmp_path):
    uploader = CheckpointUploader(str(tmp_path / "ck"), store_url, 60)
    assert uploader.upload_once().number is None
    write(tmp_path / "ck/a", b"1")

    assert [uploader.upload_once().number for _ in range(3)] == [1, None, None]


def test_the_last_three_are_kept_with_all_their_files(store_url, tmp_path):
    write(tmp_path / "ck/same", b"same")
    uploader = CheckpointUploader(str(tmp_path / "ck"), store_url, 60)
    for number in range(6):
        write(tmp_path / "ck/a", b"%d" % number)
        uploader.upload_once()

    names = [entry.name for entry in open_store(store_url).entries()]
    manifests = [name for name in names if name.startswith("checkpoint-") and "/" not in name]
    assert manifests == ["checkpoint-4.json", "checkpoint-5.json", "checkpoint-6.json"]
    assert len([name for name in names if name.endswith("/a")]) == 3
    download(store_url, str(tmp_path / "back"))
    assert (tmp_path / "back/same").read_bytes() == b"same"


def test_a_file_that_keeps_changing_is_left_out_with_a_sentence(store_url, tmp_path):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/busy").write_bytes(b"0")

    def keep_writing(stop):
        with open(tmp_path / "ck/busy", "r+b") as file:
            while not stop.wait(0.01):
                file.seek(0)
                file.write(os.urandom(4096))
                file.flush()

    uploader = CheckpointUploader(str(tmp_path / "ck"), store_url, 60, settle_s=0.5)
    with in_a_thread(keep_writing), pytest.raises(DataError, match="keeps changing") as caught:
        uploader.upload_once()

    assert caught.value.may_pass
    assert open_store(store_url).entries() == []


def test_a_stop_ends_the_wait_for_busy_files_and_the_last_round_has_the_whole_time(
    store_url, tmp_path, monkeypatch
):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/busy").write_bytes(b"0")
    stop, limit = threading.Event(), 60.0
    uploader = CheckpointUploader(str(tmp_path / "ck"), store_url, 0.01, settle_s=limit)
    looks = []

    def always_busy(file, known, folder, sent):
        looks.append(len(looks))
        if len(looks) == 3:
            stop.set()
        return None if len(looks) < 6 else send(file, known, folder, sent)

    send = uploader._send
    monkeypatch.setattr(uploader, "_send", always_busy)
    began = time.monotonic()

    assert uploader.run(stop).number == 1
    assert time.monotonic() - began < limit / 2
    assert len(looks) == 6  # three before the stop, then the last round until the file has settled


def test_a_torn_file_is_never_visible(store_url, tmp_path):
    """A writer rewrites its file in place, with pauses; what arrives always fits its own digest."""
    (tmp_path / "ck").mkdir()
    path = tmp_path / "ck/snapshot"

    def rewrite(stop):
        while not stop.is_set():
            with open(path, "r+b" if path.exists() else "w+b", buffering=0) as file:
                body = os.urandom(1 << 16) * 8
                file.write(hashlib.sha256(body).digest())
                for begin in range(0, len(body), 1 << 16):
                    file.write(body[begin : begin + (1 << 16)])
                    stop.wait(0.002)
            stop.wait(0.15)

    arrived, deadline_s = 0, time.monotonic() + 30
    uploader = CheckpointUploader(str(tmp_path / "ck"), store_url, 60, settle_s=0.3)
    with in_a_thread(rewrite):
        while arrived < 5:
            assert time.monotonic() < deadline_s
            with contextlib.suppress(FileChangedError):
                if uploader.upload_once().number is None:
                    continue
                arrived += 1
                download(store_url, str(tmp_path / "back"))
                data = (tmp_path / "back/snapshot").read_bytes()
                assert hashlib.sha256(data[32:]).digest() == data[:32]


def test_a_failed_round_is_told_and_the_last_one_is_an_error(store_url, tmp_path, flaky):
    write(tmp_path / "ck/a", b"1")
    notes, stop = [], threading.Event()

    def note(sentence):
        notes.append(sentence)
        stop.set()

    place = flaky(open_store(store_url), put=[PermissionError("no")] * 2)
    uploader = CheckpointUploader(str(tmp_path / "ck"), place, 0.01, note=note)

    with pytest.raises(DataError, match="denied"):
        uploader.run(stop)
    assert notes == ["the checkpoint was not uploaded: access was denied (no); retrying"]


def test_a_crash_before_the_pointer_leaves_the_last_checkpoint(store_url, tmp_path, flaky):
    write(tmp_path / "ck/a", b"1")
    CheckpointUploader(str(tmp_path / "ck"), store_url, 60).upload_once()
    write(tmp_path / "ck/a", b"2")
    place = flaky(open_store(store_url), write=[PermissionError("killed here")])

    with pytest.raises(DataError):
        CheckpointUploader(str(tmp_path / "ck"), place, 60).upload_once()

    download(store_url, str(tmp_path / "back"))
    assert (tmp_path / "back/a").read_bytes() == b"1"
    objects = {entry.name for entry in open_store(store_url).entries()}
    manifest = read_checkpoint(open_store(store_url), 2)
    assert {file.name for file in manifest.files.values()} <= objects
    # And the next one is not confused by what was left.
    CheckpointUploader(str(tmp_path / "ck"), store_url, 60).upload_once()
    download(store_url, str(tmp_path / "back"))
    assert (tmp_path / "back/a").read_bytes() == b"2"


def test_a_damaged_pointer_is_a_sentence(store_url, tmp_path):
    open_store(store_url).write("CHECKPOINT.json", b"{")

    with pytest.raises(DataError, match="damaged"):
        download(store_url, str(tmp_path / "back"))


def test_a_manifest_cannot_name_files_outside_of_its_place(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    place = open_store(str(tmp_path / "ck"))
    good = b'{"format": "muster-checkpoint-1", "number": 1, "created": "", "files": [{"name": "a", '
    digest = hashlib.sha256(b"secret").hexdigest().encode()
    rest = b'"object": "../secret", "size_bytes": 6, "mode": 420, "sha256": "%s"}]}' % digest
    place.write("checkpoint-1.json", good + rest)
    place.write("CHECKPOINT.json", b'{"format": "muster-checkpoint-1", "number": 1}')

    with pytest.raises(DataError, match="damaged"):
        download(str(tmp_path / "ck"), str(tmp_path / "back"))
