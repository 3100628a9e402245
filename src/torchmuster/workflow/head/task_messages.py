"""Messages between the agents of a workflow's tasks and the head of their group."""

import enum

from torchmuster.core.net.messages import AnyOutput, AnyWelcome, Message

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


# A workflow: messages between the agents of tasks and the head of their group.


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


class TaskOutput(AnyOutput):
    """Output of a task's command."""

    task: str


# The head of a group to the agent of a task.


class TaskWelcome(AnyWelcome):
    """The head of the group accepts the agent of a task."""


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
