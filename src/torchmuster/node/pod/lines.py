"""Sessions with many pods in one process: a thread carries the streams of all of them.

A process for each would take 20 MB of the first pod's memory, more than a gigabyte with 64 pods, and the time of its start.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torchmuster.net.channel import ChannelClosedError
from torchmuster.net.handshake import HandshakeError
from torchmuster.node.pod.call import call_patiently, call_pod, words_of
from torchmuster.node.pod.session import ask_session
from torchmuster.plainfile import write_all
from torchmuster.proc import Answered

_BROKEN = 255  # as ssh's status
_TERM, _KILL = 15, 9
_MOST_THREADS = (
    256  # for names and for what waits for a reader: a pod that stalls holds up no other
)


@dataclass(slots=True)
class PodLines:
    """The sessions of one process with the pods of a run.

    Attributes:
        domain: What makes a pod's name known to DNS: the name of the Service; empty where names have it.
        wait_s: How long a pod is tried.
    """

    secret: bytes
    port: int
    domain: str
    wait_s: float
    _loop: asyncio.AbstractEventLoop | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, argv: Sequence[str], stdin: int, stdout: int, stderr: int) -> "PodLine":
        """Begin a session; the last words are host and command, as of ssh. The descriptors stay the caller's."""
        host, command = argv[-2:]
        name = f"{host}.{self.domain}" if self.domain else host
        streams = (os.dup(stdin), os.dup(stdout), os.dup(stderr))
        line = PodLine(self._running_loop())
        line.begin(self, name, command, streams)
        return line

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, "line"))
                threading.Thread(target=self._loop.run_forever, name="lines", daemon=True).start()
            return self._loop


class PodLine:
    """One session; to its user it is the process that ssh would be.

    Attributes:
        pid: Of this process, which carries it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = os.getpid()
        self._loop = loop
        self._ended = threading.Event()
        self._status: int | None = None
        self._task: asyncio.Task[int] | None = None
        self._is_killed = False
        self._open = (
            threading.Lock()
        )  # over each write and the end of the descriptors, whose numbers others get
        self._is_closed = False

    def begin(
        self, lines: PodLines, host: str, command: str, streams: tuple[int, int, int]
    ) -> None:
        """Call the pod, in the thread of all lines."""

        def begin() -> None:
            calling = call_pod(
                host, lines.port, lines.secret, command, lines.wait_s, streams, self._write
            )
            self._task = self._loop.create_task(calling)
            # A task that is cancelled before its first step does nothing, not even its last.
            self._task.add_done_callback(lambda task: self._end(task, streams))
            if self._is_killed:
                self._task.cancel()

        self._loop.call_soon_threadsafe(begin)

    def _end(self, task: "asyncio.Task[int]", streams: tuple[int, int, int]) -> None:
        has_code = not task.cancelled() and task.exception() is None
        self._status = task.result() if has_code else _BROKEN
        self._ended.set()
        self._loop.run_in_executor(None, self._close, streams)

    def _write(self, fd: int, data: bytes) -> None:
        with self._open:
            if not self._is_closed:
                write_all(fd, data)

    def _close(self, streams: tuple[int, int, int]) -> None:
        with self._open:
            self._is_closed = True
            for fd in streams:
                os.close(fd)

    def poll(self) -> int | None:
        """Return the exit code of the command, 255 for a session that broke; None while it runs."""
        return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit code or None when the time is up."""
        self._ended.wait(timeout_s)
        return self._status

    def send_signal(self, signum: int) -> None:
        """Hang up, at a signal that ends a process."""
        if signum in (_TERM, _KILL) and self._status is None:
            self._is_killed = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def ask_pod(
    host: str, port: int, secret: bytes, command: str, limit_s: float, data: bytes = b""
) -> Answered:
    """Run a command in a pod, from any thread without an event loop; the status is None when its time was up."""

    async def ask() -> Answered:
        async with asyncio.timeout(limit_s):
            channel = await call_patiently(host, port, secret, 0.0)
            try:
                status, said = await ask_session(channel, command, data)
            finally:
                channel.abort()
        return Answered(status=status, stdout=said, stderr=b"")

    try:
        return asyncio.run(ask())
    except TimeoutError:
        return Answered(status=None, stdout=b"", stderr=b"")
    except (OSError, HandshakeError, ChannelClosedError) as error:
        return Answered(status=_BROKEN, stdout=b"", stderr=words_of(error).encode())
