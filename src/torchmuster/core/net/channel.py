"""An authenticated connection: the handshake of fixed length, before anything is parsed, then frames.

    client -> server   MAGIC  version  role    key  client nonce         44 bytes
    server -> client   MAGIC  version  reason  key  server nonce  MAC    76 bytes
    client -> server   MAC                                               32 bytes
    server -> client   reason  MAC                                       33 bytes

Every MAC of the handshake is HMAC-SHA256 with the run's secret over a label and all bytes sent so
far. So neither side can be replayed, and each proves that it knows the secret. The two session
keys, one for each direction, are derived from both nonces. `key` is 0 for the run's secret and 1
for the public key, which proves nothing and is accepted only where nodes have no common secret
(`muster torchrun`). A caller that fails gets a reason byte if it speaks this protocol, and the
connection is closed.

A frame is length, JSON and MAC, counted and bounded in size:

    4 bytes   length of the payload, at most MAX_FRAME_BYTES
    n bytes   payload
    16 bytes  HMAC-SHA256 over counter, length and payload, truncated

A frame with a wrong MAC never reaches the parser, and the connection is closed.
"""

import asyncio
import contextlib
import enum
import fcntl
import hmac
import os
import struct
import termios
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from torchmuster.core.model.codec import CodecError
from torchmuster.core.net import messages
from torchmuster.core.net.messages import Message

MAGIC = b"MUSTERCH"
VERSION = 2
NONCE_BYTES = 32
MAC_BYTES = 32
_HELLO = struct.Struct(f"!{len(MAGIC)}sHBB{NONCE_BYTES}s")


class Role(enum.IntEnum):
    """The role of the calling side."""

    AGENT = 1
    CLIENT = 2
    PROBE = 3  # an agent that calls another agent's network probe
    SESSION = 4  # a caller that wants a command run in a pod


class Reason(enum.IntEnum):
    """The reason byte: why a connection was closed, or that it was accepted."""

    ACCEPTED = 0
    OTHER_VERSION = 1
    WRONG_SECRET = 2
    NOT_MUSTER = 3
    CLOSED = 4


SENTENCES = {
    Reason.OTHER_VERSION: "the other side uses another version of muster's protocol",
    Reason.WRONG_SECRET: "the other side has another secret",
    Reason.NOT_MUSTER: "what listens there is not muster",
    Reason.CLOSED: "the other side closed the connection during the handshake",
}


class HandshakeError(Exception):
    """The handshake failed; `reason` says how."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(SENTENCES[reason])
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeys:
    """The two keys of one connection; `is_open`: derived from the public key."""

    role: Role
    send_key: bytes
    receive_key: bytes
    is_open: bool = False


async def shake_as_caller(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    role: Role,
    secret: bytes,
    *,
    is_open: bool = False,
) -> SessionKeys:
    """Run the handshake of the calling side.

    Raises:
        HandshakeError: The other side is not muster, or refused us.
    """
    hello = _HELLO.pack(MAGIC, VERSION, role, int(is_open), os.urandom(NONCE_BYTES))
    writer.write(hello)
    answer = await read_bytes(reader, _HELLO.size + MAC_BYTES)
    magic, version, reason, _, _ = _HELLO.unpack(answer[: _HELLO.size])
    if magic != MAGIC:
        raise HandshakeError(Reason.NOT_MUSTER)
    if version != VERSION or reason == Reason.OTHER_VERSION:
        raise HandshakeError(Reason.OTHER_VERSION)
    transcript = hello + answer[: _HELLO.size]
    if not hmac.compare_digest(_mac(secret, b"server", transcript), answer[_HELLO.size :]):
        writer.write(bytes(MAC_BYTES))  # proves nothing, but lets the other side name us
        raise HandshakeError(Reason.WRONG_SECRET)
    writer.write(_mac(secret, b"client", transcript))
    last = await read_bytes(reader, 1 + MAC_BYTES)
    if last[0] != Reason.ACCEPTED:
        raise HandshakeError(Reason.WRONG_SECRET)
    if not hmac.compare_digest(_mac(secret, b"done", transcript), last[1:]):
        raise HandshakeError(Reason.WRONG_SECRET)
    return SessionKeys(
        role=role,
        send_key=_mac(secret, b"key client to server", transcript),
        receive_key=_mac(secret, b"key server to client", transcript),
        is_open=is_open,
    )


def greeting() -> bytes:
    """Return what a caller sends first if it only wants to know whether muster listens."""
    return _HELLO.pack(MAGIC, VERSION, Role.AGENT, 0, os.urandom(NONCE_BYTES))


async def shake_as_called(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secrets: tuple[bytes, bytes | None],
    first: bytes = b"",
) -> SessionKeys:
    """Run the handshake of the called side.

    `secrets` are the run's secret and, if allowed, the public key. `first` holds the caller's bytes
    that were read already.

    Raises:
        HandshakeError: The caller is not muster, has another version or another secret.
    """
    hello = first + await read_bytes(reader, len(MAGIC) - len(first))
    if hello != MAGIC:
        raise HandshakeError(Reason.NOT_MUSTER)
    hello += await read_bytes(reader, _HELLO.size - len(MAGIC))
    _, version, role, key, _ = _HELLO.unpack(hello)
    secret = secrets[key] if key in (0, 1) else None
    is_open = key == 1
    agreed = Reason.ACCEPTED if version == VERSION else Reason.OTHER_VERSION
    if secret is None:
        secret, agreed = secrets[0], Reason.WRONG_SECRET
    reply = _HELLO.pack(MAGIC, VERSION, agreed, key, os.urandom(NONCE_BYTES))
    transcript = hello + reply
    writer.write(reply + _mac(secret, b"server", transcript))
    if agreed is not Reason.ACCEPTED or role not in tuple(Role):
        raise HandshakeError(agreed or Reason.OTHER_VERSION)
    proof = await read_bytes(reader, MAC_BYTES)
    if not hmac.compare_digest(_mac(secret, b"client", transcript), proof):
        writer.write(bytes([Reason.WRONG_SECRET]) + bytes(MAC_BYTES))
        raise HandshakeError(Reason.WRONG_SECRET)
    writer.write(bytes([Reason.ACCEPTED]) + _mac(secret, b"done", transcript))
    return SessionKeys(
        role=Role(role),
        send_key=_mac(secret, b"key server to client", transcript),
        receive_key=_mac(secret, b"key client to server", transcript),
        is_open=is_open,
    )


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + transcript, "sha256")


async def read_bytes(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    """Return the next bytes of the other side.

    Raises:
        HandshakeError: It sent fewer bytes and closed the connection.
    """
    try:
        return await reader.readexactly(num_bytes)
    except (asyncio.IncompleteReadError, OSError):
        raise HandshakeError(Reason.CLOSED) from None


# Frames.


MAX_FRAME_BYTES = 1 << 20
MAX_UNSENT_BYTES = 8 << 20
CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 4.0
_TAG_BYTES = 16
_RAW_CHUNK_BYTES = 512 << 10
HAPPY_EYEBALLS_S = 0.15
_LENGTH = struct.Struct("!I")
_COUNTED = struct.Struct("!QI")


class ChannelClosedError(Exception):
    """The connection has ended; the message says how."""


class Channel:
    """One authenticated connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: SessionKeys
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._session = session
        self._num_sent = 0
        self._num_received = 0
        self.role = session.role
        self.is_open = session.is_open

    @property
    def peer_address(self) -> str:
        """Return the other side's address, for messages."""
        peer = self._writer.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "a local socket"

    @property
    def own_address(self) -> str:
        """Return the local address, which the other side has reached."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def unsent_bytes(self) -> int:
        """Return the number of queued bytes that the kernel has not accepted yet."""
        return self._writer.transport.get_write_buffer_size()

    @property
    def unacknowledged_bytes(self) -> int:
        """Return how many bytes, sent or queued, the other machine has not acknowledged."""
        connection = self._writer.get_extra_info("socket")
        try:
            raw = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return 0
        return self.unsent_bytes + int(struct.unpack("i", raw)[0])

    def send_nowait(self, message: Message) -> None:
        """Queue a message; close the connection if the peer reads too slowly."""
        if self._writer.is_closing():
            return
        payload = messages.encode(message)
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"{type(message).__name__} has {len(payload)} bytes")
        self._write_frame(payload)
        if self.unsent_bytes > MAX_UNSENT_BYTES:
            self.abort()

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            ChannelClosedError: The connection ended, or the MAC of a frame was wrong.
        """
        payload = await self.receive_bytes()
        try:
            return messages.decode(payload)
        except CodecError as error:
            raise ChannelClosedError(str(error)) from None

    async def send_bytes(self, data: bytes) -> None:
        """Send one frame that is not a message, and wait until there is room for another.

        Raises:
            OSError: The connection has ended.
        """
        self._write_frame(data)
        await self._writer.drain()

    async def receive_bytes(self) -> bytes:
        """Return the content of the next frame.

        Raises:
            ChannelClosedError: The connection ended, or the MAC of a frame was wrong.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise ChannelClosedError(f"a frame claims {length} bytes")
            payload = await self._reader.readexactly(length)
            tag = await self._reader.readexactly(_TAG_BYTES)
        except asyncio.IncompleteReadError:
            raise ChannelClosedError("the other side closed the connection") from None
        except OSError as error:
            raise ChannelClosedError(str(error)) from None
        expected = _tag(self._session.receive_key, self._num_received, payload)
        if not hmac.compare_digest(tag, expected):
            raise ChannelClosedError("a frame failed its authentication")
        self._num_received += 1
        return payload

    def _write_frame(self, payload: bytes) -> None:
        tag = _tag(self._session.send_key, self._num_sent, payload)
        self._num_sent += 1
        self._writer.write(_LENGTH.pack(len(payload)) + payload + tag)

    async def send_raw(self, size_bytes: int) -> None:
        """Write padding bytes without frames; the other side must expect them."""
        chunk = bytes(min(size_bytes, _RAW_CHUNK_BYTES))
        left = size_bytes
        while left > 0 and not self._writer.is_closing():
            self._writer.write(chunk[:left])
            left -= len(chunk)
            await self._writer.drain()

    def drop_raw(self, size_bytes: int) -> "asyncio.Future[None]":
        """Discard this many bytes, after which frames follow; cancelled when the connection ends.

        Call this before the other side sends these bytes.
        """
        transport = self._writer.transport
        sink = _Sink(transport, size_bytes, asyncio.get_running_loop().create_future())
        transport.set_protocol(sink)
        return sink.done

    async def close(self) -> None:
        """Send queued messages for at most a second, then close."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()
        self.abort()

    def abort(self) -> None:
        """Close at once; queued messages are lost."""
        self._writer.transport.abort()


class _Sink(asyncio.BufferedProtocol):
    """Reads a given number of bytes into one buffer, then restores the connection's protocol."""

    def __init__(
        self, transport: asyncio.WriteTransport, size_bytes: int, done: "asyncio.Future[None]"
    ) -> None:
        self.done = done
        self._transport = transport
        self._before = transport.get_protocol()
        self._left = size_bytes
        self._buffer = memoryview(bytearray(min(size_bytes, _RAW_CHUNK_BYTES)))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left <= 0:
            self._transport.set_protocol(self._before)
            if not self.done.done():
                self.done.set_result(None)

    def eof_received(self) -> bool | None:
        return self._before.eof_received()  # type: ignore[attr-defined,no-any-return]

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.cancel()
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        self._before.pause_writing()

    def resume_writing(self) -> None:
        self._before.resume_writing()


def _tag(key: bytes, counter: int, payload: bytes) -> bytes:
    head = _COUNTED.pack(counter, len(payload))
    return hmac.digest(key, head + payload, "sha256")[:_TAG_BYTES]


async def connect(
    host: str, port: int, role: Role, secret: bytes, *, is_open: bool = False
) -> Channel:
    """Return a channel to the head.

    Raises:
        OSError: No process listens there, or none can be reached in time.
        HandshakeError: The listener is not our head.
    """
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(
            host, port, limit=1 << 18, happy_eyeballs_delay=HAPPY_EYEBALLS_S
        )
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            session = await shake_as_caller(reader, writer, role, secret, is_open=is_open)
    except BaseException:
        writer.transport.abort()
        raise
    return Channel(reader, writer, session)


# Connect to several addresses of one node in parallel, slightly staggered: the first valid answer
# wins.


STAGGER_S = 0.15

Address = tuple[str, int]


class RaceError(Exception):
    """No address answered; `failures` has one error per address, in the order they failed."""

    def __init__(self, failures: list[tuple[Address, Exception]]) -> None:
        super().__init__("no address answered")
        self.failures = failures


def worst_failure(lost: RaceError, known: Address | None) -> tuple[Address, Exception]:
    """Return the most informative failure.

    That is the failure of the address that answered before, else of a muster that refused us, else
    the first one.
    """
    for address, error in lost.failures:
        if address == known:
            return address, error
    telling = (Reason.WRONG_SECRET, Reason.OTHER_VERSION)
    for address, error in lost.failures:
        if isinstance(error, HandshakeError) and error.reason in telling:
            return address, error
    return lost.failures[0]


async def race(
    addresses: Sequence[Address],
    call: Callable[[str, int], Awaitable[Channel]],
    *,
    stagger_s: float = STAGGER_S,
    decisive: Address | None = None,
) -> tuple[Channel, Address]:
    """Return the first channel and its address; close all others.

    Each address is called `stagger_s` after the previous one, or at once if all calls so far have
    failed. If `decisive` refuses the connection, don't wait for the others.

    Raises:
        RaceError: All calls have failed.
    """
    waiting = list(addresses)
    calls: dict[asyncio.Task[Channel], Address] = {}
    failures: list[tuple[Address, Exception]] = []
    try:
        while waiting or calls:
            if waiting:
                address = waiting.pop(0)
                calls[asyncio.ensure_future(call(*address))] = address
            done, _ = await asyncio.wait(
                calls,
                timeout=stagger_s if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            won = _sort_out(done, calls, failures)
            if won is not None:
                return won
            if any(a == decisive and isinstance(e, ConnectionRefusedError) for a, e in failures):
                break
        raise RaceError(failures)
    finally:
        await _give_up(calls)


def _sort_out(
    done: set["asyncio.Task[Channel]"],
    calls: dict["asyncio.Task[Channel]", Address],
    failures: list[tuple[Address, Exception]],
) -> tuple[Channel, Address] | None:
    """Remove finished calls from `calls`; return the winner and close a second one."""
    won: tuple[Channel, Address] | None = None
    for task in [task for task in calls if task in done]:
        address = calls.pop(task)
        error = task.exception()
        if error is None:
            if won is None:
                won = task.result(), address
            else:
                task.result().abort()
        elif isinstance(error, Exception):
            failures.append((address, error))
        else:
            raise error
    return won


async def _give_up(calls: dict["asyncio.Task[Channel]", Address]) -> None:
    for task in calls:
        task.cancel()
    for ended in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(ended, Channel):  # it succeeded at the same moment
            ended.abort()
