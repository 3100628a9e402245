"""The agent's side of its spawner: start it, send it orders, hear of its children."""

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchmuster import proc
from torchmuster.model.message import decode, encode
from torchmuster.node.door.call import HasStatus
from torchmuster.node.spawner import messages
from torchmuster.node.spawner.messages import SpawnerEvent, SpawnerOrder

if TYPE_CHECKING:
    import asyncio

BUFFER_BYTES = 4 << 20
_MAX_PACKET_BYTES = 1 << 16


class SpawnerLink:
    """Orders out, events in; orders wait in a queue when the spawner is slow to read."""

    def __init__(
        self,
        child: HasStatus,
        control: socket.socket,
        on_event: Callable[[SpawnerEvent], None],
        on_end: Callable[[], None],
    ) -> None:
        self._child = child
        self._control = control
        self._on_event = on_event
        self._on_end = on_end
        self._waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._open = False
        self.say: Callable[[str], None] = _drop  # for what it prints
        self.tell: Callable[[str], None] = _drop  # for sentences to the user

    @property
    def pid(self) -> int:
        """Return the spawner's process id."""
        return self._child.pid

    def open(self) -> None:
        """Begin to listen to the spawner."""
        self._open = True
        _running_loop().add_reader(self._control, self._receive)

    def close(self) -> None:
        """Close the pair: the spawner ends its children and itself."""
        if self._open:
            self._open = False
            loop = _running_loop()
            loop.remove_reader(self._control)
            loop.remove_writer(self._control)
            self._control.close()
            for _, fds in self._waiting:
                _close_all(fds)

    def kill(self) -> None:
        """SIGKILL it; its workers die with it."""
        proc.kill_quietly(self.pid)

    @property
    def said(self) -> str:
        """Return the last lines of what it printed, where that is kept."""
        return ""

    def last_words(self) -> dict[str, str]:
        """Return more fields for a refusal: why it ended, in its own words."""
        return {}

    def exit_status(self) -> int | None:
        """Reap the spawner; return its status or None while it runs."""
        return self._child.poll()

    def order(self, message: SpawnerOrder, fds: Sequence[int] = ()) -> None:
        """Send an order with descriptors, which are closed here once sent."""
        self._waiting.append(_packed(encode(message), tuple(fds)))
        if len(self._waiting) == 1:
            self._send_waiting()

    def _send_waiting(self) -> None:
        loop = _running_loop()
        while self._waiting and self._open:
            packet, fds = self._waiting[0]
            try:
                socket.send_fds(self._control, [packet], fds)
            except BlockingIOError:
                loop.add_writer(self._control, self._send_waiting)
                return
            except OSError:  # it has ended; `_receive` says so
                pass
            self._waiting.popleft()
            _close_all(fds)
        if self._open:
            loop.remove_writer(self._control)

    def _receive(self) -> None:
        try:
            packet = self._control.recv(_MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet:
            self._on_event(decode(packet, SpawnerEvent))
            return
        self.close()
        self._on_end()


def send_first(control: socket.socket, data: bytes) -> None:
    """Send the first order, which nothing else waits for."""
    packet, fds = _packed(data, ())
    socket.send_fds(control, [packet], fds)
    _close_all(fds)
    control.setblocking(False)


def _packed(data: bytes, fds: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
    if len(data) <= messages.MOST_IN_PACKET:
        return data, fds
    memory = os.memfd_create("order")
    with open(memory, "wb", closefd=False) as file:
        file.write(data)
    return messages.IN_MEMORY, (memory, *fds)


def _drop(text: str) -> None:
    """Say it to nobody."""


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _running_loop() -> "asyncio.AbstractEventLoop":
    import asyncio  # twenty milliseconds that the start of the spawner need not wait for

    return asyncio.get_running_loop()
