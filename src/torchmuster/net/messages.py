"""Everything that travels over the channel: read this file and you know the protocol.

Agents call the coordinator; the client calls it too. One JSON object a frame, whose `type` is the name
of a class here and whose other fields are that class's fields (`model.codec`).
"""

import enum
import json
from dataclasses import dataclass, field
from typing import Any

from torchmuster.model import codec
from torchmuster.model.failure import WorkerEnd
from torchmuster.model.network import Interface, PairResult
from torchmuster.model.progress import RankProgress, RankStack
from torchmuster.model.ranks import NodeRanks
from torchmuster.model.stop import StopCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What all messages are."""


# Agent to coordinator.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """An agent introduces itself, or comes back.

    Attributes:
        incarnation: Random, one for the life of the agent process.
        place: The place that it was started for; None when the coordinator shall number it.
        boot_id: Names kernel and process namespace: on the coordinator's own, pids can be checked.
        attempt: The attempt whose workers it still runs; None without workers.
        network_id: Names kernel and network namespace: agents with the same one share all interfaces.
        jobs: `VARIABLE=ID` of the schedulers' jobs that it is in, where the run has no name of its own.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Message):
    """I am here; the echo of this number prolongs my lease."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnerReady(Message):
    """The spawner can start workers."""

    python: str
    torch: str | None
    forks: bool
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnerRefused(Message):
    """This node can't run the job at all; `what`, `where` and `hint` take the place of the usual words."""

    why: str
    what: str | None = None
    where: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStarted(Message):
    """All workers of the attempt live on this node."""

    attempt: int
    pids: tuple[int, ...]
    spawner_pid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded(Message):
    """One worker has ended, with the evidence."""

    end: WorkerEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLost(Message):
    """The store of the attempt has ended by itself."""

    attempt: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftProcess:
    """A process in a session that a worker has made: it outlives a run that ended well."""

    pid: int
    session: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReaped(Message):
    """No process of this attempt is left on this node, but those that go on after a good end."""

    attempt: int
    left: tuple[LeftProcess, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(Message):
    """What a worker wrote, for the terminal. Goes on from the coordinator to the clients."""

    rank: int
    attempt: int
    stream: int  # 1 or 2
    text: str
    dropped_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Message):
    """A sentence for the user: a fall-back, a loss of logs."""

    text: str
    level: str = "note"
    logs_lost_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Debugger(Message):
    """A worker entered or left the debugger."""

    rank: int
    active: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStop(Message):
    """The script saves and leaves for a reason that would stop the next attempt as well."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded(Message):
    """The training library has stopped or finished: at which step, and which one is saved."""

    rank: int
    step: int
    saved_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReceived(Message):
    """The scheduler (or a person) sent this agent a signal that is meant for the job."""

    signum: int


# Coordinator to agent.


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """The agent is in.

    Attributes:
        head_pid: With the two ids, as in `Hello`: an agent on the same machine can see whether the head still runs.
    """

    run_id: str
    node: str
    tee: str
    head_pid: int = 0
    boot_id: str = ""
    network_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """The agent is not wanted; the sentence says why. It ends."""

    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong(Message):
    """The echo of a ping."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
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
    interface: str | None = None  # this node's own in the network that was chosen
    tasks_per_node: str = ""  # the workers of every node, in Slurm's notation: 2(x2),1


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAttempt(Message):
    """SIGKILL every process of the attempt and say when all are gone.

    Attributes:
        ended_well: All workers have ended with 0: what has a session of its own goes on.
    """

    attempt: int
    ended_well: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalWorkers(Message):
    """Send a signal to each worker process, once."""

    signum: int
    if_caught: bool = False
    asks_to_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Input(Message):
    """What the terminal's user typed for one rank; `end` closes its standard input."""

    rank: int
    text: str
    end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalSize(Message):
    """The terminal that shows the run has another size."""

    columns: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(Message):
    """The run is over."""

    exit_code: int
    sentence: str | None = None


# Which network the workers use: asked and probed once, before the first attempt.


@dataclass(frozen=True, slots=True, kw_only=True)
class AskNetwork(Message):
    """Coordinator: open a port for probes and say which interfaces there are."""

    survey: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts(Message):
    """Agent: what it has.

    Attributes:
        ports: Of its probe, for IPv4 and for IPv6.
        names: All its interfaces, with an address or without.
        variables: What the user has set himself of `model.network.VARIABLES`.
    """

    survey: int
    ports: tuple[int, ...]
    interfaces: tuple[Interface, ...]
    names: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFacts(Message):
    """Coordinator: look around on your node (`doctor.facts`) and say what you find.

    Attributes:
        names: Names to be resolved there.
        script: A script to look at instead of the program.
    """

    is_long: bool = False
    names: tuple[str, ...] = ()
    script: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts(Message):
    """Agent: what was found (`doctor.facts.Facts`, at most 128 KiB), and its own clock when asked and when sent."""

    facts: dict[str, Any]
    asked_at: float
    sent_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget(Message):
    """One call that a node shall make; `measure` also asks for latency and bandwidth."""

    candidate: int
    node: int
    address: str
    port: int
    measure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeNetwork(Message):
    """Coordinator: call these; `node` is what the receiver is called among them.

    Attributes:
        bulk_bytes: How much to send to each that is measured, and take it for stalled when it does not arrive; None
            measures in passing.
    """

    survey: int
    node: int
    targets: tuple[ProbeTarget, ...]
    connect_s: float
    bulk_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResults(Message):
    """Agent: all its calls on these candidates have ended; what is not in `results` was reached."""

    survey: int
    candidates: tuple[int, ...]
    results: tuple[PairResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProbe(Message):
    """Coordinator: close the port, end the calls."""

    survey: int


# From agent to agent, on the port of a probe. Ping and Pong measure latency.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCall(Message):
    """Are you this node? The answer is the same message with the answerer's own values."""

    survey: int
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeBulk(Message):
    """After your Pong I send so many bytes that mean nothing; a second Pong when you have all."""

    size_bytes: int


# Client to coordinator, and back.


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch(Message):
    """The client wants events and output."""

    owner: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """Stop the run: the signal, then SIGKILL after the grace; `at_once` skips the grace."""

    signum: int
    at_once: bool = False
    cause: StopCause = StopCause.USER
    who: str = ""  # in words of its own, where the cause does not say it all
    time_is_up: bool = False  # what was saved can be resumed in another job


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Message):
    """Send SIGUSR1 or SIGUSR2 to the workers that catch it; `last` says why no attempt follows one that leaves."""

    signum: int
    last: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Message):
    """A line of `events.jsonl`, as it is written."""

    name: str
    time: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed(Message):
    """What was to start a place's agent has ended; the engine's word, for a node that never calls."""

    place: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedNodes(Message):
    """The engine shall fill these places, if it can.

    Attributes:
        again: Asked before; an agent that runs there may only be slow, so it is not doubled.
    """

    places: tuple[int, ...]
    again: bool = False


# Barriers: the agent of a task to the head of its group, and back.


class BarrierState(enum.Enum):
    """What a barrier tells a caller; `waiting` is not the last word."""

    RELEASED = "released"
    FAILED = "failed"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierCall(Message):
    """A process of the sender's task has come to a barrier.

    Attributes:
        caller_id: Names the call among those of this agent; all answers carry it.
        count: How many have to come; None for every task of the group, once each.
        rank: Which of them this is, from 0; None when the callers have no numbers.
    """

    caller_id: str
    name: str = "default"
    count: int | None = None
    rank: int | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierLeave(Message):
    """The process of this call is gone; it waits no longer."""

    caller_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierAnswer(Message):
    """What a barrier says to one caller.

    Attributes:
        what: Failed: the sentence of the error. Waiting: who is missing.
        missing: The first few names of those that are missing.
        left_s: Waiting: how long this caller still waits.
        timed_out: Failed because the limit of this caller has passed.
    """

    caller_id: str
    kind: BarrierState
    what: str = ""
    where: str | None = None
    why: str | None = None
    fix: str | None = None
    missing: tuple[str, ...] = ()
    num_here: int = 0
    num_needed: int = 0
    left_s: float = 0.0
    timed_out: bool = False


# A barrier without a workflow: the other ranks call rank 0, which answers with BarrierAnswer.


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierJoin(Message):
    """A rank has come; `incarnation` tells its own second connection from another with its rank."""

    name: str
    rank: int
    num_nodes: int
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierPassed(Message):
    """This rank has heard that the barrier is full."""


# A workflow: the agent of a task to the head of its group.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHello(Message):
    """The agent of a task introduces itself; `host` and `address` are what others reach it by."""

    task: str
    attempt: int
    version: str
    pid: int
    host: str
    address: str
    boot_id: str = ""
    network_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDoing(Message):
    """What keeps the agent busy, in words: `downloading input 0`."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrepared(Message):
    """Inputs and place are ready; of the group's candidates these ports are free here."""

    attempt: int
    free_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNotPrepared(Message):
    """The command can't begin; `state` is a word of `model.states`."""

    attempt: int
    state: str
    why: str
    code: int
    detail: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStarted(Message):
    """The command runs."""

    attempt: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded(Message):
    """The command has ended, and nothing that it started is left."""

    attempt: int
    code: int
    signum: int | None = None
    elapsed_s: float = 0.0
    tail: tuple[str, ...] = ()
    memory_evidence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskUploaded(Message):
    """The outputs have arrived, or the error says why not."""

    attempt: int
    error: str | None = None
    notes: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()  # of datasets: `name:3`


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutput(Message):
    """What a command wrote, for the terminal. Goes on from the head to the clients."""

    task: str
    stream: int  # 1 or 2
    text: str
    dropped_lines: int = 0


# The head of a group to the agent of a task.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWelcome(Message):
    """The agent is in; `head_pid` and the ids tell it, as in `Welcome`, whether the head runs on its own machine."""

    head_pid: int
    boot_id: str
    network_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskBegin(Message):
    """All are ready: start the command.

    Attributes:
        hosts: Task name -> host name, as this task reaches it; `addresses` the same as IP addresses.
        ports: Name in `{{port:NAME}}` -> number; the empty name for `{{port}}`.
    """

    attempt: int
    hosts: dict[str, str]
    addresses: dict[str, str]
    ports: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAgain(Message):
    """Prepare another attempt in the same place."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStop(Message):
    """SIGTERM to the command, SIGKILL after the grace; no grace: SIGKILL at once."""

    attempt: int
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskUpload(Message):
    """Bring the outputs where they belong; datasets only after a success."""

    attempt: int
    succeeded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLeave(Message):
    """Nothing more is wanted: the agent ends."""


# `muster exec`: a client to the head of a group, on to the agent of the task, and back.
#
# `data` is base64. Each side may send at most EXEC_WINDOW_BYTES (of data, not of base64) that the other end has not
# taken yet, so nobody in between has to hold more.

EXEC_WINDOW_BYTES = 256 << 10
EXEC_CHUNK_BYTES = 64 << 10
MAX_EXECS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecStart(Message):
    """Run a command inside of a running task; no words: its shell.

    Attributes:
        exec_id: Random, chosen by the client; all messages of this command carry it.
        tty: The command gets a terminal of this size; otherwise three pipes.
        term: The kind of terminal, for TERM.
    """

    exec_id: str
    task: str
    argv: tuple[str, ...] = ()
    tty: bool = False
    rows: int = 24
    columns: int = 80
    term: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecInput(Message):
    """What the command reads; `end` closes its standard input."""

    exec_id: str
    data: str = ""
    end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecOutput(Message):
    """What the command wrote; a terminal has only stream 1."""

    exec_id: str
    stream: int  # 1 or 2
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecTaken(Message):
    """So much of what the other end sent has been written where it belongs."""

    exec_id: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResize(Message):
    """The client's terminal has another size."""

    exec_id: str
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecSignal(Message):
    """Send a signal to the command's process group."""

    exec_id: str
    signum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecLeave(Message):
    """The client has gone: SIGHUP to the command, SIGKILL a little later."""

    exec_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecEnded(Message):
    """The command has ended, with the code that a shell would show; `why` when it was ended."""

    exec_id: str
    code: int
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRefused(Message):
    """The command was not started."""

    exec_id: str
    what: str
    why: str | None = None
    fix: str | None = None


# Progress and stacks of the ranks: agent to coordinator, asked by it or by a client.


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Message):
    """Agent, every 2 s while workers run: how far they are."""

    attempt: int
    ranks: tuple[RankProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStacks(Message):
    """Coordinator: say where your ranks stand, now."""

    number: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks(Message):
    """Agent: where they stand; several messages where there are many ranks."""

    number: int
    stacks: tuple[RankStack, ...]
    is_last: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStacks(Message):
    """A client wants the stacks of all ranks."""

    ask_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksTold(Message):
    """The coordinator's answer to a client.

    Attributes:
        sentence: Who waits and who doesn't, in one sentence.
        lines: All stacks, equal ones together; several messages when they are long.
    """

    ask_id: str
    sentence: str
    lines: tuple[str, ...]
    is_last: bool = True


FromExecClient = ExecStart | ExecInput | ExecTaken | ExecResize | ExecSignal | ExecLeave
FromExecTask = ExecOutput | ExecTaken | ExecEnded | ExecRefused


_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Return the payload of one frame."""
    plain = codec.to_plain(message)
    plain["type"] = type(message).__name__
    return json.dumps(plain, separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """Return the message in a payload whose MAC was right.

    Raises:
        codec.CodecError: It is not one of ours.
    """
    try:
        plain = json.loads(payload)
        name = plain.pop("type")
        cls = _TYPES[name]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise codec.CodecError(f"no message of ours: {error!r}") from None
    return codec.from_plain(cls, plain)
