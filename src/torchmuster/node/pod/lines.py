"""Sessions with many pods in one process: a thread carries the streams of all of them.

A process for each would take 20 MB of the first pod's memory, more than a gigabyte with 64 pods, and the time of its start.
"""

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torchmuster.net.channel import ChannelClosedError
from torchmuster.net.command import GONE, CommandProcess
from torchmuster.net.handshake import HandshakeError
from torchmuster.node.pod.call import call_patiently, call_pod, words_of
from torchmuster.node.pod.session import ask_session
from torchmuster.proc import Answered

_MOST_THREADS = 256  # for names: a DNS that is silent about one holds up no other


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

    def start(self, argv: Sequence[str], stdin: int, stdout: int, stderr: int) -> CommandProcess:
        """Begin a session; the last words are host and command, as of ssh. The descriptors stay the caller's."""
        host, command = argv[-2:]
        name = f"{host}.{self.domain}" if self.domain else host
        streams = (os.dup(stdin), os.dup(stdout), os.dup(stderr))
        calling = call_pod(name, self.port, self.secret, command, self.wait_s, streams)
        return CommandProcess(self._running_loop(), calling, streams)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, "line"))
                threading.Thread(target=self._loop.run_forever, name="lines", daemon=True).start()
            return self._loop


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
        return Answered(status=GONE, stdout=b"", stderr=words_of(error).encode())
