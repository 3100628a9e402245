"""Calls between the processes of one user on one machine, over a Unix socket.

The kernel names the calling process (`SO_PEERCRED`) before anything is read. A frame is four bytes
of length and one of the messages below; frames are bounded, and every wait has a limit. A
connection is one call: a question, then answers until one side closes.

The job's interpreter imports this module too, so the import has to be quick.
"""

import contextlib
import os
import shutil
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from torchmuster.core import proc
from torchmuster.core.model.codec import CodecError, TypedMessage, decode, encode
from torchmuster.core.model.failure import PythonError, RanCode
from torchmuster.errors import MusterError, UsageError

if TYPE_CHECKING:
    import asyncio


# The messages.


class WorkerReport(TypedMessage):
    """From a worker of a training run to its agent."""


class WorkerFailed(WorkerReport):
    """An exception ends this worker."""

    error: PythonError
    code: RanCode | None = None


class WorkerEndedWell(WorkerReport):
    """The script has ended; `largest_group` is None if the size of its world is unknown."""

    largest_group: int | None
    code: RanCode | None = None


class ValueKept(WorkerReport):
    """The function's value is now in its file; `model.failure.ValueNote` documents the fields."""

    size_bytes: int
    sha256: str
    python: str


class DebuggerHeld(WorkerReport):
    """A debugger has stopped this worker, or released it.

    Attributes:
        waits: The tool that the worker waits for the user to attach: `debugpy` or `pdb`.
        folder: The worker's working directory, which an editor has to know.
    """

    active: bool
    waits: str = ""
    folder: str = ""


class StopAhead(WorkerReport):
    """The script saves and exits for a reason that would stop the next attempt too."""

    reason: str


class TrainingOver(WorkerReport):
    """The training library has stopped or finished: the last step, and the last saved one."""

    step: int
    saved_step: int | None


class AskMemory(WorkerReport):
    """The worker wants memory that outlives the workers; see `node.workers.HeldMemory`."""

    names: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


class TaskRequest(TypedMessage):
    """From a process of a workflow's task to the task's agent."""


class AskBarrier(TaskRequest):
    """The process has reached a barrier; `net.messages.BarrierCall` documents the fields."""

    name: str = "default"
    count: int | None = None
    rank: int | None = None
    timeout_s: float = 600.0


class AgentAnswer(TypedMessage):
    """From an agent to a caller."""


class CallTaken(AgentAnswer):
    """The agent has received the report."""


class MemoryHeld(AgentAnswer):
    """All memory that the agent holds: by name, its descriptor in the agent's process."""

    pid: int
    descriptors: dict[str, int]


class CallFailed(AgentAnswer):
    """The call failed; the fields are the parts of an error."""

    what: str
    where: str | None = None
    why: str | None = None
    fix: str | None = None
    timed_out: bool = False


class BarrierWaits(AgentAnswer):
    """Not all callers have reached the barrier; names the missing ones."""

    what: str
    left_s: float


class BarrierReleased(AgentAnswer):
    """All callers have reached the barrier."""


MAX_FRAME_BYTES = 256 << 10
MAX_CALLS = 256
SILENCE_S = 7.0  # a little more than the 5 s after which the other side sends again
_REQUEST_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5
_TELL_TIMEOUT_S = 2.0
_LOOK_EVERY_S = 0.01
_MAX_ANCESTORS = 4096
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LENGTH = struct.Struct("!I")
# In older versions a task's process sent one line of JSON, and read lines.
_OLDER = (
    b'{"kind": "failed", "what": "the agent of this task has another version of torchmuster"}\n'
)

M = TypeVar("M", bound=TypedMessage)


def caller_of(connection: socket.socket) -> int | None:
    """Return the pid at the other end; None if it belongs to another user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return int(pid) if uid == os.getuid() else None


def root_of(pid: int, roots: set[int]) -> int | None:
    """Return which root started a process, by session, group and ancestors; None if foreign."""
    for _ in range(_MAX_ANCESTORS):
        if pid in roots:
            return pid
        facts = proc.read_process(pid) if pid > 1 else None
        if facts is None:
            return None
        leader = proc.leader_of(facts, roots)
        if leader is not None:
            return leader
        pid = facts.parent_pid
    return None


def pack(message: TypedMessage) -> bytes:
    """Return a message's frame.

    Raises:
        UsageError: The message is too long.
    """
    payload = encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise UsageError(f"the call of {len(payload)} bytes is longer than {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


# The calling side: blocking, from any thread.


def connect(address: str) -> socket.socket:
    """Connect to a socket path, or to an abstract name that begins with a zero byte.

    Raises:
        OSError: No process listens there or accepts within 5 s.
    """
    call = socket.socket(socket.AF_UNIX)
    try:
        # Block with a limit of the kernel: with Python's, it fails at once when the queue is full.
        limit = struct.pack("@ll", _CONNECT_TIMEOUT_S, 0)
        call.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        call.connect(address)
    except OSError:
        call.close()
        raise
    return call


def receive(
    call: socket.socket,
    vocabulary: type[M],
    deadline_s: float | None = None,
    on_silence: Callable[[float], None] | None = None,
) -> M:
    """Return the next message.

    Args:
        call: The connection.
        vocabulary: The base class of expected messages.
        deadline_s: When to give up, by the monotonic clock.
        on_silence: Called with the remaining time if 7 s pass without data; needs a deadline.

    Raises:
        EOFError: The other side has closed.
        TimeoutError: The deadline has passed.
        OSError: The connection is broken.
        CodecError: The received bytes are not a message of muster.
    """
    (length,) = _LENGTH.unpack(_exactly(call, _LENGTH.size, deadline_s, on_silence))
    if length > MAX_FRAME_BYTES:
        raise CodecError(f"a frame claims {length} bytes")
    return decode(_exactly(call, length, deadline_s, on_silence), vocabulary)


def _exactly(
    call: socket.socket,
    num_bytes: int,
    deadline_s: float | None,
    on_silence: Callable[[float], None] | None,
) -> bytes:
    data = b""
    while len(data) < num_bytes:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError
        call.settimeout(left_s if left_s is None or not on_silence else min(left_s, SILENCE_S))
        try:
            piece = call.recv(num_bytes - len(data))
        except TimeoutError:
            if on_silence is not None and deadline_s is not None:
                on_silence(deadline_s - time.monotonic())
            continue
        if not piece:
            raise EOFError
        data += piece
    return data


def tell(address: str, message: TypedMessage) -> None:
    """Send a message to the agent and wait until it has arrived; do nothing without an agent.

    A failed connection raises no error: it must not fail a worker.

    Raises:
        UsageError: The message is too long.
    """
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(_TELL_TIMEOUT_S)
        agent.connect(address)
        agent.sendall(pack(message))
        agent.recv(1)  # the agent has the message before it notices our end


# The called side: an agent, in its event loop.


class IpcCall(Generic[M]):
    """A call by one process.

    Attributes:
        pid: The calling process.
        root: The process, started by the agent, that it descends from.
        request: The first message.
        closed: Set when the caller has closed the connection, also by being killed.
    """

    def __init__(
        self,
        caller: tuple[int, int],
        request: M,
        writer: "asyncio.StreamWriter",
        closed: "asyncio.Event",
    ) -> None:
        self.pid, self.root = caller
        self.request = request
        self.closed = closed
        self._writer = writer

    async def reply(self, answer: TypedMessage) -> None:
        """Send an answer; close the call if the caller is gone or does not read for 5 s."""
        if not self.closed.is_set():
            await _send(self._writer, pack(answer))


class IpcServer(Generic[M]):
    """Serves calls of the processes that an agent has started, and of their descendants.

    Args:
        path: The socket, in a folder that only this user can enter and that is removed at the end.
        roots: Returns the processes that the agent has started.
        vocabulary: The base class of messages that callers may send.
        handler: Handles a call; the connection is closed when it returns.
        unknown_s: How long a caller may be unknown: the agent may not know yet that it was started.
        on_odd: Called once, with the reason, when one of our callers sends an invalid message.
    """

    def __init__(
        self,
        path: str,
        roots: Callable[[], set[int]],
        vocabulary: type[M],
        handler: Callable[[IpcCall[M]], Awaitable[None]],
        *,
        unknown_s: float = 0.0,
        on_odd: Callable[[str], None] | None = None,
    ) -> None:
        self._path = path
        self._roots = roots
        self._vocabulary = vocabulary
        self._handler = handler
        self._unknown_s = unknown_s
        self._on_odd = on_odd
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Start listening."""
        import asyncio

        self._server = await asyncio.start_unix_server(self._serve, self._path, backlog=MAX_CALLS)
        os.chmod(self._path, 0o600)

    def close(self) -> None:
        """Stop listening, end all calls and remove the folder."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        shutil.rmtree(os.path.dirname(self._path), ignore_errors=True)

    async def _serve(self, reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter") -> None:
        import asyncio

        try:
            caller = await self._admit(writer.get_extra_info("socket"))
            self._writers.add(writer)
            await self._converse(caller, reader, writer)
        except MusterError as error:
            await _send(writer, pack(failure(error)))
        except (OSError, EOFError):
            return  # the caller may die at any moment
        except asyncio.CancelledError:
            return  # the agent exits; asyncio would print the traceback of a cancelled call
        finally:
            self._writers.discard(writer)
            await _hang_up(writer)

    async def _admit(self, connection: socket.socket) -> tuple[int, int]:
        """Return the caller and its root.

        Raises:
            MusterError: It is a foreign process, or there are too many calls.
        """
        import asyncio

        until = time.monotonic() + self._unknown_s
        pid = caller_of(connection) or 0
        while (root := root_of(pid, self._roots())) is None:
            if not pid or time.monotonic() >= until:
                raise MusterError("the agent answers only to processes that it has started")
            await asyncio.sleep(_LOOK_EVERY_S)
        if len(self._writers) >= MAX_CALLS:
            raise MusterError(f"{MAX_CALLS} calls of this agent are open already")
        return pid, root

    async def _converse(
        self,
        caller: tuple[int, int],
        reader: "asyncio.StreamReader",
        writer: "asyncio.StreamWriter",
    ) -> None:
        import asyncio

        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            header = await reader.readexactly(_LENGTH.size)
            if header.startswith(b"{"):
                await _send(writer, _OLDER)
                return
            request = await self._read(reader, _LENGTH.unpack(header)[0])
        closed = asyncio.Event()
        watching = asyncio.create_task(_watch(reader, closed))
        try:
            await self._handler(IpcCall(caller, request, writer, closed))
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _read(self, reader: "asyncio.StreamReader", length: int) -> M:
        if length > MAX_FRAME_BYTES:
            raise MusterError(f"the call is longer than {MAX_FRAME_BYTES >> 10} KiB")
        payload = await reader.readexactly(length)
        try:
            return decode(payload, self._vocabulary)
        except CodecError as error:
            if self._on_odd is not None:
                self._on_odd(str(error))
                self._on_odd = None
            raise MusterError("the agent does not understand the call", why=str(error)) from None


def failure(error: MusterError) -> CallFailed:
    """Return the answer that makes the caller raise this error."""
    return CallFailed(what=error.what, where=error.where, why=error.why, fix=error.fix)


async def _watch(reader: "asyncio.StreamReader", closed: "asyncio.Event") -> None:
    """Set `closed` when the caller closes the connection; ignore all other bytes."""
    with contextlib.suppress(OSError):
        while await reader.read(4096):
            pass
    closed.set()


async def _send(writer: "asyncio.StreamWriter", data: bytes) -> None:
    import asyncio

    try:
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            writer.write(data)
            await writer.drain()
    except OSError:  # the caller is gone or reads nothing: TimeoutError is an OSError
        writer.transport.abort()


async def _hang_up(writer: "asyncio.StreamWriter") -> None:
    """Close the connection after sending the rest, for at most a second."""
    import asyncio

    with contextlib.suppress(OSError):
        async with asyncio.timeout(1.0):
            writer.close()
            await writer.wait_closed()
    writer.transport.abort()
