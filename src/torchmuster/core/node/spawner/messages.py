"""The messages between an agent and its spawner: one packet each, with descriptors attached.

The job's interpreter imports this module too, so the import has to be quick.
"""

from typing import Any

from torchmuster.core.model.codec import TypedMessage
from torchmuster.core.model.failure import LeftProcess

# A packet has to fit into the socket's buffer, which the system may limit to 200 KiB. A longer
# order is in a memory file, whose descriptor comes before the order's own.
MOST_IN_PACKET = 64 << 10
IN_MEMORY = b"in memory"


class SpawnerOrder(TypedMessage):
    """An order of the agent."""


class BeginSpawner(SpawnerOrder):
    """The first packet: what this spawner is for.

    Attributes:
        wrapped: A wrapper command runs between the agent and the spawner.
        macros: `${local_rank}` in the arguments has torchrun's meaning.
        has_torch: Import torch before the first fork.
        call_sha256: The hash of the call file of a function; empty for none.
        cache: The folder that caches findings about imports.
        num_imports: The maximum of the script's first imports to make here; -1: no limit.
        imports_why: Why no more.
    """

    wrapped: bool
    kind: str
    target: str
    args: tuple[str, ...]
    python: tuple[str, ...]
    start: str
    preload: tuple[str, ...]
    macros: bool
    lease_s: float
    socket_path: str
    has_torch: bool = True
    call_sha256: str = ""
    cache: str = ""
    num_imports: int = -1
    imports_why: str = ""


class PingSpawner(SpawnerOrder):
    """The agent is alive.

    Attributes:
        waits: It is the only agent of its run and nobody would replace it, so its workers continue
            while it is stopped.
    """

    waits: bool = False


class StartWorker(SpawnerOrder):
    """Start the worker of a rank; its three standard streams are attached.

    Attributes:
        args: Its arguments, if they differ from those of the other workers.
    """

    rank: int
    env: dict[str, str]
    unset: tuple[str, ...]
    args: tuple[str, ...] | None = None


class StartStore(SpawnerOrder):
    """Serve the store of an attempt; its listening socket is attached."""

    host: str
    port: int


class SignalWorkerProcesses(SpawnerOrder):
    """Send a signal to each worker, once."""

    signum: int
    if_caught: bool


class KillChildren(SpawnerOrder):
    """Kill everything and report when all is gone; after a success, keep separate sessions."""

    ended_well: bool


class SpawnerEvent(TypedMessage):
    """An event from the spawner."""


class SpawnerPong(SpawnerEvent):
    """The spawner is alive."""


class TorchFound(SpawnerEvent):
    """The findings of `model.plan.look_for_torch`, a second before torch is imported."""

    facts: dict[str, Any]


class InterpreterReady(SpawnerEvent):
    """Workers can be started; `why` says why they won't be forked, if the user should know.

    Attributes:
        imports_why: Why each worker makes some of the script's first imports itself; may be empty.
    """

    python: str
    torch: str | None
    forks: bool
    why: str | None
    imports_why: str = ""


class ImportsRefused(SpawnerEvent):
    """This spawner tried an import that only a worker may make, and ends.

    The next spawner makes only `num_made` imports.
    """

    num_made: int
    why: str


class InterpreterRefused(SpawnerEvent):
    """The job can't run in this interpreter."""

    why: str
    hint: str | None = None


class FellBack(SpawnerEvent):
    """From now on workers are fresh interpreters."""

    why: str


class LeaseEnded(SpawnerEvent):
    """The agent was silent for too long: the workers are being killed."""


class ChildStarted(SpawnerEvent):
    """A worker or a store has a process; `rank` is -1 for the store."""

    pid: int
    kind: str
    rank: int


class ChildEnded(SpawnerEvent):
    """A child was reaped with this wait status."""

    pid: int
    kind: str
    rank: int
    status: int


class NoChildLeft(SpawnerEvent):
    """Only processes that may outlive a success are left."""

    left: tuple[LeftProcess, ...]
