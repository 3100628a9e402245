"""Accept requests to start agents on other hosts, from processes of the same user on this machine.

The broker listens on an abstract Unix socket: it leaves no file, even after a SIGKILL, and a
process with its own view of the file system can reach it too. A caller sends one message
(`core/net/ipc.py`) and gets one back when the agent has ended. A caller that disconnects withdraws
its request.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable

from torchmuster.core.model.codec import CodecError
from torchmuster.core.net import ipc
from torchmuster.launcher.net import remote_messages as messages

MAX_REQUESTS = 4096
_READ_LIMIT_S = 5.0


class AgentRequest:
    """A caller's request for one agent."""

    def __init__(self, start: messages.StartNode | messages.StartTask, call: socket.socket) -> None:
        self.start = start
        self._call = call
        self._lock = threading.Lock()
        self.has_ended = False

    def close(self) -> bool:
        """Mark the request as ended; return False if it had already ended."""
        with self._lock:
            was_open, self.has_ended = not self.has_ended, True
        return was_open

    def end(self, status: int, why: str | None = None) -> None:
        """Send the agent's exit status to the caller, once; a negative status is a signal."""
        if not self.close():
            return
        with contextlib.suppress(OSError):
            ended = messages.AgentEnded(agent_id=0, status=status, why=why)
            self._call.sendall(ipc.pack(ended))
            self._call.shutdown(socket.SHUT_RDWR)


class AgentBroker:
    """Accepts requests; each caller has its own thread, in which `take` may block.

    Args:
        take: Called with each request.
        withdraw: Called with an unfinished request whose caller has disconnected.
    """

    def __init__(
        self, take: Callable[[AgentRequest], None], withdraw: Callable[[AgentRequest], None]
    ) -> None:
        self._take = take
        self._withdraw = withdraw
        self.name = f"torchmuster-{secrets.token_hex(16)}"
        self._room = threading.BoundedSemaphore(MAX_REQUESTS)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"\0{self.name}")
        self._listening.listen(128)
        threading.Thread(target=self._accept, name="broker", daemon=True).start()

    def close(self) -> None:
        """Accept no more requests."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                call, _ = self._listening.accept()
            except OSError:
                return
            if ipc.caller_of(call) is None or not self._room.acquire(blocking=False):
                call.close()
                continue
            threading.Thread(target=self._serve, args=(call,), name="request", daemon=True).start()

    def _serve(self, call: socket.socket) -> None:
        try:
            with call:
                start = _next_message(call, time.monotonic() + _READ_LIMIT_S)
                if not isinstance(start, messages.StartNode | messages.StartTask):
                    return
                call.settimeout(None)
                request = AgentRequest(start, call)
                self._take(request)
                with contextlib.suppress(OSError):
                    while call.recv(1024):
                        continue
                if request.close():
                    self._withdraw(request)
        finally:
            self._room.release()


def request_agent(name: str, start: str) -> tuple[int, str | None]:
    """Request an agent from a broker by an encoded message; return its exit status and the reason.

    The status is GONE when the broker is gone.
    """
    try:
        with ipc.connect(f"\0{name}") as call:
            if ipc.caller_of(call) is None:
                return messages.GONE, "another user listens there"
            call.sendall(ipc.pack(messages.decode(start.encode())))
            answer = _next_message(call, None)
    except OSError as error:
        why = f"the process that starts agents on other hosts can't be reached: {error.strerror}"
        return messages.GONE, why
    if not isinstance(answer, messages.AgentEnded):
        return messages.GONE, "the process that starts agents on other hosts has ended"
    return answer.status, answer.why


def _next_message(call: socket.socket, deadline_s: float | None) -> messages.RemoteMessage | None:
    """Return the next message; None at the end of the stream or for an invalid message."""
    try:
        return ipc.receive(call, messages.RemoteMessage, deadline_s)
    except (OSError, EOFError, CodecError):
        return None
