"""The errors that a user sees.

    MusterError            everything below; `cli` alone catches it, prints it and exits
    ├── UsageError         2   the command line or a file that the user wrote is wrong
    ├── RunDirectoryError  3   the run directory can't be made, read or written
    ├── NotFoundError      4   no such run, no such log
    ├── ChannelError       5   the other side refused us, or can't be reached
    ├── JoinTimeoutError   6   nodes that were asked for never came
    └── HeadLostError      7   the head of the run has ended under us

Each says what happened (one sentence, no period), where, why (the evidence) and how to mend it.
A traceback in front of a user means a bug in muster.
"""


class MusterError(Exception):
    """An error with the four parts that `ui.errors` prints.

    Attributes:
        what: One sentence without a period, with the numbers that disagree.
        where: File, option, node or rank; None when the sentence already says it.
        why: The evidence, in the other program's words where there is one.
        fix: One command or one edit; None when unknown.
    """

    exit_code = 1

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


class UsageError(MusterError):
    """What the user typed or wrote can't be done; nothing was started."""

    exit_code = 2


class RunDirectoryError(MusterError):
    """The run directory can't be made, read or written."""

    exit_code = 3


class NotFoundError(MusterError):
    """No such run, rank or attempt."""

    exit_code = 4


class ChannelError(MusterError):
    """The other side of the channel refused us or can't be reached."""

    exit_code = 5


class JoinTimeoutError(MusterError):
    """Nodes that were asked for did not come in time."""

    exit_code = 6


class HeadLostError(MusterError):
    """The head's agent, and the coordinator with it, ended before the run did."""

    exit_code = 7
