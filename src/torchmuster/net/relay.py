"""TCP connections inside an ssh session: the same class on both sides.

A connection that comes to a `RelayPort` at one end is continued at the other by a call to a port of that machine's loopback.
What travels inside is authenticated by the run's secret from end to end.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from torchmuster.net.address import bind
from torchmuster.net.remote_messages import RelayClose, RelayData, RelayOpen, RemoteMessage

_CALL_S = 5.0  # a program that reads nothing for so long loses its connection: it must not hold up the session
_READ_BYTES = 1 << 16


class SendsMessages(Protocol):
    """One side of a session."""

    def send(self, message: RemoteMessage, *, bulk: bool = False) -> bool:
        """Send a message; bulk messages wait until the queue is short. Return False when the other side is gone."""


class Relay:
    """The connections of one session.

    Attributes:
        ports: Of this machine; the other side may connect to these only.
    """

    def __init__(self, session: SendsMessages, first_id: int) -> None:
        self.ports: set[int] = set()
        self._session = session
        self._next_id = first_id  # both ends count in steps of two
        self._calls: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def carry(self, call: socket.socket, port: int) -> None:
        """Forward an accepted connection to a port of the other side's loopback."""
        call.settimeout(_CALL_S)
        with self._lock:
            call_id, self._next_id = self._next_id, self._next_id + 2
            self._calls[call_id] = call  # before anything can be answered
        self._session.send(RelayOpen(call_id=call_id, port=port))
        self._begin(call_id, call)

    def take(self, message: RelayOpen | RelayData | RelayClose) -> None:
        """Handle a message of the other side."""
        call_id = message.call_id
        match message:
            case RelayOpen(port=port):
                call = self._open(port) if call_id not in self._calls else None
                if call is None:
                    self._session.send(RelayClose(call_id=call_id))
                else:
                    self._calls[call_id] = call
                    self._begin(call_id, call)
            case RelayData(data=data):
                call = self._calls.get(call_id)
                try:
                    if call is not None:
                        call.sendall(data)
                except OSError:
                    self._hang_up(call_id, tell=True)
            case RelayClose():
                self._hang_up(call_id, tell=False)

    def close(self) -> None:
        """End all connections."""
        for call_id in list(self._calls):
            self._hang_up(call_id, tell=False)

    def _open(self, port: int) -> socket.socket | None:
        if port not in self.ports:
            return None
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=_CALL_S)
        except OSError:
            return None

    def _begin(self, call_id: int, call: socket.socket) -> None:
        threading.Thread(target=self._read, args=(call_id, call), name="relay", daemon=True).start()

    def _read(self, call_id: int, call: socket.socket) -> None:
        with call, contextlib.suppress(OSError):
            while (data := _receive(call)) != b"":
                message = RelayData(call_id=call_id, data=data or b"")
                if data and not self._session.send(message, bulk=True):
                    break
        self._hang_up(call_id, tell=True)

    def _hang_up(self, call_id: int, *, tell: bool) -> None:
        with self._lock:
            call = self._calls.pop(call_id, None)
        if call is None:
            return
        with contextlib.suppress(OSError):
            call.shutdown(socket.SHUT_RDWR)
        if tell:
            self._session.send(RelayClose(call_id=call_id))


def _receive(call: socket.socket) -> bytes | None:
    """Return received bytes, none at the end, None when nothing was received for a while."""
    try:
        return call.recv(_READ_BYTES)
    except TimeoutError:
        return None


class RelayPort:
    """A port of this loopback whose connections a relay forwards.

    Args:
        pick: Returns the relay, and the port at its other end; None where there is none now.
        port: The port; 0 for any.
    """

    def __init__(self, pick: Callable[[], tuple[Relay, int] | None], port: int = 0) -> None:
        self._pick = pick
        self._listening = bind("127.0.0.1", port)
        self._listening.setblocking(True)
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, name="relay port", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                call, _ = self._listening.accept()
            except OSError:
                return
            picked = self._pick()
            if picked is None:
                call.close()
            else:
                picked[0].carry(call, picked[1])
