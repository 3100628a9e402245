"""muster on a terminal: what a shown rank sees of it, and what the user sees of the rank."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time

import pytest

from start.ways import LIMIT_S, MUSTER, job_env

PROGRAM = """
import os, sys
for i in range(3):
    print("out", i)
    print("err", i, file=sys.stderr)
print([s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)], os.get_terminal_size(1)[:])
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError as error:
    print(error.strerror)
breakpoint()
print("\\x1b[31mred", os.get_terminal_size(2)[:])
"""
TAKES_IT = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "  # as a shell's child has it
)
EXPECTED = """out 0
err 0
out 1
err 1
out 2
err 2
[False, True, True] (111, 33)
No such device or address
"""


def resize(fd: int, columns: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


class Screen:
    """A terminal with muster on it."""

    def __init__(self, place, *words: str) -> None:
        self.fd, terminal = pty.openpty()
        resize(terminal, 111, 33)
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKES_IT + MUSTER, *words],
            cwd=place.cwd,
            env=job_env(MUSTER_HOME=str(place.home)),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)

    def read_until(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.seen += os.read(self.fd, 4096).decode()

    def end(self) -> int:
        try:
            while data := os.read(self.fd, 4096):
                self.seen += data.decode()
        except OSError:
            pass
        finally:
            os.close(self.fd)
        return self.process.wait(LIMIT_S)


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--nproc-per-node", "1", "--python", f"{sys.executable} -S"),
        ("torchrun", "--standalone", "--nproc-per-node", "1"),
    ],
    ids=["run", "torchrun"],
)
def test_the_shown_rank_has_order_colours_and_size_and_the_debugger_works(place, words):
    place.write("prog.py", PROGRAM)
    screen = Screen(place, *words, "prog.py")
    screen.read_until("(Pdb) ")
    resize(screen.fd, 140, 40)
    os.write(screen.fd, b"while os.get_terminal_size(1)[0] != 140: pass\n")
    os.write(screen.fd, b"p 40 + 2\n")
    screen.read_until("42\r\n(Pdb) ")
    os.write(screen.fd, b"c\n")
    assert screen.end() == 0, screen.seen
    assert EXPECTED.replace("\n", "\r\n") in screen.seen
    assert "\x1b[31mred (140, 40)\r\n" in screen.seen
    assert place.log(0, 0).startswith(EXPECTED)
