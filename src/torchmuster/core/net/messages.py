"""Messages of a training run: of its agents, its owner and its clients with its head.

The agents of a run call its head, and so do its owner and clients. Each frame is one JSON object: `type` names a class,
the other fields are that class's fields (`model.codec`). Other rooms add messages by the table `messages`. Both ends of a channel
have the same version: the handshake's for frames (`net.channel`), torchmuster's for messages (`Hello.version`).
"""

from dataclasses import field
from typing import Any

from torchmuster.core import plugs
from torchmuster.core.model import codec
from torchmuster.core.model.codec import TypedMessage
from torchmuster.core.model.failure import LeftProcess, WorkerEnd
from torchmuster.core.model.ranks import NodeRanks
from torchmuster.core.model.verdict import StopCause


class Message(TypedMessage):
    """Base class of messages between agents, heads, owners and clients of a run."""

    @classmethod
    def find_word(cls, name: str) -> type[Any] | None:
        """Return the message with this name; those of other rooms are imported when the first of them arrives."""
        if name not in cls.words:
            list(plugs.every("messages"))
        return cls.words.get(name)


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


class AnyOutput(Message, is_word=False):
    """Output for the terminal. The head forwards it to the clients."""

    stream: int  # 1 or 2
    text: str
    dropped_lines: int = 0


class Output(AnyOutput):
    """Output of a worker."""

    rank: int
    attempt: int


class CheckAnswer(Message, is_word=False):
    """An agent's answer to one of the checks before an attempt (`StartChecks`)."""


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


class AnyWelcome(Message, is_word=False):
    """A head accepts an agent.

    Attributes:
        head_pid: With the two ids (see `Hello`), lets an agent on the same machine check whether
            the head still runs.
    """

    head_pid: int = 0
    boot_id: str = ""
    network_id: str = ""


class Welcome(AnyWelcome):
    """The head of a training run accepts an agent."""

    run_id: str
    node: str
    tee: str


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


encode = codec.encode


def decode(payload: bytes) -> Message:
    """Return the message in an authenticated payload.

    Raises:
        codec.CodecError: It is not a message of muster.
    """
    return codec.decode(payload, Message)
