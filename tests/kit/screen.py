"""A terminal for a real program: a pty, and what a terminal emulator makes of what the program writes."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time

import pyte


class TerminalOf:
    """Runs a command on a terminal of its own; `with` ends it.

    Args:
        command: The words.
        env: Its environment.
        columns: Of the terminal.
        rows: Of the terminal.
    """

    def __init__(self, command, env, columns=80, rows=24):
        self._command, self._env = command, env
        self._size = (rows, columns)
        self.screen = pyte.Screen(columns, rows)
        self.sent = b""
        self.status = None
        self._stream = pyte.ByteStream(self.screen)

    def __enter__(self):
        self.began_at = time.monotonic()
        self.pid, self._fd = pty.fork()
        if not self.pid:
            try:
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", *self._size, 0, 0))
                os.execve(self._command[0], self._command, self._env)
            finally:
                os._exit(127)
        return self

    def __exit__(self, *reason):
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    @property
    def text(self):
        """Return what the screen shows, without the blanks at the ends of its lines."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def press(self, keys):
        """Type."""
        os.write(self._fd, keys.encode())

    def resize(self, columns, rows):
        """Change the size of the terminal."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def read(self, timeout_s=0.1):
        """Take what the program has written; say whether it still runs."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # EIO: its end
            data = b""
        if not data:
            self.status = self.status if self.status is not None else os.waitpid(self.pid, 0)[1]
            return False
        self.sent += data
        self._stream.feed(data)
        return True

    def wait_for(self, *words, limit_s=30.0, without=()):
        """Wait until the screen shows all these words and none of the others; return its text."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            text = self.text
            if all(word in text for word in words) and not any(word in text for word in without):
                return text
            if not self.read():
                break
        raise AssertionError(f"{words} not on the screen:\n{self.text}")

    def wait_for_end(self, limit_s=30.0):
        """Wait for the end of the program; return its exit code."""
        deadline = time.monotonic() + limit_s
        while self.read():
            if time.monotonic() > deadline:
                raise AssertionError(f"it has not ended:\n{self.text}")
        return os.waitstatus_to_exitcode(self.status)
