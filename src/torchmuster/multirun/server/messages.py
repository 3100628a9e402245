"""The messages between a run's owner and the server of a node; each is one packet with descriptors.

An order may be larger than a packet (its variables alone may be 2 MB), so it is sent as the
descriptor of a memory file, which comes first.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchmuster.core.model import codec
from torchmuster.core.model.codec import TypedMessage, decode, encode, to_arguments
from torchmuster.core.model.plan import RunPlan, ScriptKind, StartMethod
from torchmuster.core.node.options import AgentOrder, share_threads
from torchmuster.core.plainfile import write_all

MAX_ORDER_BYTES = 8 << 20
MAX_PACKET_BYTES = 1 << 16
MAX_FDS = 5  # of an order: the memory file, stdout, stderr, the lifeline, the head's socket


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProcess:
    """The process that a session ends with.

    Attributes:
        start_ticks: When it started, so that a later process with its pid is not mistaken for it.
        machine: `proc.boot_id()` and `proc.network_id()`: it can be checked on this machine only.
    """

    pid: int
    start_ticks: int
    machine: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """What a session was started with: the content of `session.json`.

    Attributes:
        name: Its name, unique among this user's live sessions.
        nodes: The number of nodes it holds.
        workers: The `--nproc-per-node` option, the default for its runs.
        python: The interpreter of its servers, and its flags.
        preload: Modules that the servers import in addition to torch.
        idle_s: It ends when no run has begun for this long; None: never.
        limit_s: It ends this long after its start; None: never.
        folder: Where it was started: its modules are imported from there.
        variables: The names of the variables that the user had set.
        client: The process that it ends with; None: it outlives the command that started it.
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
class ServerAddress:
    """Where a server listens: the content of its file in the session's run directory.

    Attributes:
        machine: `proc.boot_id()` and `proc.network_id()`: the socket works on this machine only.
    """

    socket: str
    pid: int
    machine: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnvironment:
    """What a server got from its node at the start of the session, for runs owned on another machine.

    Attributes:
        asked: The interpreter that the session's plan names, and its flags.
        python: The one that the server has; setup lines, or what is installed, may decide.
        environment: The variables, after the setup lines of the site.
        site_names: Variables that the site has set or removed; a run's owner can't change them.
    """

    asked: tuple[str, ...]
    python: tuple[str, ...]
    environment: dict[str, str]
    site_names: tuple[str, ...]

    def variables(self, of_client: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for a run whose owner has the variables `of_client`."""
        of_site = self.site_names
        theirs = {name: text for name, text in of_client.items() if name not in of_site}
        return {**self.environment, **theirs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What a server that becomes a new interpreter hands to itself, as well as its open descriptors.

    Attributes:
        listening: The descriptor of its socket.
        lock: The descriptor of its folder's lock. It is held without a gap: otherwise an agent
            would remove the folder as the leftover of a dead process.
        order: The memory file of the waiting order, with its caller's `line` and descriptors.
        others: The connections of other callers, with the pid forked for each; 0 for none.
        began_at: The session's start, in seconds since 1970; `used_at`: the end of the last run.
    """

    node: NodeEnvironment
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


class SessionOrder(TypedMessage):
    """A message from a caller to a server."""


class ForkAgent(SessionOrder):
    """Start the agent of a run.

    Attributes:
        arguments: Its command line: an `AgentOrder` without descriptors.
        has_head: Whether the head's socket comes with it.
        environment: The agent's variables.
        added: The variables that the job's interpreter has in addition.
        cwd: The agent's working directory; `umask` is its mask.
        kind: That of the program, as are `target`, `folder`, `python` and `preload`.
        is_fresh: Whether workers are started without a fork, so what is imported is of no use.
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


class ForkRemote(SessionOrder):
    """Become the remote end (`launcher/node/remote`) for a run's owner on another machine.

    Its three streams come with the order.
    """


class AskServerState(SessionOrder):
    """Report the server's state."""


class EndSession(SessionOrder):
    """End the session; the server of the first node tells the others."""

    why: str


class SessionAnswer(TypedMessage):
    """A message from a server to its caller."""


class AgentForked(SessionAnswer):
    """The agent runs; its pidfd comes with the message. `is_warm`: it has torch imported."""

    pid: int
    is_warm: bool


class ForkedEnded(SessionAnswer):
    """The forked process has ended, with everything it left; `status` is negative for a signal."""

    status: int


class TemplateRenewed(SessionAnswer):
    """The server imports its modules again first; `why` says what has changed."""

    why: str


class SessionBusy(SessionAnswer):
    """Another run is in the session."""

    run_id: str


class ForkRefused(SessionAnswer):
    """The server can't start the agent."""

    why: str


class SessionServerState(SessionAnswer):
    """The state of a server.

    Attributes:
        run_id: The run in the session; empty for none.
        idle_s: The time since the last run ended.
        ends_in_s: The time until its time limit or the end of its idle time; None: it has no end.
        memory_bytes: Its resident memory.
        problem: Why agents can't use its imports; empty if they can.
    """

    run_id: str
    num_runs: int
    idle_s: float
    ends_in_s: float | None
    why_ends: str
    memory_bytes: int
    problem: str


def pack_order(order: SessionOrder) -> int:
    """Return the descriptor of a memory file with an order."""
    fd = os.memfd_create("muster-order", os.MFD_CLOEXEC)
    write_all(fd, encode(order))
    return fd


def read_order(fd: int) -> SessionOrder:
    """Return the order in a memory file.

    Raises:
        codec.CodecError: It is not an order, or is too large.
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
    return decode(bytes(data), SessionOrder)


# The order for a forked agent: what a process gets as command line and variables.


def fork_order(plan: RunPlan, order: AgentOrder, environment: Mapping[str, str]) -> ForkAgent:
    """Return the order for one agent of a run.

    Args:
        plan: The plan of the run, as this node has it.
        order: The agent's order.
        environment: The agent's variables.
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
        arguments=tuple(to_arguments(replace(order, lifeline_fd=None, listen_fd=None))),
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
