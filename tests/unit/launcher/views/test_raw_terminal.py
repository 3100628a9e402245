"""The user's terminal in raw mode, on a terminal of the test."""

import fcntl
import os
import pty
import struct
import termios

import pytest

from torchmuster.launcher.views.execute import DEFAULT_SIZE, RawTerminal


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
    with RawTerminal(terminal) as raw:
        assert (raw.is_raw, echoes(terminal)) == (True, False)
    assert termios.tcgetattr(terminal) == before


def test_an_error_puts_the_terminal_back(terminal):
    before = termios.tcgetattr(terminal)
    with pytest.raises(KeyError), RawTerminal(terminal):
        raise KeyError
    assert termios.tcgetattr(terminal) == before


def test_raw_mode_comes_back_after_a_stop(terminal):
    before = termios.tcgetattr(terminal)
    with RawTerminal(terminal) as raw:
        termios.tcsetattr(terminal, termios.TCSANOW, before)  # what a shell does
        raw.again()
        assert not echoes(terminal)


def test_what_is_no_terminal_is_left_alone():
    with open(os.devnull) as file, RawTerminal(file.fileno()) as raw:
        assert (raw.is_raw, raw.size()) == (False, DEFAULT_SIZE)
    with RawTerminal(None) as raw:
        assert not raw.is_raw


def test_the_size_is_the_terminal_s(terminal):
    assert RawTerminal(terminal).size() == DEFAULT_SIZE, "a terminal without a size"
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 33, 101, 0, 0))
    assert RawTerminal(terminal).size() == (33, 101)
