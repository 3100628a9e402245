"""A reader gets everything, however slow; who writes never waits for him."""

import os
import threading

import pytest

from torchmuster.core.files import disk as writing
from torchmuster.core.files.disk import Backlog, DiskWriter, PatientWriter

BLOCK = b"".join(b"%09d\n" % n for n in range(100_000))


@pytest.fixture
def disk():
    writer = DiskWriter()
    writer.start()
    return writer


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as reader, open(write_fd, "wb") as writer:
        yield reader, writer


def start_writer(fd, disk, folder):
    lost = []
    waiting = Backlog(lambda: str(folder / "unread"), disk)
    writer = PatientWriter(fd, waiting, lambda lines, why: lost.append((lines, why)))
    writer.start()
    return writer, lost


def test_what_a_reader_takes_late_is_what_was_put_in_its_order(tmp_path, disk, pipe):
    reader, end = pipe
    writer, lost = start_writer(end.fileno(), disk, tmp_path)

    for _ in range(8):
        writer.put(BLOCK)
    behind = [path.name for path in tmp_path.iterdir()]
    taken = b"".join(reader.read(len(BLOCK)) for _ in range(8))
    writer.flush()
    writer.put(b"again")
    writer.flush()

    assert taken == 8 * BLOCK
    assert reader.read(5) == b"again"
    assert lost == []
    assert behind == [] or behind == ["unread.0"]
    assert list(tmp_path.iterdir()) == []


def test_a_reader_who_has_gone_wants_nothing_and_keeps_nobody(tmp_path, disk, pipe):
    reader, end = pipe
    writer, lost = start_writer(end.fileno(), disk, tmp_path)

    for _ in range(8):
        writer.put(BLOCK)
    reader.close()
    writer.flush()
    writer.put(BLOCK)
    writer.flush()

    assert lost == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_on_a_full_disk_lacks_lines_and_says_so(tmp_path, disk):
    with open("/dev/full", "wb") as full:
        writer, lost = start_writer(full.fileno(), disk, tmp_path)

        writer.put(b"one\ntwo\n")
        writer.flush()

    assert lost == [(2, "No space left on device")]


def test_an_end_that_waits_for_its_reader_says_so(tmp_path, disk, pipe, monkeypatch):
    monkeypatch.setattr(writing, "SAY_AFTER_S", 0.01)
    reader, end = pipe
    writer, _ = start_writer(end.fileno(), disk, tmp_path)
    said = []

    def read_all():
        said.append("waits")
        threading.Thread(target=reader.read, args=(len(BLOCK),)).start()

    writer.waits = read_all
    writer.put(BLOCK)
    writer.flush()

    assert said == ["waits"]
