"""The listening side: strangers get little, and never for long.

At most `MAX_STRANGERS` connections are in their handshake at a time, each for at most two seconds. When
all seats are taken, the oldest stranger gives up his once he has had a fair time for it; until then new
callers wait in the kernel's queue, so that a crowd of honest agents is served in order and a flood
of garbage can't hold the door. Who speaks torch's store protocol is passed on, where that is wanted
(`net/store_relay.py`).
"""

import asyncio
import contextlib
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from torchmuster.net import handshake
from torchmuster.net.channel import HANDSHAKE_TIMEOUT_S, Channel
from torchmuster.net.handshake import HandshakeError
from torchmuster.net.store_relay import STORE_CALL, StoreRelay

MAX_STRANGERS = 64
_FAIR_TIME_S = 0.25
_BACKLOG = 4096

Handler = Callable[[Channel], Awaitable[None]]
Refusal = Callable[[str, HandshakeError], None]


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 lets the kernel choose.

    Raises:
        OSError: The address is not ours, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


class Listener:
    """Accepts connections and hands the authenticated ones to `handler`."""

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
        self._strangers: OrderedDict[asyncio.Task[None], float] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unopened: set[socket.socket] = set()

    @property
    def port(self) -> int:
        """Return the port that the kernel gave us."""
        return int(self._listening.getsockname()[1])

    @property
    def num_strangers(self) -> int:
        """Return how many connections are in their handshake."""
        return len(self._strangers)

    async def serve(self) -> None:
        """Accept until cancelled; then close every connection."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wait_for_seat()
                try:
                    connection, _ = await loop.sock_accept(self._listening)
                except OSError:  # out of descriptors, or the caller has gone already
                    await asyncio.sleep(0.01)
                    continue
                self._unopened.add(connection)
                task = loop.create_task(self._receive(connection))
                self._strangers[task] = loop.time()
                self._tasks.add(task)
                task.add_done_callback(self._forget)
        finally:
            self._listening.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for connection in self._unopened:  # cancelled before their first step
                connection.close()
            self._unopened.clear()

    async def _wait_for_seat(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._strangers) >= MAX_STRANGERS:
            oldest, since = next(iter(self._strangers.items()))
            patience_s = since + _FAIR_TIME_S - loop.time()
            if patience_s <= 0:
                self._strangers.pop(oldest)
                oldest.cancel()
                return
            await asyncio.wait(
                self._strangers, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            await asyncio.sleep(0)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            context = {"message": "a connection's handler failed", "exception": task.exception()}
            task.get_loop().call_exception_handler(context)

    async def _receive(self, connection: socket.socket) -> None:
        self._unopened.discard(connection)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 18)
        try:
            caller = await self._authenticate(reader, writer)
            if caller is not None:
                self._leave_seat()
            if isinstance(caller, Channel):
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
        if this is not None:
            self._strangers.pop(this, None)

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Channel | StoreRelay | None:
        peer = writer.get_extra_info("peername")
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                first = b""
                if self._relay is not None:
                    first = await handshake.read_first(reader, len(STORE_CALL))
                    if first == STORE_CALL:
                        return self._relay
                session = await handshake.answer(reader, writer, self._secrets, first)
        except HandshakeError as error:
            self._refusal(str(peer[0]) if peer else "unknown", error)
            return None
        except TimeoutError:
            return None
        return Channel(reader, writer, session)
