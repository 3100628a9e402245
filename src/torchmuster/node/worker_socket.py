"""The Unix socket on which workers tell their agent things: an exception, the debugger.

It lies in a 0700 folder of its own, and the kernel says which process called (`SO_PEERCRED`), so a
message is believed only from a worker that this agent started. Length-prefixed JSON, bounded.
"""

import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchmuster import proc
from torchmuster.node.leftovers import hold, note_owner

if TYPE_CHECKING:  # the agent makes its folder before it has time for asyncio
    import asyncio

_MAX_MESSAGE_BYTES = 256 << 10
_TIMEOUT_S = 5.0
_UNKNOWN_S = 1.0  # a worker may call before its spawner has come to say that it has started
_LOOK_EVERY_S = 0.01
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

Handler = Callable[[int, dict[str, Any]], None]


def make_socket_folder() -> str:
    """Return a new folder that only we can enter, short enough for a socket's name, held while we live."""
    folder = _short_folder()
    hold(folder)
    note_owner(folder)
    return folder


def _short_folder() -> str:
    try:
        folder = tempfile.mkdtemp(prefix="muster-")
        if len(folder) < 80:
            return folder
        os.rmdir(folder)
    except OSError:
        pass
    return tempfile.mkdtemp(prefix="muster-", dir="/tmp")


class WorkerSocket:
    """Listens for workers; `handler` gets the worker's pid and its message."""

    def __init__(self, path: str, worker_pids: Callable[[], set[int]], handler: Handler) -> None:
        self._path = path
        self._worker_pids = worker_pids
        self._handler = handler
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begin to listen."""
        import asyncio

        self._server = await asyncio.start_unix_server(self._serve, self._path)

    def close(self) -> None:
        """Stop listening and remove the folder."""
        if self._server is not None:
            self._server.close()
        shutil.rmtree(os.path.dirname(self._path), ignore_errors=True)

    async def _serve(self, reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter") -> None:
        import asyncio

        try:
            pid = await self._caller(writer.get_extra_info("socket"))
            if pid is not None:
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._converse(pid, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            return  # a worker may die in mid-sentence
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _converse(
        self, pid: int, reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter"
    ) -> None:
        (length,) = struct.unpack("!I", await reader.readexactly(4))
        if length > _MAX_MESSAGE_BYTES:
            return
        message = json.loads(await reader.readexactly(length))
        if isinstance(message, dict):
            self._handler(pid, message)
        writer.write(b"\1")
        await writer.drain()

    async def _caller(self, connection: socket.socket) -> int | None:
        """Return the worker whose process, or whose session or group, called; None for who stays a stranger."""
        import asyncio

        until = time.monotonic() + _UNKNOWN_S
        while (pid := self._known_caller(connection)) is None and time.monotonic() < until:
            await asyncio.sleep(_LOOK_EVERY_S)
        return pid

    def _known_caller(self, connection: socket.socket) -> int | None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            return None
        workers = self._worker_pids()
        if pid in workers:
            return int(pid)
        facts = proc.read_process(pid)
        return proc.leader_of(facts, workers) if facts is not None else None
