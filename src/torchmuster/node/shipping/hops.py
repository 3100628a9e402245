"""The way of an environment from one host to the next: a connection of its own, on which both have proved that they know the run's key for it.

    next -> before    the index of the piece that it wants          4 bytes, and again behind each piece that it has taken
    before -> next    the pieces from there on, as the list says    their bytes alone; first the list itself, for the index -1

So each piece is acknowledged, a sender notices a link that carries nothing, and one that comes again goes on where it was.
"""

import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from torchmuster.model.installed import EnvironmentNeeds
from torchmuster.net import handshake
from torchmuster.net.address import is_own_address
from torchmuster.net.handshake import HandshakeError

REFUSED = (TimeoutError, HandshakeError, EOFError)
_CALL_LIMIT_S = 10.0
SILENCE_S = 20.0
_LOOK_S = 0.5
_AGAIN_S = 1.0
_TRIES = 3
_GO = b"g"
_INDEX_BYTES = 4


class PassesThrough(Protocol):
    """An environment on its way through this host, as its hops need it."""

    needs: EnvironmentNeeds
    secret: bytes

    @property
    def wants(self) -> int:
        """Return the index of the piece that it wants next."""

    @property
    def is_over(self) -> bool:
        """Say whether it was given up."""

    def take(self, index: int, data: bytes | memoryview) -> bool:
        """Take a piece; False for one that is damaged."""

    def length_of(self, index: int) -> int:
        """Return how many bytes a piece has."""

    def piece(self, index: int, wait_s: float) -> bytes | None:
        """Return a piece; None where it has not come in this time."""

    def note_onward(self, index: int) -> None:
        """Note that the next host wants nothing before this piece."""


def greet(connection: socket.socket, secret: bytes) -> None:
    """Prove to a caller that we know the secret, and let it prove the same.

    Raises:
        OSError: The connection has ended.
        HandshakeError: It does not know it.
    """
    asyncio.run(_greet(connection, secret))
    connection.settimeout(_CALL_LIMIT_S)
    if _exactly(connection, len(_GO)) != _GO:
        raise HandshakeError(handshake.Reason.NOT_MUSTER)
    # The client knows when a host before is gone: from then on the end is heard of from it.
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _greet(connection: socket.socket, secret: bytes) -> None:
    reader, writer = await asyncio.open_connection(sock=connection.dup())
    try:
        async with asyncio.timeout(_CALL_LIMIT_S):
            await handshake.answer(reader, writer, (secret, None))
    finally:
        writer.transport.abort()  # of the copy


def receive(connection: socket.socket, arrival: PassesThrough) -> None:
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


def bring(arrival: PassesThrough, addresses: tuple[str, ...], port: int) -> str | None:
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


def _acknowledged(connection: socket.socket, arrival: PassesThrough) -> Iterator[int]:
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
            await handshake.call(reader, writer, handshake.Role.AGENT, secret)
            connection = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        finally:
            writer.transport.abort()  # of the original
    connection.settimeout(SILENCE_S)
    return connection
