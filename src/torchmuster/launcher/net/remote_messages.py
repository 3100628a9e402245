"""The messages between the client and the remote end of an ssh session: the protocol.

A message on the session's standard streams is four bytes of length, then one JSON object as on the
channel: its `type` is the name of a class here, its other fields are that class's fields, and bytes
follow it (`core/model/codec.py`). There is no MAC: ssh authenticates the stream. Three things are not
messages, since torchmuster may not be there yet: the line that ends the output of the host's shell,
the loader's text before it, and the package, which is one frame (`launcher/node/remote/loader.py`).

The remote end is started from the client's own package, so both have the same version;
`RemoteReady` proves it. The reader of the stream has a time limit; the writer blocks only senders of
bulk data.
"""

import os
import select
import struct
import threading
import time
from collections import deque
from dataclasses import field
from typing import Any

from torchmuster.core.model import codec
from torchmuster.core.model.codec import TypedMessage
from torchmuster.core.model.plan import EnvironmentNeeds, RunPlan

PROTOCOL = 6
LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 4 << 20
CHUNK_BYTES = 256 << 10
CODE_FILE = "code.tar.gz"
CALL_FILE = "call"  # as `files.layout.RunDir.call`
OUTPUT_FILE = "output.tar.gz"
GONE = 255  # an agent that can't be started or watched; ssh's status for a broken connection
MAX_DEPTH = 64  # nested folders
_MAX_PATH_BYTES = 4096
encode = codec.encode


class FrameError(Exception):
    """The received bytes are not a message of an ssh session."""


class RemoteMessage(TypedMessage):
    """Base class of messages of an ssh session."""


# Before the run. The first two may come from the loader.


class RemoteFacts(RemoteMessage):
    """From the host: its properties; if it lacks the package, the client sends that next."""

    has_package: bool
    num_cpus: int
    num_gpus: int
    memory_bytes: int


class RemoteFailed(RemoteMessage):
    """From the host: the last request failed; an error for the user."""

    what: str
    where: str | None = None
    why: str | None = None
    fix: str | None = None


class SessionStatus(RemoteMessage):
    """From the host: state of its session; `multirun/server/messages.py` explains the fields."""

    run_id: str
    num_runs: int
    idle_s: float
    ends_in_s: float | None
    why_ends: str
    memory_bytes: int
    problem: str


class RemoteNote(RemoteMessage):
    """From the host: a sentence for the user."""

    text: str


class RemoteReady(RemoteMessage):
    """From the host: torchmuster is installed and uses this version."""

    protocol: int


class RemotePing(RemoteMessage):
    """From the client: a sign of life; without it the host ends everything."""


class RemotePong(RemoteMessage):
    """From the host: a sign of life."""


class SetUpRun(RemoteMessage):
    """From the client: the run whose agent will be started on the host.

    Attributes:
        mark: Tells the client's run directory from another one at the same path.
        token: Content of `shared-token` in the client's run directory; shows whether the host
            shares it.
        secret: The channel's key, in case the host has a separate run directory.
        script: `code_copy.identity` of the program's file.
        code_root: The folder that is copied to a host that lacks the script.
        head_run_dir: The head's run directory, which `head_mark` tells from another host's; None
            for the head.
    """

    plan: RunPlan
    run_dir: str
    token: str
    may_share: bool
    secret: str
    script: dict[str, Any] | None
    code_root: str
    mark: str = ""
    head_run_dir: str | None = None
    head_mark: str = ""

    def __repr__(self) -> str:
        return f"SetUpRun({self.plan.run_id})"


class SetUpTasks(RemoteMessage):
    """From the client: the workflow whose tasks will be started on the host.

    Attributes:
        host: The client's name for the host.
        folders: Folders that the host must see besides the run directory.
        lines: The site's setup lines; `environment` has its variables, `origin` where they are
            defined.
    """

    run_dir: str
    may_share: bool
    token: str = ""
    host: str = ""
    folders: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    origin: str = ""


class Placed(RemoteMessage):
    """From the host, in answer to both: its run directory; `SetUpDone` follows.

    Attributes:
        mark: Tells the folder from another host's at the same path; empty for the client's own.
        is_shared: It is the client's run directory; `with_head`: it is the head's.
        wants_code: The host first wants the code folder: `FilePiece`s of its archive, and
            `CodeSent`.
        is_copied: The host works on a copy of the code folder.
        lacks: Folders that the host does not see, so tasks can't run there.
    """

    run_dir: str
    mark: str = ""
    is_shared: bool = False
    with_head: bool = False
    wants_code: bool = False
    is_copied: bool = False
    lacks: tuple[str, ...] = ()


class CodeSent(RemoteMessage):
    """From the client: the archive is complete."""


class SetUpDone(RemoteMessage):
    """From the host: agents can be started; `note` is a sentence for the user."""

    note: str | None = None


# A virtual environment: offered to each host, sent to the first that lacks it, then passed on.


class OfferEnvironment(RemoteMessage):
    """From the client: an environment to use; `EnvironmentPlaced` or `RemoteFailed` follows.

    Attributes:
        secret: Authenticates the hosts to each other when one passes it to the next.
        scratch: The site's folder for it, in which the host fills in its variables; None for the
            host's default.
    """

    needs: EnvironmentNeeds
    secret: str
    scratch: str | None = None

    def __repr__(self) -> str:
        return f"OfferEnvironment({self.needs.sha})"


class EnvironmentPlaced(RemoteMessage):
    """From the host: it has the environment, or accepts it at these addresses and this port."""

    has: bool
    addresses: tuple[str, ...] = ()
    port: int = 0


class PassEnvironment(RemoteMessage):
    """From the client: forward the environment to the host at these addresses; port 0: to none."""

    addresses: tuple[str, ...] = ()
    port: int = 0


class BringEnvironment(RemoteMessage):
    """From the client: it sends what is still missing; `EnvironmentWants` follows.

    Attributes:
        tries: This host imports torch once it has all, to test the environment at its new path.
    """

    tries: bool = False


class EnvironmentWants(RemoteMessage):
    """From the host: the piece it wants next; -1 is the list, past the last one it has all."""

    index: int


class EnvironmentPiece(RemoteMessage):
    """From the client: a piece of the environment, or with index -1 the list of pieces."""

    index: int
    data: bytes


class EnvironmentHopFailed(RemoteMessage):
    """From the host: it can't forward the environment to the next host."""

    why: str


class EnvironmentDone(RemoteMessage):
    """From the host: the environment is in place; or `why` it is not."""

    why: str | None = None


class PruneEnvironments(RemoteMessage):
    """From the client: remove unused environments; `EnvironmentsPruned` follows.

    Attributes:
        older_s: Remove those that were not used for so long.
        most_bytes: Also remove the oldest beyond so many bytes in total.
        dry_run: Only report which would be removed.
        scratch: As in `OfferEnvironment`.
    """

    older_s: float
    most_bytes: int | None = None
    dry_run: bool = False
    scratch: str | None = None


class EnvironmentsPruned(RemoteMessage):
    """From the host: the environments that were removed, or would be."""

    paths: tuple[str, ...] = ()
    size_bytes: int = 0


# Files: the code to the host, the record and the outputs back.


class FilePiece(RemoteMessage):
    """Bytes of a file; `path` is relative to the run directory."""

    path: str
    offset: int
    data: bytes

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in self.path:
            raise codec.CodecError("a file outside of the run directory")
        try:
            num_bytes = len(os.fsencode(self.path))
        except UnicodeEncodeError:
            raise codec.CodecError("a file whose name is none") from None
        if (
            num_bytes > _MAX_PATH_BYTES
            or len(parts) > MAX_DEPTH + 1
            or not 0 <= self.offset <= 1 << 50
        ):
            raise codec.CodecError("a file with a wrong name or offset")


class Collect(RemoteMessage):
    """From the client: send the new files in the copy of the code folder, or those of `output`."""

    output: str = ""


class Collected(RemoteMessage):
    """From the host: it has sent all pieces of `OUTPUT_FILE`.

    Attributes:
        stay: Some of the `num_stay` files for which there was no room; they stay in `root`.
        snapshots: The folder of snapshots that stays on the host; empty for none.
        unread: Files of the record that can't be read there, and why.
    """

    num_stay: int = 0
    stay: tuple[str, ...] = ()
    root: str = ""
    snapshots: str = ""
    unread: tuple[str, ...] = ()


# Copies of growing files (`launcher/net/replica.py`).


class CopyHas(RemoteMessage):
    """From the keeper of a copy: its state, from which a feed continues, or to which it goes back.

    Attributes:
        mark: Identifies the folder that it was copied from; empty for none.
        files: Size of each file, and the checksum over its two ends.
        more: Another message with more files follows.
        order: The order of the pod whose folder is wanted, if that is not the pod that gets this.
    """

    mark: str = ""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    more: bool = False
    order: dict[str, Any] | None = None


class CopyOf(RemoteMessage):
    """From the source: the folder that follows; empty: there is none yet.

    Another mark is that of another disk, whose copy begins from scratch.
    """

    mark: str


class CopyEnd(RemoteMessage):
    """From the source: all is sent; if the record is over, also the run's outputs.

    Attributes:
        stay: Some of the `num_stay` files for which there was no room.
        unread: Files that could not be read there, and why.
    """

    num_stay: int = 0
    stay: tuple[str, ...] = ()
    is_over: bool = False
    unread: tuple[str, ...] = ()


class CopyHeld(RemoteMessage):
    """From the keeper of a copy: everything is in place, and the source may remove it."""


# Agents. A host may ask the client for a `StartNode` on another host: the roles are then swapped.


class StartNode(RemoteMessage):
    """Start the agent of one node of a run.

    Attributes:
        agent_id: The sender's number for the agent.
        heads: Where the head listens, `host:port`; empty for the agent with the head.
        run_dir: Run directory of a training task inside the workflow; None for the run itself.
        host: The host to start it on, in a request of a host to the client.
        gpus: The GPUs that it may use; None leaves the choice to the host.
        first_attempt: For the head, as `restarts_spent`.
    """

    agent_id: int = 0
    place: int
    heads: tuple[str, ...] = ()
    run_dir: str | None = None
    host: str = ""
    gpus: tuple[str, ...] | None = None
    first_attempt: int = 0
    restarts_spent: int = 0


class StartTask(RemoteMessage):
    """Start the agent of a task; the head of its group listens at `port` of the client's loopback.

    Attributes:
        may_move: The task may run on another host if this one can't be reached.
    """

    agent_id: int = 0
    host: str
    group: str
    task: str
    attempt: int
    port: int
    may_move: bool = False


class AgentStarted(RemoteMessage):
    """The agent runs. With the head, it listens at `port` of these addresses."""

    agent_id: int
    port: int = 0
    addresses: tuple[str, ...] = ()


class AgentEnded(RemoteMessage):
    """The agent and all its children have ended; a negative status is a signal.

    `why`: it could not be started.
    """

    agent_id: int
    status: int
    why: str | None = None


class KillAgent(RemoteMessage):
    """Send SIGKILL to the agent and all its child processes."""

    agent_id: int


class HeadMoved(RemoteMessage):
    """From the client: a new head has replaced a lost one; this host's agents obey only it."""

    heads: tuple[str, ...]


class CutLifeline(RemoteMessage):
    """From the client: let the agents end by themselves; keep the session."""


class LeaveHost(RemoteMessage):
    """From the client: end the session."""


# Connections forwarded inside the session (`launcher/net/relay.py`).


class RelayOpen(RemoteMessage):
    """Connect to this port of your loopback; the client's `call_id`s are odd, a host's even."""

    call_id: int
    port: int


class RelayData(RemoteMessage):
    """Bytes of a connection."""

    call_id: int
    data: bytes


class RelayAcknowledged(RemoteMessage):
    """So many bytes of a connection have been delivered to the program at this end."""

    call_id: int
    size_bytes: int


class RelayClose(RemoteMessage):
    """A connection has ended."""

    call_id: int


OfRelay = RelayOpen | RelayData | RelayAcknowledged | RelayClose


def decode(payload: bytes) -> RemoteMessage:
    """Return the message in a payload.

    Raises:
        FrameError: The payload is not a message of this protocol.
    """
    try:
        return codec.decode(payload, RemoteMessage)
    except codec.CodecError as error:
        raise FrameError(str(error)[:300]) from None


def pack(value: RemoteMessage) -> bytes:
    """Return a message as a frame; raise ValueError if it is too long."""
    payload = encode(value)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"{type(value).__name__} has {len(payload)} bytes")
    return LENGTH.pack(len(payload)) + payload


# Bulk data waits while more than this is queued.
_BUSY_BYTES = 2 << 20


class FrameReader:
    """Reads messages from a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()

    def read(self, timeout_s: float) -> RemoteMessage | None:
        """Return the next message; None at the end of file.

        Raises:
            TimeoutError: Nothing was received for `timeout_s`.
            FrameError: The received bytes are not a message.
        """
        while True:
            if len(self._buffer) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(self._buffer)
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"a frame of {length} bytes")
                end = LENGTH.size + length
                if len(self._buffer) >= end:
                    payload = bytes(self._buffer[LENGTH.size : end])
                    del self._buffer[:end]
                    return decode(payload)
            if not self._fill(timeout_s):
                return None

    def read_until(self, marker: bytes, limit_bytes: int, timeout_s: float) -> bytes | None:
        """Return the bytes before the line `marker`; None at the end of file (see `rest`).

        Raises:
            TimeoutError: The marker was not received within `timeout_s`.
            FrameError: More than `limit_bytes` were received before it.
        """
        deadline = time.monotonic() + timeout_s
        while (at := self._buffer.find(marker + b"\n")) < 0:
            if len(self._buffer) > limit_bytes:
                raise FrameError(f"more than {limit_bytes} bytes before the session begins")
            if not self._fill(max(0.0, deadline - time.monotonic())):
                return None
        before = bytes(self._buffer[:at])
        del self._buffer[: at + len(marker) + 1]
        return before

    @property
    def rest(self) -> bytes:
        """Return the received bytes that are not yet a complete message."""
        return bytes(self._buffer)

    def _fill(self, timeout_s: float) -> bool:
        poller = select.poll()  # `select` knows no descriptor beyond 1023
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            raise TimeoutError
        data = os.read(self._fd, 1 << 16)
        self._buffer += data
        return bool(data)


class FrameWriter:
    """A thread that writes to a descriptor; if that blocks, only senders of bulk data wait."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ping_every_s: float | None = None
        self._pinged_at = time.monotonic()
        self._queue: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self.is_broken = False
        threading.Thread(target=self._work, name="frames", daemon=True).start()

    def ping_every(self, interval_s: float) -> None:
        """Send a ping this often, even between bulk data.

        Only pings are answered, and silence ends a session.
        """
        with self._changed:
            self._ping_every_s = interval_s
            self._changed.notify_all()

    def send(self, message: RemoteMessage, *, bulk: bool = False) -> bool:
        """Queue a message, a bulk one once the queue is short; return False if the peer is gone."""
        frame = pack(message)
        with self._changed:
            while bulk and self._waiting_bytes > _BUSY_BYTES and not self._is_over:
                self._changed.wait(1.0)
        self.send_raw(frame)
        return not self.is_broken

    def send_raw(self, data: bytes) -> None:
        """Queue bytes that are not a message; drop them after the end."""
        with self._changed:
            if not self._is_over:
                self._queue.append(data)
                self._waiting_bytes += len(data)
                self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return self.is_broken or self._closing

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written; return whether it was in time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes or self.is_broken, timeout_s)
            return not self._waiting_bytes

    def close(self) -> None:
        """Write queued data, then close the descriptor: the other side gets the end of file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (data := self._next()) is not None:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
                with self._changed:
                    self._waiting_bytes -= len(data)
                    self._changed.notify_all()
        except OSError:
            pass
        with self._changed:
            self.is_broken = True
            self._changed.notify_all()
        os.close(self._fd)

    def _next(self) -> bytes | None:
        with self._changed:
            while True:
                every_s, now = self._ping_every_s, time.monotonic()
                left_s = None if every_s is None else self._pinged_at + every_s - now
                if left_s is not None and left_s <= 0 and not self._closing:
                    self._pinged_at = now
                    ping = pack(RemotePing())
                    self._waiting_bytes += len(ping)
                    return ping
                if self._queue:
                    return self._queue.popleft()
                if self._closing:
                    return None
                self._changed.wait(left_s)
