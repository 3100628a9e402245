"""All messages between the client and the remote end of an ssh session: this file defines the protocol.

It travels on the standard streams of the session: four bytes of length, then one JSON object as on the channel, whose `type`
is the name of a class here and whose other fields are that class's fields; bytes follow it (`model.message`). There is no
MAC: ssh authenticates the stream. Three things are no messages, since torchmuster may not be there yet: the line that ends
what the host's shell says, the loader's text before it, and the package, which is one frame (`launcher/node/remote/loader.py`).

The remote end is started from the client's own package, so both speak one version; `RemoteReady` proves it.
"""

import os
import struct
from dataclasses import field
from typing import Any

from torchmuster.core.model import codec, message
from torchmuster.core.model.message import TypedMessage
from torchmuster.core.model.plan import EnvironmentNeeds, RunPlan

PROTOCOL = 6
LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 4 << 20
CHUNK_BYTES = 256 << 10
CODE_FILE = "code.tar.gz"
CALL_FILE = "call"  # as `files.layout.RunDir.call`
OUTPUT_FILE = "output.tar.gz"
GONE = 255  # the status of an agent that can't be started or watched any more, as ssh's of a broken connection
MAX_DEPTH = 64  # folders in each other
_MAX_PATH_BYTES = 4096
encode = message.encode


class FrameError(Exception):
    """The received bytes are not a message of an ssh session."""


class RemoteMessage(TypedMessage):
    """Base class of messages of an ssh session."""


# Before the run. The first two may come from the loader.


class RemoteFacts(RemoteMessage):
    """From the host: its properties; if it lacks the package, that is sent next."""

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


class SessionTold(RemoteMessage):
    """From the host: how the door of the session that holds it is; `multirun/door/messages.py` says what each means."""

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
    """From the client: a sign of life; without it everything on the host ends."""


class RemotePong(RemoteMessage):
    """From the host: a sign of life."""


class SetUpRun(RemoteMessage):
    """From the client: the run whose agent will be started there.

    Attributes:
        mark: What tells the client's run directory from another of the same path.
        token: What stands in `shared-token` of the client's run directory, to see whether the host shares it.
        secret: The channel's key, for a run directory of the host's own.
        script: `code_copy.identity` of the program's file.
        code_root: The folder whose copy a host gets that lacks the script.
        head_run_dir: Where the head lives, and `head_mark` what tells that folder from another host's; None for the head.
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
    """From the client: the workflow whose tasks will be started there.

    Attributes:
        host: What the client calls the host.
        folders: What it must see beside the run directory.
        lines: The site's setup lines; `environment` its variables, `origin` where they are written.
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
    """From the host, to both: the run directory there; `SetUpDone` follows.

    Attributes:
        mark: Tells the folder from another host's of the same path; empty for the client's own.
        is_shared: It is the client's; `with_head`: it is the head's.
        wants_code: The code folder is wanted first: `FilePiece`s of its archive, and `CodeSent`.
        is_copied: It lives on a copy of the code folder.
        lacks: Folders that it does not see: tasks can't run there.
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


# A virtual environment: offered to each host, sent to the first that lacks it, from there on from host to host.


class OfferEnvironment(RemoteMessage):
    """From the client: an environment for the run's workers; `EnvironmentPlaced` or `RemoteFailed` follows.

    Attributes:
        secret: By which hosts know each other when one brings it to the next.
        scratch: The site's folder for it, where variables of the host are filled in; None: the host's own.
    """

    needs: EnvironmentNeeds
    secret: str
    scratch: str | None = None

    def __repr__(self) -> str:
        return f"OfferEnvironment({self.needs.sha})"


class EnvironmentPlaced(RemoteMessage):
    """From the host: it has the environment, or takes it at this port; or from the client, behind `BringEnvironment`."""

    has: bool
    addresses: tuple[str, ...] = ()
    port: int = 0


class PassEnvironment(RemoteMessage):
    """From the client: bring to the host with these addresses what comes; port 0: nobody follows."""

    addresses: tuple[str, ...] = ()
    port: int = 0


class BringEnvironment(RemoteMessage):
    """From the client: what is still lacking comes from here; `EnvironmentWants` follows.

    Attributes:
        tries: This host imports torch when all is there, to see that it can live at this place.
    """

    tries: bool = False


class EnvironmentWants(RemoteMessage):
    """From the host: the piece that it wants next; -1 is their list, and behind the last one it lacks nothing."""

    index: int


class EnvironmentPiece(RemoteMessage):
    """From the client: a piece of the environment, or with index -1 their list."""

    index: int
    data: bytes


class EnvironmentHopFailed(RemoteMessage):
    """From the host: it can't bring the environment to the next one."""

    why: str


class EnvironmentDone(RemoteMessage):
    """From the host: the environment is in its place; or `why` it is not."""

    why: str | None = None


class PruneEnvironments(RemoteMessage):
    """From the client: remove the environments that nobody uses; `EnvironmentsPruned` follows.

    Attributes:
        older_s: Those that were not used for so long.
        most_bytes: And the oldest beyond so many bytes.
        dry_run: Only say which.
        scratch: As of `OfferEnvironment`.
    """

    older_s: float
    most_bytes: int | None = None
    dry_run: bool = False
    scratch: str | None = None


class EnvironmentsPruned(RemoteMessage):
    """From the host: what was removed, or would be."""

    paths: tuple[str, ...] = ()
    size_bytes: int = 0


# Files: the code on its way there, the record and the outputs on their way back.


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
    """From the client: send the new files in the copy of the code folder, or those of the folder `output` in their place."""

    output: str = ""


class Collected(RemoteMessage):
    """From the host: all pieces of `OUTPUT_FILE` are sent.

    Attributes:
        stay: Some of the `num_stay` files for which there was no room; they stay in `root`.
        snapshots: The folder of snapshots that stays there; empty for none.
        unread: Why files of the record can't be read there.
    """

    num_stay: int = 0
    stay: tuple[str, ...] = ()
    root: str = ""
    snapshots: str = ""
    unread: tuple[str, ...] = ()


# Copies of growing files (`launcher/net/replica.py`).


class CopyHas(RemoteMessage):
    """From who keeps a copy: how far it is, by which a feed goes on, or goes back.

    Attributes:
        mark: What tells the folder that it was copied from; empty for none.
        files: The size of each file, and the check over its ends.
        more: Another message has more files.
        order: Of the pod whose folder is wanted, where that is not the pod that is asked.
    """

    mark: str = ""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    more: bool = False
    order: dict[str, Any] | None = None


class CopyOf(RemoteMessage):
    """From where the files grow: which folder follows; another mark is that of another disk, and begins at nothing; empty: there is none yet."""

    mark: str


class CopyEnd(RemoteMessage):
    """From where the files grow: what there is of them is sent; of a record that is over also what the run has made beside the code.

    Attributes:
        stay: Some of the `num_stay` files for which there was no room.
        unread: Why files could not be read there.
    """

    num_stay: int = 0
    stay: tuple[str, ...] = ()
    is_over: bool = False
    unread: tuple[str, ...] = ()


class CopyHeld(RemoteMessage):
    """From who keeps a copy: everything is in its place, and may go where it came from."""


# Agents. A host may ask the client for a `StartNode` on another host: the same messages travel the other way.


class StartNode(RemoteMessage):
    """Start the agent of one node of a run.

    Attributes:
        agent_id: Who asks numbers its agents.
        heads: Where the head listens, `host:port`; none for the agent that has it.
        run_dir: Of a training task's run, inside of the workflow; None for the run itself.
        host: Where, in a request of a host to the client.
        gpus: What it may use; None leaves it to the host.
        first_attempt: For the head; `restarts_spent` too.
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
        may_move: Another host will do when this one can't be reached.
    """

    agent_id: int = 0
    host: str
    group: str
    task: str
    attempt: int
    port: int
    may_move: bool = False


class AgentStarted(RemoteMessage):
    """The agent runs. The one with the head listens at `port` of these addresses."""

    agent_id: int
    port: int = 0
    addresses: tuple[str, ...] = ()


class AgentEnded(RemoteMessage):
    """The agent has ended with all its child processes; a negative status is a signal. `why`: it could not be started."""

    agent_id: int
    status: int
    why: str | None = None


class KillAgent(RemoteMessage):
    """SIGKILL the agent and all its child processes."""

    agent_id: int


class HeadMoved(RemoteMessage):
    """From the client: another head stands in for a lost one, and listens there; the agents of this host obey it alone."""

    heads: tuple[str, ...]


class CutLifeline(RemoteMessage):
    """From the client: let the agents end by themselves; the session remains."""


class LeaveHost(RemoteMessage):
    """From the client: end the session."""


# Connections that travel inside of the session (`launcher/net/relay.py`).


class RelayOpen(RemoteMessage):
    """Connect to this port of your loopback; the client's connection numbers are odd, a host's even."""

    call_id: int
    port: int


class RelayData(RemoteMessage):
    """Bytes of a connection."""

    call_id: int
    data: bytes


class RelayTaken(RemoteMessage):
    """So much of a connection's bytes has been given to the program at this end."""

    call_id: int
    size_bytes: int


class RelayClose(RemoteMessage):
    """A connection has ended."""

    call_id: int


OfRelay = RelayOpen | RelayData | RelayTaken | RelayClose


def decode(payload: bytes) -> RemoteMessage:
    """Return the message in a payload.

    Raises:
        FrameError: It is not one of ours.
    """
    try:
        return message.decode(payload, RemoteMessage)
    except codec.CodecError as error:
        raise FrameError(str(error)[:300]) from None


def pack(value: RemoteMessage) -> bytes:
    """Return a message as a frame; ValueError for one that is too long."""
    payload = encode(value)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"{type(value).__name__} has {len(payload)} bytes")
    return LENGTH.pack(len(payload)) + payload
