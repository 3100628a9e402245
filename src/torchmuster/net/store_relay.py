"""Forwards connections of torch's store clients at the head's port to the store of the running attempt.

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
    """Return the maximum number of forwarded connections; each takes two of the process's descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_RELAYED if soft == resource.RLIM_INFINITY else min(MOST_RELAYED, soft // 4)


class StoreRelay:
    """Forwards a limited number of connections, each with limited buffers.

    Args:
        where: Returns the address of the running attempt's store; None while there is none.
        on_full: Called with a sentence when a caller is refused.
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
        """Forward one connection until either side closes it; its first bytes were read already."""
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
    """Copy until the end; read only as fast as the other side does."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
