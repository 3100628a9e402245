"""Requests between processes of one user on one machine: "start this agent on another host", and how it ended.

The broker listens on an abstract Unix socket: nothing lies on a disk, also after a SIGKILL, and a process in a view of files
of its own finds it too. The kernel says which user called, before anything is read. A caller sends one line of JSON and gets
one when the agent has ended; a caller that goes withdraws its request.
"""

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable

from torchmuster.net import remote_messages
from torchmuster.net.remote_messages import (
    GONE,
    AgentEnded,
    FrameError,
    RemoteMessage,
    StartNode,
    StartTask,
)

MAX_LINE_BYTES = 64 << 10
MAX_REQUESTS = 4096
_READ_LIMIT_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class AgentRequest:
    """One request of one caller."""

    def __init__(self, start: StartNode | StartTask, call: socket.socket) -> None:
        self.start = start
        self._call = call
        self._lock = threading.Lock()
        self.has_ended = False

    def end(self, status: int, why: str | None = None) -> None:
        """Tell the caller how the agent ended, once; a negative status is a signal."""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended = True
        with contextlib.suppress(OSError):
            ended = AgentEnded(agent_id=0, status=status, why=why)
            self._call.sendall(remote_messages.encode(ended) + b"\n")
            self._call.shutdown(socket.SHUT_RDWR)


class AgentBroker:
    """Takes requests; each caller has a thread, in which `take` may wait.

    Args:
        take: Gets each request.
        withdraw: Gets a request that has not ended when its caller goes.
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
        """Take no more requests."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                call, _ = self._listening.accept()
            except OSError:
                return
            if not _is_ours(call) or not self._room.acquire(blocking=False):
                call.close()
                continue
            threading.Thread(target=self._serve, args=(call,), name="request", daemon=True).start()

    def _serve(self, call: socket.socket) -> None:
        try:
            with call:
                start = _read_line(call, _READ_LIMIT_S)
                if not isinstance(start, StartNode | StartTask):
                    return
                request = AgentRequest(start, call)
                self._take(request)
                with contextlib.suppress(OSError):
                    while call.recv(1024):
                        continue
                if not request.has_ended:
                    request.has_ended = True
                    self._withdraw(request)
        finally:
            self._room.release()


def request_agent(name: str, start: str) -> tuple[int, str | None]:
    """Ask a broker for an agent, by an encoded message, and wait for its end; return its status and why.

    GONE when the broker is gone.
    """
    try:
        with socket.socket(socket.AF_UNIX) as call:
            call.connect(f"\0{name}")
            if not _is_ours(call):
                return GONE, "another user listens there"
            call.sendall(f"{start}\n".encode())
            answer = _read_line(call, None)
    except OSError as error:
        why = f"the process that starts agents on other hosts can't be called: {error.strerror}"
        return GONE, why
    if not isinstance(answer, AgentEnded):
        return GONE, "the process that starts agents on other hosts has ended"
    return answer.status, answer.why


def _is_ours(call: socket.socket) -> bool:
    raw = call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1]) == os.getuid()


def _read_line(call: socket.socket, limit_s: float | None) -> RemoteMessage | None:
    """Return the message of one line; None when none comes, or something else does."""
    call.settimeout(limit_s)
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) <= MAX_LINE_BYTES:
            piece = call.recv(4096)
            if not piece:
                return None
            data += piece
        return remote_messages.decode(data)
    except (OSError, FrameError):
        return None
    finally:
        with contextlib.suppress(OSError):
            call.settimeout(None)
