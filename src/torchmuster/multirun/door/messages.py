"""The words that a run's owner and the door of a node say to each other, one packet each; descriptors travel beside a packet.

An order may be larger than a packet (its variables alone may be 2 MB), so it lies in a file in memory whose descriptor comes first.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchmuster.core.model import codec
from torchmuster.core.model.codec import to_words
from torchmuster.core.model.message import TypedMessage, decode, encode
from torchmuster.core.model.plan import RunPlan, ScriptKind, StartMethod
from torchmuster.core.node.environment import share_threads
from torchmuster.core.node.options import AgentOrder

MAX_ORDER_BYTES = 8 << 20
MAX_PACKET_BYTES = 1 << 16
MAX_FDS = 5  # of an order: the file in memory, standard output and errors, the lifeline, the head's socket


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProcess:
    """The process with which a session ends.

    Attributes:
        start_ticks: When it started, so that no later process is taken for it.
        machine: `proc.boot_id()` and `proc.network_id()`: on another machine nobody can look at it.
    """

    pid: int
    start_ticks: int
    machine: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """What a session was started with: the content of `session.json`.

    Attributes:
        name: Among the sessions of this user that live.
        nodes: How many it holds.
        workers: What `--nproc-per-node` said, for runs that say nothing.
        python: The interpreter of its doors, and its flags.
        preload: Modules that the doors import beside torch.
        idle_s: It ends when no run has begun for so long; None: never.
        limit_s: It ends so long after its start; None: never.
        folder: Where it was started: its modules are imported from there.
        variables: The names of those that the user had set.
        client: The process with which it ends; None: it outlives its start.
    """

    name: str
    nodes: int
    workers: str | None
    python: tuple[str, ...]
    preload: tuple[str, ...]
    idle_s: float | None
    limit_s: float | None
    folder: str
    variables: tuple[str, ...]
    client: ClientProcess | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorPlace:
    """Where a door can be called: the content of its file in the session's run directory.

    Attributes:
        machine: `proc.boot_id()` and `proc.network_id()`: on another machine the socket means nothing.
    """

    socket: str
    pid: int
    machine: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorNode:
    """What the node gave to its door at the start of the session, for runs whose owner is on another machine.

    Attributes:
        asked: The interpreter that the session's plan names, and its flags.
        python: The one that the door has: setup lines, or what the node has, may decide.
        environment: The variables, after the setup lines of the site.
        site_names: Those that the site has set or removed: a run's owner does not change them.
    """

    asked: tuple[str, ...]
    python: tuple[str, ...]
    environment: dict[str, str]
    site_names: tuple[str, ...]

    def variables(self, of_client: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a run whose owner has these."""
        of_site = self.site_names
        theirs = {name: text for name, text in of_client.items() if name not in of_site}
        return {**self.environment, **theirs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What a door that becomes a new interpreter hands to itself, beside its open descriptors.

    Attributes:
        listening: The socket's descriptor.
        lock: That of its folder, which is held without a gap: else an agent would remove it as what a dead one had left.
        order: The file in memory of the order that waits, with its caller's `line` and descriptors; none for -1.
        others: The lines of other callers, with the process that was forked for each; 0 for none.
        began_at: Of the session, in seconds since 1970; `used_at`: the end of the last run.
    """

    node: DoorNode
    python: tuple[str, ...]
    preload: tuple[str, ...]
    folder: str
    socket_path: str
    place: int
    listening: int
    lock: int
    order: int
    line: int
    fds: tuple[int, ...]
    began_at: float
    used_at: float
    num_runs: int
    others: tuple[tuple[int, int], ...] = ()


class DoorOrder(TypedMessage):
    """What a caller asks of a door."""


class ForkAgent(DoorOrder):
    """Start the agent of a run.

    Attributes:
        arguments: Its command line, as `AgentOrder` without descriptors.
        has_head: The head's socket comes with it.
        environment: The agent's variables.
        added: What the job's interpreter has beside them.
        cwd: The agent's folder; `umask` is its mask.
        kind: The program's, with `target`, `folder` (its own), `python` and `preload`.
        is_fresh: No worker is forked, so a template is of no use.
    """

    run_id: str
    arguments: tuple[str, ...]
    has_head: bool
    environment: dict[str, str]
    added: dict[str, str]
    cwd: str
    umask: int
    kind: str
    target: str
    folder: str
    python: tuple[str, ...]
    preload: tuple[str, ...]
    is_fresh: bool


class ForkRemote(DoorOrder):
    """Become the remote end (`launcher/node/remote`) of a run's owner on another machine; its three streams come with it."""


class AskDoor(DoorOrder):
    """Say how you are."""


class EndSession(DoorOrder):
    """End the session; the door of the first node tells the others."""

    why: str


class DoorAnswer(TypedMessage):
    """What a door tells its caller."""


class AgentForked(DoorAnswer):
    """The agent runs; a descriptor of its process comes with it. `is_warm`: its interpreter has torch."""

    pid: int
    is_warm: bool


class ForkedEnded(DoorAnswer):
    """The agent has ended with this status, negative for a signal, and what it left was ended."""

    status: int


class TemplateRenewed(DoorAnswer):
    """The modules are imported again first, because."""

    why: str


class DoorBusy(DoorAnswer):
    """Another run is in the session."""

    run_id: str


class DoorRefused(DoorAnswer):
    """The agent can't be started."""

    why: str


class DoorState(DoorAnswer):
    """How the door is.

    Attributes:
        run_id: Of the run in it; empty for none.
        idle_s: Since the last run ended.
        ends_in_s: Until its time limit or the end of its idle time; None: it has no end.
        memory_bytes: Its resident memory.
        problem: Why nothing is imported ahead; empty where it is.
    """

    run_id: str
    num_runs: int
    idle_s: float
    ends_in_s: float | None
    why_ends: str
    memory_bytes: int
    problem: str


def pack_order(order: DoorOrder) -> int:
    """Return the descriptor of a file in memory that holds an order."""
    fd = os.memfd_create("muster-order", os.MFD_CLOEXEC)
    data = memoryview(encode(order))
    while data:
        data = data[os.write(fd, data) :]
    return fd


def read_order(fd: int) -> DoorOrder:
    """Return the order in a file in memory.

    Raises:
        codec.CodecError: It is none.
    """
    size = os.fstat(fd).st_size
    if size > MAX_ORDER_BYTES:
        raise codec.CodecError("the order is too large")
    data = bytearray()
    while len(data) < size:
        piece = os.pread(fd, size - len(data), len(data))
        if not piece:
            break
        data += piece
    return decode(bytes(data), DoorOrder)


# The order for an agent that a door forks: what the command line and the variables of a process would have said.


def fork_order(plan: RunPlan, order: AgentOrder, environment: Mapping[str, str]) -> ForkAgent:
    """Return the order for one agent of a run.

    Args:
        plan: Of the run, as this node has it.
        order: What the agent is told.
        environment: Its variables.
    """
    program = plan.program
    added = dict(environment)
    share_threads(added, plan.num_workers(order.place))
    added = {n: v for n, v in added.items() if environment.get(n) != v}
    added.update(plan.node_setup.environment)
    umask = os.umask(0o077)
    os.umask(umask)
    script = os.path.join(program.cwd, program.target)
    is_file = program.kind is ScriptKind.FILE
    return ForkAgent(
        run_id=plan.run_id,
        arguments=tuple(to_words(replace(order, lifeline_fd=None, listen_fd=None))),
        has_head=order.listen_fd is not None,
        environment=dict(environment),
        added=added,
        cwd=os.getcwd(),
        umask=umask,
        kind=program.kind.value,
        target=program.target,
        folder=os.path.dirname(os.path.realpath(script)) if is_file else program.cwd,
        python=program.python,
        preload=program.preload,
        is_fresh=program.start is StartMethod.FRESH,
    )
