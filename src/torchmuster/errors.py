"""The errors that a user sees.

    MusterError            everything below; entry points catch it, print it and exit
    ├── UsageError         2   the command line or a file that the user wrote is wrong
    ├── RunDirectoryError  3   the run directory can't be made, read or written
    ├── NotFoundError      4   no such run, no such log
    ├── ChannelError       5   the other side refused the connection, or can't be reached
    ├── JoinTimeoutError   6   requested nodes never joined
    ├── HeadLostError      7   the head ended before the run did
    ├── BarrierError      12   a barrier failed: it can never be full, or it refused this caller
    │   └── BarrierTimeoutError 6   it was not full within the limit
    ├── DataError         13   files could not be moved, or a dataset is damaged
    ├── EngineError       14   a scheduler's answer can't be parsed
    ├── MissingRecordError 15  a run in pods succeeded, but its results and files did not arrive
    └── in torchmuster.train, raised in the user's script:
        ├── NotFiniteError 1   a step's gradients are not finite, and `on_nan` is `stop` or `replay`
        ├── DiffersError   1   two ranks got different results from the same input (`verify_every`)
        ├── WorldError     8   the world is not what the launcher promised
        ├── DatasetError   9   the dataset doesn't keep to what exact data order needs
        ├── SnapshotError 10   a snapshot can't be written, read, or doesn't fit
        └── OnceError     11   the process that was to do the work for all failed

Each says what happened (one sentence, no period), where, why (the evidence) and how to fix it.
A traceback in front of a user means a bug in muster.
"""


class MusterError(Exception):
    """An error with the four parts that `core.cli.messages` prints.

    Attributes:
        what: One sentence without a period, with the numbers that disagree.
        where: File, option, node or rank; None when `what` already names it.
        why: The evidence, quoted from the other program where there is one.
        fix: One command or one edit; None when unknown.
        muster_final: A worker that ends with this error is not restarted: another attempt would
            fail in the same way. The launcher checks any exception for this attribute.
    """

    exit_code = 1
    muster_final = False

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def parts(self) -> dict[str, str | None]:
        """Return the four parts by name; `MusterError(**parts)` rebuilds the error elsewhere."""
        return {"what": self.what, "where": self.where, "why": self.why, "fix": self.fix}

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the user's own frames and the error, no frames of muster."""
        import os
        import sysconfig
        import traceback

        ours = (os.path.dirname(__file__), *sysconfig.get_paths().values())
        frames = traceback.extract_tb(self.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith((*ours, "<frozen"))]
        text = str(self) if str(self) != self.what else f"{self.what}\n{self.explain_to_user()}"
        return [*traceback.format_list(own), f"{type(self).__name__}: {text}".rstrip()]

    def explain_to_user(self) -> str:
        """Return where, why and fix as lines; a worker reports them in place of a traceback."""
        parts = [("at", self.where), ("because", self.why), ("hint", self.fix)]
        return "\n".join(f"{name}: {text}" for name, text in parts if text)


class ManyErrors(Exception):  # noqa: N818 - it is a bag of errors, not one
    """Several problems of one command line or one file."""

    def __init__(self, errors: "list[UsageError]") -> None:
        super().__init__(errors[0].what)
        self.errors = errors


class UsageError(MusterError):
    """What the user typed or wrote is invalid; nothing was started."""

    exit_code = 2
    muster_final = True


class RunDirectoryError(MusterError):
    """The run directory can't be made, read or written."""

    exit_code = 3


class NotFoundError(MusterError):
    """No such run, rank or attempt."""

    exit_code = 4


class ChannelError(MusterError):
    """The other side of the channel refused the connection, or can't be reached."""

    exit_code = 5


class JoinTimeoutError(MusterError):
    """Requested nodes did not join in time."""

    exit_code = 6


class HeadLostError(MusterError):
    """The agent of the head's node ended before the run did, and the head with it."""

    exit_code = 7


class BarrierError(MusterError):
    """A barrier failed: it can never be full, or it refused this caller."""

    exit_code = 12


class BarrierTimeoutError(BarrierError):
    """A barrier was not full within its limit; `what` names the missing callers."""

    exit_code = 6


class MissingRecordError(MusterError):
    """A run in pods succeeded, but its results, logs and files did not reach the client."""

    exit_code = 15


def found_bug(whose: str, error: BaseException | None) -> MusterError:
    """Return an error that reports a bug in muster, with the traceback of `error`."""
    what = f"{whose} met a bug in muster"
    try:
        import traceback

        why = "".join(traceback.format_exception(error)) if error else ""
    except Exception:  # noqa: BLE001 - an exception that cannot be shown is reported all the same
        return MusterError(what)
    return MusterError(what, why=why, fix="please report this")


class SessionBusyError(UsageError):
    """The session is already occupied by another run."""

    def __init__(self, session: str, run_id: str) -> None:
        super().__init__(
            f"the session {session} is busy",
            where=f"--session {session}",
            why=f"the run {run_id} is in it, and a session has one run at a time",
            fix=f"muster wait {run_id}, or muster cancel {run_id}",
        )
