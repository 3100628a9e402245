"""Forward TCP connections inside an ssh session; both sides use the same class.

A connection to a `RelayPort` at one end is continued at the other end by a connection to a port of
that machine's loopback. The run's secret authenticates its contents from end to end. Each
connection has at most one window in flight, so a program that reads nothing holds up neither the
session nor other connections.
"""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torchmuster.core.net.address import bind
from torchmuster.launcher.net.remote_messages import (
    OfRelay,
    RelayAcknowledged,
    RelayClose,
    RelayData,
    RelayOpen,
    RemoteMessage,
)

_CALL_S = 5.0
_READ_BYTES = 1 << 16
WINDOW_BYTES = 1 << 20


class SendsMessages(Protocol):
    """Sends messages to the other side of a session."""

    def send(self, message: RemoteMessage, *, bulk: bool = False) -> bool:
        """Send a message, bulk once the queue is short; return False if the peer is gone."""


class RelayedConnection:
    """One connection, and its data in flight: to the program here and to the one at the far end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(None)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._unacknowledged_bytes = 0
        self.ends = self._is_over = False
        self._changed = threading.Condition()

    def put(self, data: bytes) -> bool:
        """Queue data for the program here; return False if it exceeds a window."""
        with self._changed:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._changed.notify_all()
            return self._waiting_bytes <= WINDOW_BYTES + _READ_BYTES

    def next(self) -> bytes | None:
        """Wait for the next data for the program here; return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.ends or self._is_over)
            if self._is_over or not self._waiting:
                return None
            data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            return data

    def receive(self) -> bytes:
        """Wait until the window has room; return the program's next data, empty at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._unacknowledged_bytes < WINDOW_BYTES or self.ends or self._is_over
            )
        data = b"" if self._is_over else self.connection.recv(_READ_BYTES)
        with self._changed:
            self._unacknowledged_bytes += len(data)
        return data

    def taken(self, size_bytes: int) -> None:
        """Record that the program at the other end has received so many bytes."""
        with self._changed:
            self._unacknowledged_bytes = max(0, self._unacknowledged_bytes - max(0, size_bytes))
            self._changed.notify_all()

    def end(self) -> None:
        """End the connection once the program here has received all queued data."""
        with self._changed:
            self.ends = True
            self._changed.notify_all()

    def abort(self) -> None:
        """End the connection now."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Relay:
    """The connections of one session.

    Attributes:
        ports: The only ports of this machine to which the other side may connect.
    """

    def __init__(self, session: SendsMessages, first_id: int) -> None:
        self.ports: set[int] = set()
        self._session = session
        self._next_id = first_id  # both ends count in steps of two
        self._calls: dict[int, RelayedConnection] = {}
        self._lock = threading.Lock()

    def carry(self, connection: socket.socket, port: int) -> None:
        """Forward an accepted connection to a port of the other side's loopback."""
        call = RelayedConnection(connection)
        with self._lock:
            call_id, self._next_id = self._next_id, self._next_id + 2
            self._calls[call_id] = call  # before anything can be answered
        self._session.send(RelayOpen(call_id=call_id, port=port))
        self._begin(call_id, call)

    def take(self, message: OfRelay) -> None:
        """Handle a message of the other side; never block on a program."""
        call_id = message.call_id
        call = self._calls.get(call_id)
        match message:
            case RelayOpen(port=port):
                connection = self._open(port) if call is None else None
                if connection is None:
                    self._session.send(RelayClose(call_id=call_id))
                else:
                    self._calls[call_id] = call = RelayedConnection(connection)
                    self._begin(call_id, call)
            case RelayData(data=data) if call is not None and not call.put(data):
                self._hang_up(call_id, tell=True)  # our own relay never sends more than a window
            case RelayAcknowledged(size_bytes=size_bytes) if call is not None:
                call.taken(size_bytes)
            case RelayClose() if call is not None:
                call.end()

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

    def _begin(self, call_id: int, call: RelayedConnection) -> None:
        threading.Thread(target=self._read, args=(call_id, call), name="relay", daemon=True).start()

    def _read(self, call_id: int, call: RelayedConnection) -> None:
        writing = threading.Thread(
            target=self._write, args=(call_id, call), name="relay", daemon=True
        )
        writing.start()
        with call.connection:
            with contextlib.suppress(OSError):
                while data := call.receive():
                    if call.ends:  # nobody at the other end reads any more
                        continue
                    if not self._session.send(RelayData(call_id=call_id, data=data), bulk=True):
                        break
            self._hang_up(call_id, tell=True)
            writing.join()

    def _write(self, call_id: int, call: RelayedConnection) -> None:
        try:
            while (data := call.next()) is not None:
                call.connection.sendall(data)
                self._session.send(RelayAcknowledged(call_id=call_id, size_bytes=len(data)))
        except OSError:
            self._hang_up(call_id, tell=True)
        self._hang_up(call_id, tell=False)

    def _hang_up(self, call_id: int, *, tell: bool) -> None:
        with self._lock:
            call = self._calls.pop(call_id, None)
        if call is None:
            return
        call.abort()
        if tell:
            self._session.send(RelayClose(call_id=call_id))


class RelayPort:
    """A port of our loopback whose connections a relay forwards.

    Args:
        pick: Returns the relay and the port at its other end; None if there is none now.
        port: The port to listen on; 0 for any.
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
