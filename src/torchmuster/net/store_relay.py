"""Callers of torch's store at the head's own port are passed on to the store of the attempt that runs.

A script may name the port of its `muster torchrun` line itself (`init_method="tcp://HEAD:29500"`, `--dist-url`): under
torchrun a store listens there, here the head does, and each attempt's store has a port of its own.
"""

import asyncio
import contextlib
import resource
import struct
from collections.abc import Callable

# The first word of every client of a TCPStore. Source: torch/csrc/distributed/c10d/TCPStoreBackend.hpp,
# `QueryType::VALIDATE` (0) and `validationMagicNumber`, in the byte order of the machine.
STORE_CALL = struct.pack("=BI", 0, 0x3C85F7CE)
MOST_RELAYED = 4096
_CONNECT_WITHIN_S = 5.0
_PIECE_BYTES = 1 << 16

Where = Callable[[], tuple[str, int] | None]


def most_relayed() -> int:
    """Return how many connections may be passed on at a time; each takes two descriptors, and others need some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_RELAYED if soft == resource.RLIM_INFINITY else min(MOST_RELAYED, soft // 4)


class StoreRelay:
    """Passes connections on, a bounded number of them, each with bounded buffers.

    Args:
        where: Returns the address of the store of the attempt that runs; None while there is none.
        on_full: Called with a sentence when a caller has to be sent away.
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
        """Pass one connection on until either side ends it; its first word has been read."""
        address = self._where()
        if address is None:
            return
        if self._num_open >= self._most:
            self._say_full()
            return
        self._num_open += 1
        try:
            await self._relay(address, reader, writer)
        finally:
            self._num_open -= 1

    def _say_full(self) -> None:
        if not self._is_full_said:
            self._is_full_said = True
            self._on_full(
                f"more than {self._most} connections call torch's store at the head's port:"
                " use MASTER_ADDR and MASTER_PORT of the environment (init_method='env://')"
            )

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
            loop = asyncio.get_running_loop()
            ways = {
                loop.create_task(_copy(reader, to_store)),
                loop.create_task(_copy(from_store, writer)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
        finally:
            to_store.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end; what the other side does not take is not read from this one."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
