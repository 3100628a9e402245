"""The Unix socket on which the processes of a task call their agent, and wait for its answers.

It lies in a 0700 folder, and the kernel says which process called (`SO_PEERCRED`): only processes of
our own user are believed whose session or ancestor is the task's command. One call a connection:

    process -> agent    one line of JSON, at most 64 KiB
    agent -> process    lines of JSON, until one side closes

Nothing of a stranger's is read.
"""

import contextlib
import json
import os
import shutil
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from torchmuster import proc
from torchmuster.errors import MusterError

if TYPE_CHECKING:  # the agent starts its spawner before it has time for asyncio
    import asyncio

MAX_REQUEST_BYTES = 64 << 10
MAX_CALLS = 256
_REQUEST_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_MAX_ANCESTORS = 4096
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class TaskCall:
    """One process that called.

    Attributes:
        pid: The process.
        request: What it asks.
        closed: Set when its side has ended; a process that is killed closes too.
    """

    def __init__(
        self,
        pid: int,
        request: dict[str, Any],
        writer: "asyncio.StreamWriter",
        closed: "asyncio.Event",
    ) -> None:
        self.pid = pid
        self.request = request
        self.closed = closed
        self._writer = writer

    async def reply(self, answer: dict[str, Any]) -> None:
        """Send one line; who has gone, or takes nothing for 5 s, gets none and loses the call."""
        if not self.closed.is_set():
            await _send(self._writer, answer)


Handler = Callable[[TaskCall], Awaitable[None]]


class TaskSocket:
    """Listens for the processes of one task.

    Args:
        path: The socket, alone in its folder (`worker_socket.make_socket_folder`).
        commands: Returns the pids of the task's command, also of one that is just being started.
        handler: Has the conversation; the connection is closed when it returns.
    """

    def __init__(self, path: str, commands: Callable[[], set[int]], handler: Handler) -> None:
        self._path = path
        self._commands = commands
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Begin to listen."""
        import asyncio

        self._server = await asyncio.start_unix_server(
            self._serve, self._path, limit=MAX_REQUEST_BYTES, backlog=MAX_CALLS
        )
        os.chmod(self._path, 0o600)

    def close(self) -> None:
        """Stop listening, end all calls and remove the folder."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        shutil.rmtree(os.path.dirname(self._path), ignore_errors=True)

    async def _serve(self, reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter") -> None:
        try:
            pid, refusal = self._admit(writer.get_extra_info("socket"))
            if refusal is not None:
                await _send(writer, failure(refusal))
                return
            self._writers.add(writer)
            await self._converse(pid, reader, writer)
        except (OSError, EOFError):
            return  # a process may die in mid-sentence
        finally:
            self._writers.discard(writer)
            await _hang_up(writer)

    def _admit(self, connection: socket.socket) -> tuple[int, MusterError | None]:
        pid = _believed_caller(connection, self._commands())
        if pid is None:
            return 0, MusterError("the agent answers only to processes of the task's own command")
        if len(self._writers) >= MAX_CALLS:
            return pid, MusterError(f"{MAX_CALLS} calls of this task are open already")
        return pid, None

    async def _converse(
        self, pid: int, reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter"
    ) -> None:
        import asyncio

        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                request = _parse(await reader.readline())
        except MusterError as error:
            await _send(writer, failure(error))
            return
        except ValueError:  # asyncio's word for a line over the limit
            await _send(writer, failure(_too_long()))
            return
        call = TaskCall(pid, request, writer, asyncio.Event())
        watching = asyncio.create_task(_watch(reader, call.closed))
        try:
            await self._handler(call)
        except MusterError as error:
            await call.reply(failure(error))
        finally:
            watching.cancel()
            await asyncio.wait([watching])


def failure(error: MusterError) -> dict[str, Any]:
    """Return the answer that makes the process raise this error."""
    return {
        "kind": "failed",
        "what": error.what,
        "where": error.where,
        "why": error.why,
        "fix": error.fix,
    }


def _too_long() -> MusterError:
    return MusterError(f"the call is longer than {MAX_REQUEST_BYTES >> 10} KiB")


def _parse(line: bytes) -> dict[str, Any]:
    """Return the request in a line.

    Raises:
        EOFError: The caller has gone in mid-sentence.
        MusterError: It is not one JSON object.
    """
    if not line.endswith(b"\n"):
        raise EOFError
    if len(line) > MAX_REQUEST_BYTES:
        raise _too_long()
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise MusterError("the call is not one line with a JSON object")
    return request


async def _watch(reader: "asyncio.StreamReader", closed: "asyncio.Event") -> None:
    """Set `closed` at the end of the caller's side; what it says beyond its request is nothing."""
    try:
        while await reader.read(4096):
            pass
    except OSError:
        pass
    closed.set()


async def _send(writer: "asyncio.StreamWriter", answer: dict[str, Any]) -> None:
    import asyncio

    try:
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
    except OSError:  # it has gone, or takes nothing: a TimeoutError is one of these
        writer.transport.abort()


async def _hang_up(writer: "asyncio.StreamWriter") -> None:
    """Close, with a second for what is still to be sent."""
    import asyncio

    with contextlib.suppress(OSError):
        async with asyncio.timeout(1.0):
            writer.close()
            await writer.wait_closed()
    writer.transport.abort()


def _believed_caller(connection: socket.socket, commands: set[int]) -> int | None:
    """Return the pid that called, if its session or one of its ancestors is a command."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    caller, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        return None
    pid = int(caller)
    for _ in range(_MAX_ANCESTORS):
        if pid in commands:
            return int(caller)
        facts = proc.read_process(pid) if pid > 1 else None
        if facts is None:
            return None
        if proc.leader_of(facts, commands) is not None:
            return int(caller)
        pid = facts.parent_pid
    return None
