"""Orders between processes of one user on one machine: "start this on another host", and how it ended.

The desk listens on an abstract Unix socket: nothing lies on a disk, also after a SIGKILL, and a process in a view of
files of its own finds it too. The kernel says whose process called, before anything is read. A caller sends one line of
JSON and gets one when the order has ended; a caller that goes withdraws its order.
"""

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

MAX_REQUEST_BYTES = 64 << 10
MAX_ORDERS = 4096
GONE = 255  # the status of an order whose desk is gone, as ssh's of a broken connection
_REQUEST_LIMIT_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class StartOrder:
    """One order of one caller.

    Attributes:
        request: What it wants.
    """

    def __init__(self, request: dict[str, Any], call: socket.socket) -> None:
        self.request = request
        self._call = call
        self._lock = threading.Lock()
        self.has_ended = False

    def end(self, status: int, why: str | None = None) -> None:
        """Tell the caller how it ended, once; a negative status is a signal."""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended = True
        line = json.dumps({"status": status, "why": why}).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._call.sendall(line)
            self._call.shutdown(socket.SHUT_RDWR)


class OrderDesk:
    """Takes orders; each caller has a thread, in which `take` may wait.

    Args:
        take: Gets each order.
        withdraw: Gets an order that has not ended when its caller goes.
    """

    def __init__(
        self, take: Callable[[StartOrder], None], withdraw: Callable[[StartOrder], None]
    ) -> None:
        self._take = take
        self._withdraw = withdraw
        self.name = f"torchmuster-{secrets.token_hex(16)}"
        self._seats = threading.BoundedSemaphore(MAX_ORDERS)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"\0{self.name}")
        self._listening.listen(128)
        threading.Thread(target=self._accept, name="orders", daemon=True).start()

    def close(self) -> None:
        """Take no more orders."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                call, _ = self._listening.accept()
            except OSError:
                return
            if not _is_ours(call) or not self._seats.acquire(blocking=False):
                call.close()
                continue
            threading.Thread(target=self._serve, args=(call,), name="order", daemon=True).start()

    def _serve(self, call: socket.socket) -> None:
        try:
            with call:
                request = _read_line(call)
                if request is None:
                    return
                order = StartOrder(request, call)
                self._take(order)
                with contextlib.suppress(OSError):
                    while call.recv(1024):
                        continue
                if not order.has_ended:
                    order.has_ended = True
                    self._withdraw(order)
        finally:
            self._seats.release()


def place_order(name: str, request: dict[str, Any]) -> tuple[int, str | None]:
    """Place an order at a desk and wait for its end; return its status and why. GONE when the desk is gone."""
    try:
        with socket.socket(socket.AF_UNIX) as call:
            call.connect(f"\0{name}")
            if not _is_ours(call):
                return GONE, "another user listens there"
            call.sendall(json.dumps(request).encode() + b"\n")
            answer = _read_line(call, None)
    except OSError as error:
        return GONE, f"who starts agents on other hosts can't be called: {error.strerror}"
    if answer is None:
        return GONE, "who starts agents on other hosts has gone"
    why = answer.get("why")
    return int(answer.get("status", GONE)), None if why is None else str(why)


def _is_ours(call: socket.socket) -> bool:
    raw = call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1]) == os.getuid()


def _read_line(
    call: socket.socket, limit_s: float | None = _REQUEST_LIMIT_S
) -> dict[str, Any] | None:
    """Return the object of one line; None when none comes, or something else does."""
    call.settimeout(limit_s)
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) <= MAX_REQUEST_BYTES:
            piece = call.recv(4096)
            if not piece:
                return None
            data += piece
        value = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        with contextlib.suppress(OSError):
            call.settimeout(None)
    return value if isinstance(value, dict) else None
