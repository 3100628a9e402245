"""Frames on an authenticated connection: length, JSON and MAC, counted and bounded in size.

    4 bytes   length of the payload, at most MAX_FRAME_BYTES
    n bytes   payload
    16 bytes  HMAC-SHA256 over counter, length and payload, truncated

A frame with a wrong MAC never reaches the parser, and the connection is closed.
"""

import asyncio
import contextlib
import fcntl
import hmac
import struct
import termios
from collections.abc import Awaitable, Callable, Sequence

from torchmuster.core.model.codec import CodecError
from torchmuster.core.net import handshake, messages
from torchmuster.core.net.handshake import HandshakeError, Reason, Role, SessionKeys
from torchmuster.core.net.messages import Message

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
            session = await handshake.call(reader, writer, role, secret, is_open=is_open)
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
