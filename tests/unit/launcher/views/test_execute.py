"""The client's side of `muster exec`: its two threads, the terminal in raw mode, and the codes."""

import fcntl
import os
import pty
import struct
import termios
import threading

import pytest

from torchmuster.launcher.net.part_messages import EXEC_WINDOW_BYTES
from torchmuster.launcher.views import execute


def test_the_highest_code_is_the_code_of_all():
    assert execute.ExecResult(codes={"a": 0, "b": 3, "c": 1}).exit_code == 3


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
        reading = execute.InputThread(file.fileno(), typed)
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
    execute.InputThread(ours, typed).start()
    assert typed.wait_for(lambda: typed.has_ended)


def test_what_is_typed_behind_the_stop_is_left_for_the_next_reader():
    typed = Typed()
    ours, theirs = os.pipe()
    reading = execute.InputThread(ours, typed)
    reading.start()
    os.write(theirs, b"c")
    assert typed.wait_for(lambda: typed.data == b"c")
    reading.stop()
    os.write(theirs, b"q")  # the thread looks for it at this moment
    assert typed.wait_for(lambda: typed.has_ended)
    assert (typed.data, os.read(ours, 10)) == (b"c", b"q")
    os.close(ours)
    os.close(theirs)


async def write_all(write, pieces):
    """Return (what was taken, what was said of a failure) for these pieces."""
    taken, broken = [], []
    output = execute.OutputThread(write, lambda *piece: taken.append(piece), broken.append)
    output.start()
    for piece in pieces:
        output.put(*piece)
    await output.finish(lambda: False)
    return taken, broken


async def test_what_was_written_is_told_in_order():
    written = []
    pieces = [("1", "t", 1, b"abc"), ("2", "u", 2, b"de")]
    told = await write_all(lambda *piece: written.append(piece), pieces)
    assert written == [("t", 1, b"abc"), ("u", 2, b"de")]
    assert told == ([("1", 3), ("2", 2)], [])


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BrokenPipeError(), None),
        (FULL, "the output can't be written: No space left on device"),
    ],
    ids=["a reader that has gone: without a word", "a full disk: in its words"],
)
async def test_an_output_that_fails_is_told_once(error, said):
    def write(task, stream, data):
        raise error

    pieces = [("1", "t", 1, b"a"), ("1", "t", 1, b"b")]
    assert await write_all(write, pieces) == ([], [said])


async def test_leaving_does_not_wait_for_a_reader_that_never_reads():
    stuck = threading.Event()
    output = execute.OutputThread(lambda *piece: stuck.wait(3600), lambda *piece: None, print)
    output.start()
    output.put("1", "t", 1, b"a")
    try:
        await output.finish(lambda: True)
    finally:
        stuck.set()


@pytest.fixture
def terminal():
    ours, theirs = pty.openpty()
    yield theirs
    os.close(ours)
    os.close(theirs)


def echoes(fd):
    return bool(termios.tcgetattr(fd)[3] & termios.ECHO)


def test_raw_mode_is_on_inside_and_off_outside(terminal):
    before = termios.tcgetattr(terminal)
    with execute.RawTerminal(terminal) as raw:
        assert (raw.is_raw, echoes(terminal)) == (True, False)
    assert termios.tcgetattr(terminal) == before


def test_an_error_puts_the_terminal_back(terminal):
    before = termios.tcgetattr(terminal)
    with pytest.raises(KeyError), execute.RawTerminal(terminal):
        raise KeyError
    assert termios.tcgetattr(terminal) == before


def test_raw_mode_comes_back_after_a_stop(terminal):
    before = termios.tcgetattr(terminal)
    with execute.RawTerminal(terminal) as raw:
        termios.tcsetattr(terminal, termios.TCSANOW, before)  # what a shell does
        raw.again()
        assert not echoes(terminal)


def test_what_is_no_terminal_is_left_alone():
    with open(os.devnull) as file, execute.RawTerminal(file.fileno()) as raw:
        assert (raw.is_raw, raw.size()) == (False, execute.DEFAULT_SIZE)
    with execute.RawTerminal(None) as raw:
        assert not raw.is_raw


def test_the_size_is_the_terminal_s(terminal):
    assert execute.RawTerminal(terminal).size() == execute.DEFAULT_SIZE, "a terminal without a size"
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 33, 101, 0, 0))
    assert execute.RawTerminal(terminal).size() == (33, 101)
