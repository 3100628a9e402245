"""The listening side: limits the number of unauthenticated connections, and their time.

A caller is silent until it has sent its first bytes, which an honest one does at once. Up to
`MAX_SILENT` callers may be silent. One more replaces the oldest silent caller of the address that
has the most, so a flood of silent connections blocks no other address.

A caller that has sent bytes gets one of `MAX_STRANGERS` slots for the handshake, the address with
the fewest callers first. When all slots are taken, the oldest caller of the address with the most
is closed once it has had a fair time. Until then new callers wait, finally in the kernel's queue.
So many honest agents are served in order, and a flood of garbage can't block them.

If enabled, connections that use torch's store protocol are forwarded (`StoreRelay`).
"""

import asyncio
import contextlib
import resource
import socket
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Generic, TypeVar

from torchmuster.core.net import channel

# Forward torch's store clients from the head's port to the store of the running attempt.
#
# A script may name the port of its `muster torchrun` line itself (`init_method="tcp://HEAD:29500"`,
# `--dist-url`). Under torchrun a store listens there; here the head does, and each attempt's store
# has its own port.


# The first bytes of every TCPStore client. Source: torch/csrc/distributed/c10d/TCPStoreBackend.hpp,
# `QueryType::VALIDATE` (0) and `validationMagicNumber`, in the machine's byte order.
STORE_CALL = struct.pack("=BI", 0, 0x3C85F7CE)
MOST_RELAYED = 4096
_CONNECT_WITHIN_S = 5.0
_PIECE_BYTES = 1 << 16

Where = Callable[[], tuple[str, int] | None]


def most_relayed() -> int:
    """Return the maximum number of forwarded connections; each needs two descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_RELAYED if soft == resource.RLIM_INFINITY else min(MOST_RELAYED, soft // 4)


class StoreRelay:
    """Forwards a limited number of store connections, each with limited buffers.

    Args:
        where: Returns the address of the running attempt's store; None while there is none.
        on_full: Called with a sentence when the first caller is refused.
    """

    def __init__(
        self, where: Where, on_full: Callable[[str], None], most: int | None = None
    ) -> None:
        self._where = where
        self._on_full = on_full
        self._most = most_relayed() if most is None else most
        self._num_open = 0
        self._is_full_said = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side closes it; its first bytes are read already."""
        address = self._where()
        if address is None:
            return
        if self._num_open >= self._most:
            if not self._is_full_said:
                self._is_full_said = True
                self._on_full(
                    f"more than {self._most} connections call torch's store at the head's port:"
                    " use MASTER_ADDR and MASTER_PORT of the environment (init_method='env://')"
                )
            return
        self._num_open += 1
        try:
            await self._relay(address, reader, writer)
        finally:
            self._num_open -= 1

    async def _relay(
        self,
        address: tuple[str, int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            async with asyncio.timeout(_CONNECT_WITHIN_S):
                from_store, to_store = await asyncio.open_connection(*address)
        except (OSError, TimeoutError):
            return
        try:
            to_store.write(STORE_CALL)
            both = _copy(reader, to_store), _copy(from_store, writer)
            ways = [asyncio.ensure_future(way) for way in both]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
        finally:
            to_store.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end, reading only as fast as the other side does."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


# Decide which of many callers to close and which to serve next, so that one address can't block
# others. No I/O.


T = TypeVar("T", bound=Hashable)


class Seats(Generic[T]):
    """The callers of each address, in order of arrival."""

    def __init__(self) -> None:
        self._by_address: dict[str, OrderedDict[T, float]] = {}
        self._addresses: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._addresses))

    def take(self, caller: T, address: str, now: float) -> None:
        """Add a caller."""
        self._addresses[caller] = address
        self._by_address.setdefault(address, OrderedDict())[caller] = now

    def leave(self, caller: T) -> str | None:
        """Remove a caller; return its address, or None if it was not here."""
        address = self._addresses.pop(caller, None)
        if address is None:
            return None
        here = self._by_address[address]
        del here[caller]
        if not here:
            del self._by_address[address]
        return address

    def oldest_of_the_crowd(self) -> tuple[T, float]:
        """Return the caller to close first, and when it arrived.

        That is the oldest caller of the address with the most.
        """
        return next(iter(max(self._by_address.values(), key=len).items()))

    def next_in_turn(self) -> T:
        """Return the caller to serve next: the oldest of the address with the fewest callers."""
        address = min(self._by_address, key=lambda name: len(self._by_address[name]))
        return next(iter(self._by_address[address]))


MAX_SILENT = 256
MAX_STRANGERS = 128
_MAX_WAITING = 256
_ACCEPTS_IN_A_ROW = 16
_PAUSE_S = 0.01
_FAIR_TIME_S = 0.5

Handler = Callable[[channel.Channel], Awaitable[None]]
Refusal = Callable[[str, channel.HandshakeError], None]


class Listener:
    """Accepts connections and passes the authenticated ones to `handler`."""

    def __init__(
        self,
        listening: socket.socket,
        secrets: tuple[bytes, bytes | None],
        handler: Handler,
        refusal: Refusal,
        relay: StoreRelay | None = None,
    ) -> None:
        self._listening = listening
        self._secrets = secrets
        self._handler = handler
        self._refusal = refusal
        self._relay = relay
        self._silent: Seats[socket.socket] = Seats()
        self._waiting: Seats[socket.socket] = Seats()  # they have sent their first bytes
        self._strangers: Seats[asyncio.Task[None]] = Seats()
        self._limits: dict[socket.socket, asyncio.TimerHandle] = {}
        self._look: asyncio.TimerHandle | None = None
        self._is_over = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._unopened: set[socket.socket] = set()

    @property
    def port(self) -> int:
        """Return the port that the kernel gave us."""
        return int(self._listening.getsockname()[1])

    @property
    def num_strangers(self) -> int:
        """Return the number of connections that are not yet authenticated."""
        return len(self._silent) + len(self._waiting) + len(self._strangers)

    async def serve(self) -> None:
        """Accept connections until cancelled; then close them all."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listening, self._accept)
        try:
            await loop.create_future()
        finally:
            if not self._is_over:
                self.accept_no_more()
            for connection in [*self._silent, *self._waiting]:
                self._drop(connection)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for connection in self._unopened:  # cancelled before their first step
                connection.close()
            self._unopened.clear()

    def accept_no_more(self) -> None:
        """Stop accepting callers; existing connections continue."""
        asyncio.get_running_loop().remove_reader(self._listening)
        self._is_over = True
        self._listening.close()

    def _accept(self) -> None:
        """Accept a few callers at a time, so that a flood doesn't block those already connected."""
        for _ in range(_ACCEPTS_IN_A_ROW):
            if len(self._waiting) >= _MAX_WAITING:
                self._pause()
                return
            try:
                connection, peer = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors, or the caller is gone already
                self._pause()
                return
            self._take(connection, str(peer[0]))

    def _pause(self) -> None:
        """Leave callers in the kernel's queue for a moment."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)
        loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if not self._is_over:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    # Before the first bytes.

    def _take(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        # Fewer bytes don't wake us; the end of the connection does all the same.
        least = len(channel.MAGIC if self._relay is None else STORE_CALL)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
        if not self._judge(connection, address):
            self._seat(connection, address)

    def _judge(self, connection: socket.socket, address: str) -> bool:
        """Check a caller's first bytes and reject other protocols; return False if too few came."""
        try:
            word = connection.recv(len(channel.MAGIC), socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            word = b""
        is_store_call = self._relay is not None and word.startswith(STORE_CALL)
        if word == channel.MAGIC or is_store_call:
            self._waiting.take(connection, address, asyncio.get_running_loop().time())
            self._admit()
            return True
        if word and channel.MAGIC.startswith(word):
            return False
        reason = channel.Reason.NOT_MUSTER if word else channel.Reason.CLOSED
        self._refusal(address, channel.HandshakeError(reason))
        connection.close()
        return True

    def _seat(self, connection: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        if len(self._silent) >= MAX_SILENT:
            self._drop(self._silent.oldest_of_the_crowd()[0])
        self._silent.take(connection, address, loop.time())
        self._limits[connection] = loop.call_later(
            channel.HANDSHAKE_TIMEOUT_S, self._drop, connection
        )
        loop.add_reader(connection, self._hear, connection)

    def _hear(self, connection: socket.socket) -> None:
        address = self._leave_silent(connection)
        if address is None or self._judge(connection, address):
            return
        option = (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        if connection.getsockopt(*option) < len(channel.MAGIC):
            connection.setsockopt(*option, len(channel.MAGIC))
            self._seat(connection, address)
        else:
            connection.close()  # it ended in the middle of its first bytes

    def _leave_silent(self, connection: socket.socket) -> str | None:
        address = self._silent.leave(connection)
        if address is not None:
            asyncio.get_running_loop().remove_reader(connection)
            self._limits.pop(connection).cancel()
        return address

    def _drop(self, connection: socket.socket) -> None:
        self._leave_silent(connection)
        self._waiting.leave(connection)
        connection.close()

    # The handshake.

    def _admit(self) -> None:
        """Give free slots to waiting callers."""
        loop = asyncio.get_running_loop()
        while len(self._waiting):
            if len(self._strangers) >= MAX_STRANGERS and not self._free_a_seat():
                break
            connection = self._waiting.next_in_turn()
            address = self._waiting.leave(connection) or ""
            self._unopened.add(connection)
            task = loop.create_task(self._receive(connection))
            self._strangers.take(task, address, loop.time())
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _free_a_seat(self) -> bool:
        """Close the caller that has had its fair time; if none has, check again when one has."""
        loop = asyncio.get_running_loop()
        oldest, since = self._strangers.oldest_of_the_crowd()
        patience_s = since + _FAIR_TIME_S - loop.time()
        if patience_s <= 0:
            self._strangers.leave(oldest)
            oldest.cancel()
            return True
        if self._look is None:
            self._look = loop.call_later(patience_s, self._look_again)
        return False

    def _look_again(self) -> None:
        self._look = None
        if not self._is_over:
            self._admit()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._strangers.leave(task) is not None and not self._is_over:
            self._admit()
        if not task.cancelled() and task.exception() is not None:
            context = {"message": "a connection's handler failed", "exception": task.exception()}
            task.get_loop().call_exception_handler(context)

    async def _receive(self, connection: socket.socket) -> None:
        self._unopened.discard(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 18)
        try:
            caller = await self._authenticate(reader, writer)
            if caller is not None:
                self._leave_seat()
            if isinstance(caller, channel.Channel):
                await self._handler(caller)
            elif caller is not None:
                await caller.serve(reader, writer)
        finally:
            if writer.transport.get_write_buffer_size():
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        writer.close()
                        await writer.wait_closed()
            writer.transport.abort()

    def _leave_seat(self) -> None:
        this = asyncio.current_task()
        if this is not None and self._strangers.leave(this) is not None:
            self._admit()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> channel.Channel | StoreRelay | None:
        peer = writer.get_extra_info("peername")
        try:
            async with asyncio.timeout(channel.HANDSHAKE_TIMEOUT_S):
                first = b""
                if self._relay is not None:
                    first = await channel.read_bytes(reader, len(STORE_CALL))
                    if first == STORE_CALL:
                        return self._relay
                session = await channel.shake_as_called(reader, writer, self._secrets, first)
        except channel.HandshakeError as error:
            self._refusal(str(peer[0]) if peer else "unknown", error)
            return None
        except TimeoutError:
            return None
        return channel.Channel(reader, writer, session)
