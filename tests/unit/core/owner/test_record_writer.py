"""What an owner writes: in order, to the last line, and without waiting for a file system that stands still."""

import asyncio
import contextlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from kit.waiting import wait_until
from torchmuster.core.files import disk
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.events import NoticeEvent
from torchmuster.core.owner import parts
from torchmuster.core.owner.parts import RecordWriter
from torchmuster.core.owner.record import read_lines

AT_ONCE_S = 5.0  # on a machine that is busy with other things
FULL = "No space left on device"


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return RunDir(str(folder))


def write(run_dir, story):
    """Run a story with a writer and return what was said to the user."""
    said = []

    async def go():
        async with RecordWriter(run_dir, said.append) as record:
            await story(record)

    asyncio.run(go())
    return said


def test_all_is_written_in_its_order_before_the_owner_ends(run_dir):
    async def story(record):
        for number in range(1000):
            record.event(NoticeEvent(text=str(number)))
        record.replace(run_dir.result, {"state": "done"}, mode=0o600)

    assert write(run_dir, story) == []
    assert [int(event["text"]) for event in read_lines(run_dir.events)] == list(range(1000))
    with open(run_dir.result) as file:
        assert json.load(file) == {"state": "done"}
    assert os.stat(run_dir.result).st_mode & 0o777 == 0o600


def test_what_an_earlier_owner_has_written_stays(run_dir):
    async def story(record):
        record.event(NoticeEvent(text="again"))

    write(run_dir, story)
    write(run_dir, story)
    assert [event["text"] for event in read_lines(run_dir.events)] == ["again", "again"]


def test_a_file_system_that_stands_still_keeps_nobody_waiting(run_dir, monkeypatch):
    monkeypatch.setattr(parts, "LAST_WRITES_S", 0.2)
    os.mkfifo(run_dir.events)  # it can't be opened until somebody reads

    async def story(record):
        started = time.monotonic()
        for _ in range(100):
            record.event(NoticeEvent(text="counted"))
        record.replace(run_dir.head, {"port": 1})
        assert time.monotonic() - started < AT_ONCE_S

    (said,) = write(run_dir, story)
    assert said == (
        f"files in {run_dir.path} can't be written, so other commands may not find this run"
        " or see all of it: the file system took more than 0 s"
    )
    with open(run_dir.events) as late:  # the thread ends its work
        assert len(late.readlines()) == 100


def test_a_slow_file_system_gets_its_time_at_the_end(run_dir):
    os.mkfifo(run_dir.events)
    read = []

    def read_slowly():
        with open(run_dir.events) as pipe:  # a view refuses a pipe
            read.extend(json.loads(line) for line in pipe)

    reader = threading.Thread(target=read_slowly)

    async def story(record):
        record.event(NoticeEvent(text="first"))
        record.event(NoticeEvent(text="last"))
        asyncio.get_running_loop().call_later(0.1, reader.start)

    assert write(run_dir, story) == []
    reader.join(AT_ONCE_S)
    assert [event["text"] for event in read] == ["first", "last"]


def test_a_full_disk_is_told_once_for_each_reason(run_dir):
    os.symlink("/dev/full", run_dir.events)

    async def story(record):
        for _ in range(3):
            record.event(NoticeEvent(text="counted"))
        os.mkdir(run_dir.result)
        record.replace(run_dir.result, {})

    full, in_the_way = write(run_dir, story)
    assert full.endswith(FULL)
    assert in_the_way.endswith("result.json: Is a directory")


@pytest.fixture
def small_disk(tmp_path):
    """Return the folder of a file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("only root makes a file system that can be filled")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_others_have_filled_has_room_for_the_result(small_disk):
    run_dir = RunDir(str(small_disk / "run"))
    os.mkdir(run_dir.path)

    def fill():
        room = Path(run_dir.room)
        wait_until(lambda: room.exists() and room.stat().st_size, "its room", AT_ONCE_S)
        fd = os.open(small_disk / "others", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while os.write(fd, bytes(1024)):
                pass
        os.close(fd)

    async def story(record):
        fill()
        record.replace(run_dir.result, {"state": "done", "words": "x" * 20_000})

    assert write(run_dir, story) == []
    with open(run_dir.result) as file:
        assert json.load(file)["state"] == "done"
    assert not os.path.exists(run_dir.room)


def test_what_the_queue_has_no_room_for_is_told(run_dir, monkeypatch):
    monkeypatch.setattr(disk, "MAX_WAITING_BYTES", 1)

    async def story(record):
        record.event(NoticeEvent(text="too long"))

    (said,) = write(run_dir, story)
    assert said.endswith("the disk was too slow")
