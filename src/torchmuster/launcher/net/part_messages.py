"""Messages of the parts that the launcher adds to heads and agents: progress, stacks, survey, exec."""

from dataclasses import field
from typing import Any

from torchmuster.core.net.messages import CheckAnswer, Message
from torchmuster.launcher.model.network import Interface, PairResult
from torchmuster.launcher.model.progress import RankProgress, RankSample, RankStack

# Progress and stacks of the ranks: agent to head, asked by it or by a client.


class Progress(Message):
    """From an agent, every 2 s while workers run: their progress."""

    attempt: int
    ranks: tuple[RankProgress, ...]


class TakeStacks(Message):
    """From the head: report the stacks of your ranks now."""

    number: int
    attempt: int


class Stacks(Message):
    """From an agent: the stacks; several messages for many ranks."""

    number: int
    stacks: tuple[RankStack, ...]
    is_last: bool = True


class AskStacks(Message):
    """A client wants the stacks of all ranks."""

    ask_id: str


class StacksReport(Message):
    """The head's answer to a client.

    Attributes:
        sentence: Which ranks wait and which don't, in one sentence.
        lines: All stacks, equal ones grouped; several messages if they are long.
    """

    ask_id: str
    sentence: str
    lines: tuple[str, ...]
    is_last: bool = True


class AskBoard(Message):
    """A client wants the state of all ranks."""

    ask_id: str


class BoardSample(Message):
    """The head's answer to a client; several messages for many ranks.

    Attributes:
        sample: Some of the ranks, in rank order; None while no attempt runs.
    """

    ask_id: str
    sample: RankSample | None
    is_last: bool = True


# The network survey, and facts about the nodes: the head asks, agents collect facts and connect to
# each other, once, before the first attempt.


class AskNetwork(Message):
    """From the head: open a port for probes and report the interfaces."""

    survey: int


class NetworkFacts(CheckAnswer):
    """From an agent: its interfaces and ports.

    Attributes:
        ports: The ports of its probe, for IPv4 and for IPv6.
        names: All its interfaces, with or without an address.
        variables: Those of `contract.INTERFACE_VARIABLES` that the user has set.
    """

    survey: int
    ports: tuple[int, ...]
    interfaces: tuple[Interface, ...]
    names: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


class AskFacts(Message):
    """From the head: collect facts about your node (`launcher.facts`) and report them.

    Attributes:
        names: Names to resolve on the node.
        script: A script to check instead of the program.
    """

    is_long: bool = False
    names: tuple[str, ...] = ()
    script: str | None = None


class NodeFacts(CheckAnswer):
    """From an agent: the facts (`launcher.facts`), and its own clock at request and answer.

    The facts have at most 128 KiB.
    """

    facts: dict[str, Any]
    asked_at: float
    sent_at: float


class ProbeTarget(Message):
    """A connection that a node must try; `measure` also requests latency and bandwidth."""

    candidate: int
    node: int
    address: str
    port: int
    measure: bool = False


class ProbeNetwork(Message):
    """From the head: connect to these targets; `node` is the receiver's number.

    Attributes:
        bulk_bytes: How much to send to each measured target; a transfer that does not arrive counts
            as stalled. None measures in passing.
    """

    survey: int
    node: int
    targets: tuple[ProbeTarget, ...]
    connect_s: float
    bulk_bytes: int | None = None


class ProbeResults(CheckAnswer):
    """From an agent: all its connections on these candidates have ended.

    It has reached the targets that have no entry in `results`.
    """

    survey: int
    candidates: tuple[int, ...]
    results: tuple[PairResult, ...] = ()


class EndProbe(Message):
    """From the head: close the port and end the connections."""

    survey: int


# From agent to agent, on the port of a probe. Ping and Pong measure latency.


class ProbeCall(Message):
    """Asks if the receiver is this node; the answer is the same message with its own values."""

    survey: int
    node: int


class ProbeBulk(Message):
    """Announces padding bytes after the Pong; a second Pong confirms all of them."""

    size_bytes: int


# `muster exec`: a command in a running task or next to a rank: a client to the head, on to the agent,
# and back. Each side may send at most a window that the other end has not taken yet, so nobody in
# between has to hold more.

EXEC_WINDOW_BYTES = 256 << 10
MAX_WINDOW_BYTES = 4 << 20
EXEC_CHUNK_BYTES = 64 << 10
MAX_EXECS = 16


class ExecStart(Message):
    """Run a command inside a running task; without `argv`, its shell.

    Attributes:
        exec_id: Random, chosen by the client; all messages of this command carry it.
        tty: The command gets a terminal of this size; otherwise three pipes.
        term: The kind of terminal, for TERM.
        debugger: Instead of a command: a stream to the rank, which waits for its debugger.
        forks_remote: Instead of a command: a remote (`launcher/node/remote`), which that node's server forks.
        claim: Which first pod the asking owner runs in, for a run in pods; empty for all others.
        window_bytes: How much may be in flight in each direction: a longer distance needs more.
    """

    exec_id: str
    task: str
    argv: tuple[str, ...] = ()
    tty: bool = False
    rows: int = 24
    columns: int = 80
    term: str = ""
    debugger: bool = False
    forks_remote: bool = False
    claim: str = ""
    window_bytes: int = EXEC_WINDOW_BYTES


class ExecInput(Message):
    """Input for the command; `end` closes its standard input."""

    exec_id: str
    data: bytes = b""
    end: bool = False


class ExecOutput(Message):
    """Output of the command; a terminal has only stream 1."""

    exec_id: str
    stream: int  # 1 or 2
    data: bytes


class ExecAcknowledged(Message):
    """The number of bytes from the other end that have been written to their destination."""

    exec_id: str
    size_bytes: int


class ExecResize(Message):
    """The size of the client's terminal has changed."""

    exec_id: str
    rows: int
    columns: int


class ExecSignal(Message):
    """Send a signal to the command's process group."""

    exec_id: str
    signum: int


class ExecLeave(Message):
    """The client is gone: SIGHUP to the command, SIGKILL a little later."""

    exec_id: str


class ExecEnded(Message):
    """The command has ended, with the code that a shell would show; `why` if muster ended it."""

    exec_id: str
    code: int
    why: str | None = None


class ExecRefused(Message):
    """The command was not started."""

    exec_id: str
    what: str
    why: str | None = None
    fix: str | None = None


FromExecClient = ExecStart | ExecInput | ExecAcknowledged | ExecResize | ExecSignal | ExecLeave
FromExecTask = ExecOutput | ExecAcknowledged | ExecEnded | ExecRefused
