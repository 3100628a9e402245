"""What starts an agent on another host: a command whose words are kept, for when it ends and no agent has connected.

What it writes to standard error goes on to ours at once.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from torchmuster import proc

# An agent calls a second or two after its start; a host with a cold file system needs more. OpenPBS's pbsdsh hangs for
# ever when its host is gone, also when the host is back, so a start has to end.
CALL_LIMIT_S = 60.0
_MAX_LINES = 4
_MAX_LINE = 200
_DRAIN_S = 1.0


class Starter:
    """One start of an agent.

    Attributes:
        child: The command: pbsdsh, srun, ssh.
        log_bytes: How long the output of the job was before.
    """

    def __init__(self, child: proc.Child, stderr_fd: int, stdout_fd: int | None = None) -> None:
        self.child = child
        self.log_bytes = 0
        self._began_at = time.monotonic()
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._readings = [
            threading.Thread(target=self._read, args=(fd, fd == stderr_fd), daemon=True)
            for fd in (stderr_fd, stdout_fd)
            if fd is not None
        ]
        for reading in self._readings:
            reading.start()

    def is_late(self, now: float) -> bool:
        """Say whether an agent would have called long ago: this start brings none."""
        return now - self._began_at > CALL_LIMIT_S

    def said(self) -> tuple[str, ...]:
        """Return its last lines; for a command that has ended."""
        for reading in self._readings:
            reading.join(_DRAIN_S)  # a daemon that it left may hold the pipe open
        return tuple(self._lines)

    def _read(self, read_fd: int, passes_on: bool) -> None:
        with open(read_fd, "rb") as stream:
            for line in stream:
                if passes_on:
                    with contextlib.suppress(OSError):  # nobody reads ours any more
                        os.write(2, line)
                text = line.decode(errors="replace").strip()
                if text:
                    self._lines.append(text[:_MAX_LINE])


def start(argv: Sequence[str], *, beside: bool = False, keeps_output: bool = False) -> Starter:
    """Start a command that starts an agent.

    Args:
        argv: The command.
        beside: `end_children` leaves it alone.
        keeps_output: Its standard output is kept with its other words: the agent writes none, and pbsdsh tells there how it ended.

    Raises:
        MusterError: It can't be executed.
    """
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(1 + keeps_output)]
    streams = dict(zip(("stderr", "stdout"), (write_fd for _, write_fd in pipes), strict=False))
    try:
        child = (proc.start_beside if beside else proc.start)(argv, **streams)
    except BaseException:
        for read_fd, _ in pipes:
            os.close(read_fd)
        raise
    finally:
        for _, write_fd in pipes:
            os.close(write_fd)
    return Starter(child, *(read_fd for read_fd, _ in pipes))


def describe_end(status: int, said: Sequence[str]) -> str:
    """Return the sentence on a command that ended before its agent called."""
    words = f": {' / '.join(said)}" if said else ", without a word"
    return f"what started its agent ended (exit code {status}){words}"
