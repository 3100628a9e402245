"""All messages of the channel: this file defines the protocol.

Agents, owners and clients call the head of their run or group. A frame is one JSON object: its
`type` names a class of this file, and its other fields are that class's fields (`model.message`).
Both ends of a channel have the same version: the handshake checks that of the frames
(`net.handshake`), `Hello.version` that of torchmuster.
"""

import enum
from dataclasses import field
from typing import Any

from torchmuster.core.model import message as _message
from torchmuster.core.model.failure import LeftProcess, WorkerEnd
from torchmuster.core.model.message import TypedMessage
from torchmuster.core.model.network import Interface, PairResult
from torchmuster.core.model.progress import RankProgress, RankSample, RankStack
from torchmuster.core.model.ranks import NodeRanks
from torchmuster.core.model.verdict import StopCause


class Message(TypedMessage):
    """Base class of messages between agents, heads, owners and clients of a run."""


# A training run: its agents, owner and clients talk to its head.


# Agent to head.


class Hello(Message):
    """An agent introduces itself, the first time or after it lost its connection.

    Attributes:
        incarnation: A random id of this agent process.
        place: The place for which it was started; None if the head chooses one.
        boot_id: Identifies kernel and process namespace: on the head's own, pids can be checked.
        attempt: The attempt whose workers it still runs; None without workers.
        network_id: Identifies kernel and network namespace: agents with one id share interfaces.
        jobs: The scheduler jobs that it belongs to, as `VARIABLE=ID`, if the run has no name.
        machine: What its host runs on, if that has its own name: for a pod, the cluster's node.
        role: The role of its workers: torchrun's `--role`.
        holds_memory: The agent's memory holds snapshots of an earlier attempt's workers.
    """

    incarnation: str
    version: str
    host: str
    pid: int
    boot_id: str
    num_workers: int
    place: int | None = None
    spawner_pid: int | None = None
    attempt: int | None = None
    wants_place_0: bool = False
    network_id: str = ""
    jobs: tuple[str, ...] = ()
    machine: str = ""
    holds_memory: bool = False
    role: str = "default"


class Ping(Message):
    """A sign of life; the pong with this number extends the sender's lease."""

    number: int


class SpawnerReady(Message):
    """The spawner can start workers."""

    python: str
    torch: str | None
    forks: bool
    why: str | None = None
    imports_why: str = ""  # why each worker makes the script's first imports itself


class SpawnerRefused(Message):
    """This node can't run the job at all; `what`, `where`, `hint` replace the default message."""

    why: str
    what: str | None = None
    where: str | None = None
    hint: str | None = None


class WorkersStarted(Message):
    """All workers of the attempt on this node have started."""

    attempt: int
    pids: tuple[int, ...]
    spawner_pid: int | None


class WorkerEnded(Message):
    """One worker has ended, with the evidence."""

    end: WorkerEnd


class StoreLost(Message):
    """The store of the attempt has ended by itself."""

    attempt: int
    detail: str


class AllReaped(Message):
    """No process of this attempt is left here, except those that may outlive a success."""

    attempt: int
    left: tuple[LeftProcess, ...] = ()


class Output(Message):
    """Output of a worker, for the terminal. The head forwards it to the clients."""

    rank: int
    attempt: int
    stream: int  # 1 or 2
    text: str
    dropped_lines: int = 0


class Notice(Message):
    """A sentence for the user, such as a fallback or lost logs."""

    text: str
    level: str = "note"
    logs_lost_lines: int = 0


class Debugger(Message):
    """A worker entered or left the debugger; `net.ipc.DebuggerHeld` documents the fields."""

    rank: int
    active: bool
    waits: str = ""
    folder: str = ""


class LastStop(Message):
    """The script saves and exits for a reason that would stop the next attempt too."""

    rank: int
    reason: str


class TrainingEnded(Message):
    """The training library has stopped or finished: the last step, and the last saved one."""

    rank: int
    step: int
    saved_step: int | None


class SignalReceived(Message):
    """The scheduler (or a person) has sent this agent a signal for the job."""

    signum: int


# Head to agent.


class Welcome(Message):
    """The agent is accepted.

    Attributes:
        head_pid: With the two ids (see `Hello`), lets an agent on the same machine check whether
            the head still runs.
    """

    run_id: str
    node: str
    tee: str
    head_pid: int = 0
    boot_id: str = ""
    network_id: str = ""


class Refused(Message):
    """The agent is refused, with the reason. It ends."""

    sentence: str


class Pong(Message):
    """The answer to a ping, with its number."""

    number: int


class StartAttempt(Message):
    """Start the workers of one attempt on this node."""

    attempt: int
    ranks: NodeRanks
    world_size: int
    num_nodes: int
    master_addr: str
    master_port: int
    restarts_spent: int
    max_restarts: int
    node: str
    stdin_rank: int | None = None
    interface: str | None = None  # this node's interface in the chosen network
    tasks_per_node: str = ""  # the workers of every node, in Slurm's notation: 2(x2),1


class KillAttempt(Message):
    """SIGKILL every process of the attempt and report when all are gone.

    Attributes:
        grace_s: How long a rank whose script handles SIGTERM may live on after that signal.
        ended_well: All workers have exited with 0: processes in their own sessions continue.
    """

    attempt: int
    ended_well: bool = False
    grace_s: float = 0.0


class SignalWorkers(Message):
    """Send a signal to each worker process, once."""

    signum: int
    if_caught: bool = False
    asks_to_stop: bool = False


class Input(Message):
    """Input from the terminal for one rank; `end` closes its standard input."""

    rank: int
    text: str
    end: bool = False


class TerminalSize(Message):
    """The size of the terminal that shows the run has changed."""

    columns: int
    rows: int


class Goodbye(Message):
    """The run is over."""

    exit_code: int
    sentence: str | None = None


# Client to head, and back.


class Watch(Message):
    """The client wants events and output."""

    owner: bool


class Stop(Message):
    """Stop the run: the signal, then SIGKILL after the grace; `at_once` skips the grace."""

    signum: int
    at_once: bool = False
    cause: StopCause = StopCause.USER
    who: str = ""  # who asked, where `cause` does not say it all
    time_is_up: bool = False  # what was saved can be resumed in another job


class Forward(Message):
    """Send SIGUSR1 or SIGUSR2 to the workers that catch it; `last`: why no attempt follows."""

    signum: int
    last: str = ""


class JobEnds(Message):
    """From the owner: when its job's time is up, in seconds since 1970.

    Scripts and clients can ask how much time is left.
    """

    ends_at: float


class Event(Message):
    """A line of `events.jsonl`, as written."""

    name: str
    time: str
    fields: dict[str, Any] = field(default_factory=dict)


class StartFailed(Message):
    """From the engine: the command to start a place's agent has ended without one.

    Attributes:
        is_gone: The scheduler says that the job has lost this node: no agent can come at its place.
    """

    place: int
    why: str
    is_gone: bool = False


class NeedNodes(Message):
    """Asks the engine to start agents at these places, if it can.

    Attributes:
        again: The request is repeated. An agent there may only be slow: don't start a second one.
    """

    places: tuple[int, ...]
    again: bool = False


# Progress and stacks of the ranks: from agents, requested by the head or a client.


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


class StacksTold(Message):
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


class BoardTold(Message):
    """The head's answer to a client; several messages for many ranks.

    Attributes:
        sample: Some of the ranks, in rank order; None while no attempt runs.
    """

    ask_id: str
    sample: RankSample | None
    is_last: bool = True


# Barriers of the tasks of a group: the agent of a task calls the head, which answers.


class BarrierState(enum.Enum):
    """The kind of a barrier's answer; after `WAITING` another answer follows."""

    RELEASED = "released"
    FAILED = "failed"
    WAITING = "waiting"


class BarrierCall(Message):
    """A process of the sender's task has reached a barrier.

    Attributes:
        caller_id: Identifies the call among those of this agent; all answers carry it.
        count: The number of callers; None for every task of the group, once each.
        rank: The number of this caller, from 0; None if the callers have no numbers.
    """

    caller_id: str
    name: str = "default"
    count: int | None = None
    rank: int | None = None
    timeout_s: float = 600.0


class BarrierLeave(Message):
    """The calling process is gone and no longer waits."""

    caller_id: str


class BarrierAnswer(Message):
    """The answer of a barrier to one caller.

    Attributes:
        what: If failed, the sentence of the error; if waiting, who is missing.
        missing: The names of the first few missing callers.
        left_s: If waiting, how long this caller still waits.
        timed_out: It failed because this caller's time limit has passed.
    """

    caller_id: str
    kind: BarrierState
    what: str = ""
    where: str | None = None
    why: str | None = None
    fix: str | None = None
    missing: tuple[str, ...] = ()
    left_s: float = 0.0
    timed_out: bool = False


# A workflow: the agent of a task to the head of its group.


class TaskHello(Message):
    """The agent of a task introduces itself; others reach it at `host` and `address`."""

    task: str
    attempt: int
    version: str
    pid: int
    host: str
    address: str
    boot_id: str = ""
    network_id: str = ""


class TaskDoing(Message):
    """The current activity of the agent, in words: `downloading input 0`."""

    text: str


class TaskPrepared(Message):
    """Inputs and working directory are ready; `free_ports`: the group's ports that are free."""

    attempt: int
    free_ports: tuple[int, ...] = ()


class TaskNotPrepared(Message):
    """The command can't be started; `state` is a value of `model.states`."""

    attempt: int
    state: str
    why: str
    code: int
    detail: tuple[str, ...] = ()
    hint: str | None = None


class TaskStarted(Message):
    """The command runs."""

    attempt: int
    pid: int


class TaskEnded(Message):
    """The command has ended, and all its child processes are gone."""

    attempt: int
    code: int
    signum: int | None = None
    elapsed_s: float = 0.0
    tail: tuple[str, ...] = ()
    memory_evidence: str | None = None


class TaskUploaded(Message):
    """The outputs are uploaded, or the error says why not."""

    attempt: int
    error: str | None = None
    notes: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()  # of datasets: `name:3`


class TaskOutput(Message):
    """Output of a command, for the terminal. The head forwards it to the clients."""

    task: str
    stream: int  # 1 or 2
    text: str
    dropped_lines: int = 0


# The head of a group to the agent of a task.


class TaskWelcome(Message):
    """The agent is accepted; the fields are those of `Welcome`."""

    head_pid: int
    boot_id: str
    network_id: str


class TaskBegin(Message):
    """All tasks are ready: start the command.

    Attributes:
        hosts: Task name -> host name, as this task reaches it; `addresses` has IP addresses.
        ports: Name in `{{port:NAME}}` -> number; the empty name for `{{port}}`.
    """

    attempt: int
    hosts: dict[str, str]
    addresses: dict[str, str]
    ports: dict[str, int]


class TaskAgain(Message):
    """Prepare another attempt in the same place."""

    attempt: int


class TaskStop(Message):
    """Send the command SIGTERM, and SIGKILL after the grace; without grace, SIGKILL at once."""

    attempt: int
    grace_s: float


class TaskUpload(Message):
    """Upload the outputs; datasets only after a success."""

    attempt: int
    succeeded: bool


class TaskLeave(Message):
    """The agent must exit."""


# The network survey, once before the first attempt, and facts about the nodes: the head asks,
# agents collect facts and connect to each other.


class AskNetwork(Message):
    """From the head: open a port for probes and report the interfaces."""

    survey: int


class NetworkFacts(Message):
    """From an agent: its interfaces and ports.

    Attributes:
        ports: The ports of its probe, for IPv4 and for IPv6.
        names: All its interfaces, with or without an address.
        variables: Those of `model.network.VARIABLES` that the user has set.
    """

    survey: int
    ports: tuple[int, ...]
    interfaces: tuple[Interface, ...]
    names: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


class AskFacts(Message):
    """From the head: collect facts about your node (`diagnose.facts`) and report them.

    Attributes:
        names: Names to resolve on the node.
        script: A script to check instead of the program.
    """

    is_long: bool = False
    names: tuple[str, ...] = ()
    script: str | None = None


class NodeFacts(Message):
    """From an agent: the facts (`diagnose.facts`), and its own clock at request and answer.

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


class ProbeResults(Message):
    """From an agent: all its connections on these candidates have ended.

    It has reached the targets that have no entry in `results`.
    """

    survey: int
    candidates: tuple[int, ...]
    results: tuple[PairResult, ...] = ()


class EndProbe(Message):
    """From the head: close the port and end the connections."""

    survey: int


# From agent to agent, on a probe's port. Ping and Pong measure latency.


class ProbeCall(Message):
    """Asks if the receiver is this node; the answer is the same message with its own values."""

    survey: int
    node: int


class ProbeBulk(Message):
    """Announces padding bytes after the Pong; a second Pong confirms all of them."""

    size_bytes: int


# `muster exec`: a command in a running task or next to a rank. Messages pass from a client through
# the head to the agent, and back.
#
# Each end may have at most one window of bytes that the other end has not acknowledged, so no hop
# in between has to buffer more.

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
        door: Instead of a command: a remote (`launcher/node/remote`), which that node's door forks.
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
    door: bool = False
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


class ExecTaken(Message):
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


FromExecClient = ExecStart | ExecInput | ExecTaken | ExecResize | ExecSignal | ExecLeave
FromExecTask = ExecOutput | ExecTaken | ExecEnded | ExecRefused


encode = _message.encode


def decode(payload: bytes) -> Message:
    """Return the message in an authenticated payload.

    Raises:
        codec.CodecError: It is not a message of muster.
    """
    return _message.decode(payload, Message)
