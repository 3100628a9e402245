"""One environment that comes to this host: piece by piece, from the client or the host before, unpacked and brought on while it comes.

Who brings it is told which piece is wanted next, so another can go on where one has stopped. A piece is believed by its own checksum,
whoever brings it.
"""

import asyncio
import contextlib
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from torchmuster.core.model.plan import EnvironmentNeeds
from torchmuster.core.net import channel
from torchmuster.core.net.channel import HandshakeError
from torchmuster.errors import MusterError
from torchmuster.launcher.files.environment import LISTED, Piece, read_list
from torchmuster.launcher.net.interfaces import is_own_address
from torchmuster.launcher.node.shelf import Shelf, Unpacking

# Pieces that have come and are still wanted: to be unpacked, or by the next host. They lie in files without names, so nothing is left behind.


_SEGMENT = 64


class Spool:
    """Numbered pieces, from the first that is still wanted on.

    A file holds so many of them and is given up as a whole, mostly before the disk has got to write it.

    Args:
        folder: Where the files are made.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._segments: dict[int, BinaryIO] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def put(self, index: int, data: bytes | memoryview) -> None:
        """Keep the next piece.

        Raises:
            OSError: The disk is full.
        """
        number = index // _SEGMENT
        with self._lock:
            file = self._segments.get(number)
            if file is None:
                file = self._segments[number] = tempfile.TemporaryFile(  # noqa: SIM115
                    dir=self._folder, buffering=0
                )
            offset = sum(self._places.get(index - 1, (0, 0))) if index % _SEGMENT else 0
        rest, at = memoryview(data), offset
        while rest:
            written = os.pwrite(file.fileno(), rest, at)
            rest, at = rest[written:], at + written
        with self._lock:
            self._places[index] = (offset, len(data))

    def get(self, index: int) -> bytes | None:
        """Return a piece; None for one that is gone, or has not come."""
        with self._lock:
            place, file = self._places.get(index), self._segments.get(index // _SEGMENT)
            if place is None or file is None:
                return None
            return os.pread(file.fileno(), place[1], place[0])

    def forget(self, before: int) -> None:
        """Give up the pieces before one, as far as whole files go."""
        with self._lock:
            for number in [n for n in self._segments if (n + 1) * _SEGMENT <= before]:
                self._segments.pop(number).close()
                for index in range(number * _SEGMENT, (number + 1) * _SEGMENT):
                    self._places.pop(index, None)

    def close(self) -> None:
        """Give up all."""
        with self._lock:
            for file in self._segments.values():
                file.close()
            self._segments.clear()
            self._places.clear()


# The way of an environment from one host to the next: a connection of its own, on which both have proved that they know the run's key for it.
#
#     next -> before    the index of the piece that it wants          4 bytes, and again behind each piece that it has taken
#     before -> next    the pieces from there on, as the list says    their bytes alone; first the list itself, for the index -1
#
# So each piece is acknowledged, a sender notices a link that carries nothing, and one that comes again goes on where it was.


REFUSED = (TimeoutError, HandshakeError, EOFError)
_CALL_LIMIT_S = 10.0
SILENCE_S = 20.0
_LOOK_S = 0.5
_AGAIN_S = 1.0
_TRIES = 3
_GO = b"g"
_INDEX_BYTES = 4


def greet(connection: socket.socket, secret: bytes) -> None:
    """Prove to a caller that we know the secret, and let it prove the same.

    Raises:
        OSError: The connection has ended.
        HandshakeError: It does not know it.
    """
    asyncio.run(_greet(connection, secret))
    connection.settimeout(_CALL_LIMIT_S)
    if _exactly(connection, len(_GO)) != _GO:
        raise HandshakeError(channel.Reason.NOT_MUSTER)
    # The client knows when a host before is gone: from then on the end is heard of from it.
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _greet(connection: socket.socket, secret: bytes) -> None:
    reader, writer = await asyncio.open_connection(sock=connection.dup())
    try:
        async with asyncio.timeout(_CALL_LIMIT_S):
            await channel.shake_as_called(reader, writer, (secret, None))
    finally:
        writer.transport.abort()  # of the copy


def receive(connection: socket.socket, arrival: "ComingEnvironment") -> None:
    """Take the pieces that a caller brings, until all are there or the connection ends.

    Raises:
        OSError: It has ended.
    """
    while not arrival.is_over:
        index = arrival.wants
        connection.sendall(index.to_bytes(_INDEX_BYTES, "big", signed=True))
        if index >= arrival.needs.num_pieces:
            return
        if not arrival.take(index, _exactly(connection, arrival.length_of(index))):
            return  # damaged: whoever brought it comes again


def _exactly(connection: socket.socket, count: int) -> memoryview:
    data = memoryview(bytearray(count))
    at = 0
    while at < count:
        got = connection.recv_into(data[at:])
        if not got:
            raise OSError("the connection has ended")
        at += got
    return data


def bring(arrival: "ComingEnvironment", addresses: tuple[str, ...], port: int) -> str | None:
    """Bring to the next host what comes here, while it comes; return why it can't be.

    A connection that breaks is made again; one that never carries anything is given up.
    """
    waiting, tries, furthest = threading.Event(), 0, -2
    while True:
        reached = furthest
        try:
            with asyncio.run(_call_any(addresses, port, arrival.secret)) as connection:
                for reached in _acknowledged(connection, arrival):
                    arrival.note_onward(max(0, reached))
            return None
        except (OSError, *REFUSED) as error:
            why = str(error) or type(error).__name__
        tries = 1 if reached > furthest else tries + 1
        furthest = max(furthest, reached)
        if tries >= _TRIES or arrival.is_over:
            return why[:300]
        waiting.wait(_AGAIN_S)


def _acknowledged(connection: socket.socket, arrival: "ComingEnvironment") -> Iterator[int]:
    """Yield what the other side wants next, again and again, while it is sent."""
    total = arrival.needs.num_pieces
    wanted = sending = int.from_bytes(_exactly(connection, _INDEX_BYTES), "big", signed=True)
    heard, rest = time.monotonic(), b""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while wanted < total:
        yield wanted
        is_idle = sending >= total
        if not is_idle:
            data = arrival.piece(sending, 0.0 if wanted < sending else _LOOK_S)
            if data is not None:
                connection.sendall(data)
                sending += 1
            is_idle = data is None
        if poller.poll(_LOOK_S * 1000 if is_idle and wanted < sending else 0):
            rest += connection.recv(1 << 16)
            whole = len(rest) // _INDEX_BYTES * _INDEX_BYTES
            if not whole:
                raise OSError("the connection has ended")
            wanted = int.from_bytes(rest[whole - _INDEX_BYTES : whole], "big", signed=True)
            rest = rest[whole:]
            heard = time.monotonic()
        elif wanted == sending:
            heard = time.monotonic()  # nothing is on its way
        elif time.monotonic() - heard > SILENCE_S:
            raise TimeoutError(f"it has taken nothing for {SILENCE_S:.0f} s")
    yield wanted


async def _call_any(addresses: tuple[str, ...], port: int, secret: bytes) -> socket.socket:
    """Return a connection to the next host, by the first of its addresses that answers.

    Raises:
        OSError: None does.
    """
    # A bridge of containers has the same address on every host: there we would call ourselves.
    others = [one for one in addresses if not is_own_address(one)] or list(addresses)
    calls = [asyncio.create_task(_call(one, port, secret)) for one in others]
    first = None
    try:
        for call in asyncio.as_completed(calls):
            with contextlib.suppress(OSError, *REFUSED):
                first = await call
                first.sendall(_GO)
                return first
    finally:
        for task in calls:
            task.cancel()
        for late in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(late, socket.socket) and late is not first:
                late.close()
    raise OSError(f"it does not answer at {', '.join(others)}")


async def _call(address: str, port: int, secret: bytes) -> socket.socket:
    async with asyncio.timeout(_CALL_LIMIT_S):
        reader, writer = await asyncio.open_connection(address, port)
        try:
            await channel.shake_as_caller(reader, writer, channel.Role.AGENT, secret)
            connection = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        finally:
            writer.transport.abort()  # of the original
    connection.settimeout(SILENCE_S)
    return connection


LIST = -1  # the index of the list of pieces
_MAX_DAMAGED = 3
_NOBODY = 1 << 40


class ComingEnvironment:
    """An environment on its way through this host.

    Args:
        shelf: Where it goes.
        secret: By which hosts of this run know each other.
        done: Told once: None when it is in its place, else why it is not.

    Attributes:
        wants: The index of the piece that is wanted next.
        is_over: It has failed, or was given up.

    Raises:
        OSError: It can't be begun.
    """

    def __init__(self, shelf: Shelf, secret: bytes, done: Callable[[str | None], None]) -> None:
        self.needs: EnvironmentNeeds = shelf.needs
        self._done, self.secret = done, secret
        self._unpacking = Unpacking(shelf)
        self._spool = Spool(shelf.folder)
        self._list = b""
        self._pieces: tuple[Piece, ...] = ()
        self.wants, self._unpacked, self._onward = LIST, 0, 0
        self._damaged = 0
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        self._source: socket.socket | None = None
        self.is_over = False
        self._listening = socket.create_server(("0.0.0.0", 0), backlog=16)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()
        self._unpacks = threading.Thread(target=self._unpack, daemon=True)
        self._unpacks.start()

    # It comes.

    def take(self, index: int, data: bytes | memoryview) -> bool:
        """Take the list or a piece; False for one that is damaged. One that is not wanted is dropped.

        Raises:
            OSError: The disk is full.
        """
        with self._taking:
            if index != self.wants or self.is_over:
                return True
            if index == LIST:
                try:
                    pieces = read_list(bytes(data), self.needs.sha)
                except ValueError:
                    return self._note_damage()
                self._list, self._pieces = bytes(data), pieces
            elif not self._pieces[index].check(data):
                return self._note_damage()
            else:
                try:
                    self._spool.put(index, data)
                except OSError as error:
                    self.refuse(str(error))
                    return True
            with self._changed:
                self.wants += 1
                self._changed.notify_all()
            return True

    def _note_damage(self) -> bool:
        self._damaged += 1
        if self._damaged >= _MAX_DAMAGED:
            self.refuse("the environment came damaged: its checksum is another")
        return False

    def length_of(self, index: int) -> int:
        """Return how many bytes the list or a piece has."""
        if index == LIST:
            return self.needs.num_pieces * LISTED.size
        return self._pieces[index].length

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        """Take what the host before brings; another that comes later takes its place."""
        with connection, contextlib.suppress(OSError, *REFUSED):
            greet(connection, self.secret)
            self.supersede(connection)
            receive(connection, self)

    def supersede(self, source: socket.socket | None) -> None:
        """Hear nobody else than this one; None for the client."""
        with self._changed:
            before, self._source = self._source, source
        if before is not None:
            with contextlib.suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)

    # It goes on.

    def pass_on(
        self, addresses: tuple[str, ...], port: int, failed: Callable[[str], object]
    ) -> None:
        """Bring to the next host what comes, while it comes; port 0: nobody follows. `failed` hears why it can't."""
        if not port:
            self.note_onward(_NOBODY)
            return

        def follow() -> None:
            why = bring(self, addresses, port)
            if why is not None and not self.is_over:
                failed(why)
            self.note_onward(_NOBODY)

        threading.Thread(target=follow, daemon=True).start()

    def piece(self, index: int, wait_s: float) -> bytes | None:
        """Return the list or a piece for the next host; None where it has not come in this time.

        Raises:
            OSError: It is gone.
        """
        self._wait_for(index, wait_s)
        if self.is_over:
            raise OSError("the environment has not come whole")
        if self.wants <= index:
            return None
        data = self._list if index == LIST else self._spool.get(index)
        if data is None:
            raise OSError("what it lacks is no longer kept here")
        return data

    def _wait_for(self, index: int, limit_s: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.wants > index or self.is_over, limit_s)

    def note_onward(self, index: int) -> None:
        """Note that the next host wants nothing before this piece."""
        with self._changed:
            self._onward = index
        self._forget()

    def _forget(self) -> None:
        self._spool.forget(min(self._unpacked, self._onward))

    # It is unpacked.

    def _unpack(self) -> None:
        why = None
        try:
            for index in range(self.needs.num_pieces):
                self._wait_for(index)
                data = self._spool.get(index)
                if data is None:
                    return  # it was given up
                self._unpacking.feed(self._pieces[index].content(data))
                self._unpacked = index + 1
                self._forget()
            self._unpacking.finish()
        except MusterError as error:
            why = f"{error.what}: {error.why}"
        except (OSError, ValueError) as error:
            why = str(error)
        finally:
            self._unpacking.close()
        if why is None:
            self._done(None)
        else:
            self.refuse(why)

    def refuse(self, why: str) -> None:
        """Give it up, and say why."""
        with self._changed:
            was_over, self.is_over = self.is_over, True
            self._changed.notify_all()
        if not was_over:
            self._done(why)
        self.close()

    def close(self, patience_s: float = 0.0) -> None:
        """Give up what has not come; wait so long until what there is of it is removed."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            # Who waits in `accept` does not hear a close.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.supersede(None)
        self._spool.close()
        if patience_s:
            self._unpacks.join(patience_s)
