"""The two threads of a client of `muster exec`."""

import asyncio
import os
import threading

from torchmuster.launcher.net.part_messages import EXEC_WINDOW_BYTES
from torchmuster.launcher.views.execute import InputThread, OutputThread

LIMIT_S = 90.0


class Typed:
    """Notes what was read."""

    def __init__(self):
        self.data = b""
        self.has_ended = False
        self.changed = threading.Condition()

    def __call__(self, data, *, end):
        with self.changed:
            self.data += data
            self.has_ended = end
            self.changed.notify()

    def wait_for(self, condition, limit_s=LIMIT_S):
        with self.changed:
            return self.changed.wait_for(condition, limit_s)


def test_no_more_than_a_window_is_read_until_it_was_taken(tmp_path):
    content = os.urandom(EXEC_WINDOW_BYTES + 100)
    (tmp_path / "x").write_bytes(content)
    typed = Typed()
    with (tmp_path / "x").open("rb") as file:
        reading = InputThread(file.fileno(), typed)
        reading.start()
        assert typed.wait_for(lambda: len(typed.data) == EXEC_WINDOW_BYTES)
        assert not typed.wait_for(lambda: len(typed.data) > EXEC_WINDOW_BYTES, 0.3)
        reading.taken(EXEC_WINDOW_BYTES)
        assert typed.wait_for(lambda: typed.has_ended)
        assert typed.data == content


def test_an_input_that_is_closed_is_one_that_has_ended():
    typed = Typed()
    ours, theirs = os.pipe()
    os.close(ours)
    os.close(theirs)
    InputThread(ours, typed).start()
    assert typed.wait_for(lambda: typed.has_ended)


def test_what_is_typed_behind_the_stop_is_left_for_the_next_reader():
    typed = Typed()
    ours, theirs = os.pipe()
    reading = InputThread(ours, typed)
    reading.start()
    os.write(theirs, b"c")
    assert typed.wait_for(lambda: typed.data == b"c")
    reading.stop()
    os.write(theirs, b"q")  # the thread looks for it at this moment
    assert typed.wait_for(lambda: typed.has_ended)
    assert (typed.data, os.read(ours, 10)) == (b"c", b"q")
    os.close(ours)
    os.close(theirs)


def write_all(write, pieces):
    """Return (what was taken, what was said of a failure) for these pieces."""
    taken, broken = [], []

    async def play():
        output = OutputThread(
            write, lambda exec_id, size: taken.append((exec_id, size)), broken.append
        )
        output.start()
        for piece in pieces:
            output.put(*piece)
        async with asyncio.timeout(LIMIT_S):
            await output.finish(lambda: False)

    asyncio.run(play())
    return taken, broken


def test_what_was_written_is_told_in_order():
    written = []
    pieces = [("1", "t", 1, b"abc"), ("2", "u", 2, b"de")]
    taken, broken = write_all(lambda *piece: written.append(piece), pieces)
    assert written == [("t", 1, b"abc"), ("u", 2, b"de")]
    assert (taken, broken) == ([("1", 3), ("2", 2)], [])


def test_a_reader_that_has_gone_is_told_once_and_without_a_word():
    def write(task, stream, data):
        raise BrokenPipeError

    taken, broken = write_all(write, [("1", "t", 1, b"a"), ("1", "t", 1, b"b")])
    assert (taken, broken) == ([], [None])


def test_a_full_disk_is_told_in_its_words():
    def write(task, stream, data):
        raise OSError(28, "No space left on device")

    assert write_all(write, [("1", "t", 1, b"a")])[1] == [
        "the output can't be written: No space left on device"
    ]


def test_leaving_does_not_wait_for_a_reader_that_never_reads():
    stuck = threading.Event()

    async def play():
        output = OutputThread(lambda *piece: stuck.wait(3600), lambda *piece: None, print)
        output.start()
        output.put("1", "t", 1, b"a")
        async with asyncio.timeout(60.0):
            await output.finish(lambda: True)

    try:
        asyncio.run(play())
    finally:
        stuck.set()
