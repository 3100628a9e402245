"""`muster exec`: a command in a running task or next to a rank."""

from torchmuster.net.messages.base import Message

# `muster exec`: a client to the head of a group, on to the agent of the task, and back.
#
# Each side may send at most a window that the other end has not taken yet, so nobody in between has to hold more.

EXEC_WINDOW_BYTES = 256 << 10
MAX_WINDOW_BYTES = 4 << 20
EXEC_CHUNK_BYTES = 64 << 10
MAX_EXECS = 16


class ExecStart(Message):
    """Run a command inside a running task; without words: its shell.

    Attributes:
        exec_id: Random, chosen by the client; all messages of this command carry it.
        tty: The command gets a terminal of this size; otherwise three pipes.
        term: The kind of terminal, for TERM.
        debugger: Not a command: a stream to the rank, which waits for its debugger.
        door: Not a command: a remote end (`node/remote`), which the door of that node forks.
        claim: In which first pod the owner of a run in pods is that asks; empty for all others.
        window_bytes: How much of each direction may be on its way: over a long way more has to be.
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
    """The command has ended, with the code that a shell would show; `why` when it was ended."""

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
