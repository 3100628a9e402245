"""A workflow: messages between the agents of tasks and the head of their group."""

from torchmuster.net.messages.base import Message

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
    """Inputs and working directory are ready; these of the group's candidate ports are free here."""

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
    """The agent is accepted; `head_pid` and the ids show, as in `Welcome`, whether the head runs on its own machine."""

    head_pid: int
    boot_id: str
    network_id: str


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


class TaskAgain(Message):
    """Prepare another attempt in the same place."""

    attempt: int


class TaskStop(Message):
    """SIGTERM to the command, SIGKILL after the grace; no grace: SIGKILL at once."""

    attempt: int
    grace_s: float


class TaskUpload(Message):
    """Upload the outputs; datasets only after a success."""

    attempt: int
    succeeded: bool


class TaskLeave(Message):
    """The agent has to end."""
