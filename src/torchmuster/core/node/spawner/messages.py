"""What an agent and its spawner say to each other, one packet each; descriptors travel beside a packet.

Imported in the job's interpreter too, so it has to be quick.
"""

from typing import Any

from torchmuster.core.model.failure import LeftProcess
from torchmuster.core.model.message import TypedMessage

# A packet has to fit into the socket's buffer, which the system may keep at 200 KiB; a longer order lies in memory of
# its own, and its descriptor comes before the order's.
MOST_IN_PACKET = 64 << 10
IN_MEMORY = b"in memory"


class SpawnerOrder(TypedMessage):
    """What the agent orders."""


class BeginSpawner(SpawnerOrder):
    """The first packet: what this spawner is for.

    Attributes:
        wrapped: A wrapper command stands between the agent and the spawner.
        macros: `${local_rank}` in the arguments means what it does to torchrun.
        has_torch: Import torch before the first fork.
        call_sha256: Of the call file of a function, empty for none.
        cache: The folder for what is found out about imports.
        num_imports: How many of the script's first imports are made here at most; -1: as many as can be.
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
    """The agent is here.

    Attributes:
        waits: It is the only one of its run, and nobody starts another one: while it is stopped, its workers go on.
    """

    waits: bool = False


class StartWorker(SpawnerOrder):
    """Start the worker of a rank; its three standard streams come with it.

    Attributes:
        args: Its arguments, where they are not those of all.
    """

    rank: int
    env: dict[str, str]
    unset: tuple[str, ...]
    args: tuple[str, ...] | None = None


class StartStore(SpawnerOrder):
    """Serve the store of an attempt; its listening socket comes with it."""

    host: str
    port: int


class SignalWorkerProcesses(SpawnerOrder):
    """Send a signal to each worker, once."""

    signum: int
    if_caught: bool


class KillChildren(SpawnerOrder):
    """End everything, and say when all is gone; after a good end, what has a session of its own stays."""

    ended_well: bool


class SpawnerEvent(TypedMessage):
    """What the spawner tells."""


class SpawnerPong(SpawnerEvent):
    """The spawner is here."""


class TorchFound(SpawnerEvent):
    """What `model.installed.look_for_torch` has found, a second before torch is imported."""

    facts: dict[str, Any]


class InterpreterReady(SpawnerEvent):
    """Workers can be started; `why` they will not be forked, where that needs a word.

    Attributes:
        imports_why: Why each worker makes some of the script's first imports itself; empty where none does.
    """

    python: str
    torch: str | None
    forks: bool
    why: str | None
    imports_why: str = ""


class ImportsRefused(SpawnerEvent):
    """This spawner has tried an import that only a worker may make, and ends: another one makes `num_made` of them."""

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
    """The agent was silent for too long: the workers are being ended."""


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
    """Nothing is left but what goes on after a good end."""

    left: tuple[LeftProcess, ...]
