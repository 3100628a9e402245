"""How workers ended, and which end caused the others.

One dead rank makes all others fail with more output. The head collects all ends of an attempt, and
the functions here choose the first one that was no echo of another.
"""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.core.model import contract

# What a healthy rank prints when another one has gone. Source: messages of torch 2.13 and NCCL 2.27
# in Gloo and NCCL runs; `docs/design.md`, rule 3.
ECHOES = re.compile(
    r"""
      Connection\ closed\ by\ peer | Connection\ reset\ by\ peer | Broken\ pipe
    | Connection\ refused | connectFullMesh | Gloo\ \w+\ failed | gloo/transport
    | Application\ timeout\ caused\ pair\ closure | Timed\ out\ waiting\ \d+ms\ for\ (recv|send)
    | Socket\ closed | recvValue\ failed | sendBytes\ failed | failed\ to\ recv,\ got\ 0\ bytes
    | Watchdog\ caught\ collective\ operation\ timeout | ProcessGroupNCCL.*(abort|timed?\ ?out)
    | ncclRemoteError | ncclSystemError | remote\ process\ exited
    | wait\ timeout\ after | The\ client\ socket\ has\ (timed\ out|failed) | DistNetworkError
    | DistStoreError | monitoredBarrier
    """,
    re.VERBOSE | re.IGNORECASE,
)

# The detail of a lost node.
OVERUSED = "its pod used more of its node's disk or memory than it asks for"


class EndKind(enum.Enum):
    """How a worker's life ended."""

    SUCCESS = "success"
    PREEMPTED = "preempted"
    EXCEPTION = "exception"
    EXIT_CODE = "exit_code"
    SIGNAL = "signal"
    NODE_LOST = "node_lost"
    NOT_STARTED = "not_started"
    HANG = "hang"  # it made no progress while others waited for it


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorParts:
    """The parts of a muster error other than its sentence, as the worker printed them."""

    at: str | None
    because: tuple[str, ...]
    hint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonError:
    """An exception that ended a worker.

    Attributes:
        where: `file:line` of the innermost frame in the user's code, else of the last frame.
        bases: Class names of its type's MRO, itself first.
        is_final: The exception declares (`muster_final = True`) that another attempt would fail in
            the same way.
        handled: Type and message of the exception that was being handled when the script exited.
        blames_node: The exception declares (`muster_blames_node = True`) that this rank computed
            wrong results.
        own: The parts of a muster error; `traceback` has them as one text.
    """

    type_name: str
    message: str
    where: str | None
    traceback: str
    is_final: bool = False
    bases: tuple[str, ...] = ()
    handled: str | None = None
    own: ErrorParts | None = None
    blames_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueNote:
    """A note on a function's return value, which its worker wrote to a file (`RunDir.rank_value`).

    Attributes:
        python: Minor version of the Python that pickled it, e.g. `3.12`.
    """

    size_bytes: int
    sha256: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanFile:
    """A file whose code a worker ran.

    Attributes:
        path: Relative to the folder of the run's program if it is inside, else absolute.
        sha256: Hash of its bytes: for a script as run, for a module at the end of the worker.
        changed: It changed after the worker began, so the imported version may be older.
    """

    path: str
    sha256: str
    changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RanCode:
    """The project's code that a worker ran.

    Attributes:
        files: The script first, then the modules.
        num_left_out: Number of further files: too many, or unreadable at the end.
    """

    files: tuple[RanFile, ...]
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftProcess:
    """A process in a session that a worker created: it outlives a successful run."""

    pid: int
    session: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """The end of one worker, with all evidence that its agent found.

    Attributes:
        asked: muster had already sent this worker a signal.
        elapsed_s: From the worker's start to its end.
        tail: Its last lines, at most 20.
        memory_evidence: The kernel's message about an out-of-memory kill, if any.
        step: The last training step it did; None if its script does not report steps.
        largest_group: Size of its largest process group, 0 for none; None if unknown.
        value: Note on its function's return value.
        code: The code it ran, as rank 0 reports at the end of its script; None for other ranks, or
            if unknown.
    """

    attempt: int
    rank: int
    local_rank: int
    node: str
    kind: EndKind
    asked: bool
    elapsed_s: float
    exit_code: int | None = None
    signum: int | None = None
    error: PythonError | None = None
    tail: tuple[str, ...] = ()
    memory_evidence: str | None = None
    detail: str | None = None
    largest_group: int | None = None
    step: int | None = None
    value: ValueNote | None = None
    code: RanCode | None = None

    @property
    def is_failure(self) -> bool:
        """Return whether this end was unrequested, and neither success nor preemption."""
        return not self.asked and self.kind not in (EndKind.SUCCESS, EndKind.PREEMPTED)

    @property
    def shell_code(self) -> int:
        """Return the exit code that a shell would show: 128+n for a signal."""
        if self.signum is not None:
            return 128 + self.signum
        return self.exit_code if self.exit_code is not None else 1

    @property
    def is_final(self) -> bool:
        """Return whether the worker's exception declares that another attempt would fail, too."""
        return self.error is not None and self.error.is_final

    @property
    def looks_like_echo(self) -> bool:
        """Return whether this end looks like an echo of another rank's death."""
        if self.kind is EndKind.EXCEPTION and self.error is not None:
            return is_echo(self.error)
        if self.kind is EndKind.SIGNAL and self.signum == 6:  # the NCCL watchdog aborts
            return bool(ECHOES.search("\n".join(self.tail)))
        return False


def is_echo(error: PythonError) -> bool:
    """Return whether an exception looks like an echo of another rank's death."""
    return bool(ECHOES.search(f"{error.type_name}: {error.message}"))


def first_cause(ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Return the failure that explains the others, given ends in order of arrival."""
    failures = [end for end in ends if end.is_failure]
    causes = [end for end in failures if not end.looks_like_echo]
    # A lost node often causes worker errors that are not known echoes; but a worker's own error
    # says more than a silence that began later.
    found = causes or failures
    return found[0] if found else None


def last_step(ends: Sequence[WorkerEnd]) -> int | None:
    """Return the last step that any of these workers did; None if no script reports steps."""
    return max((end.step for end in ends if end.step is not None), default=None)


def describe(end: WorkerEnd) -> str:
    """Return the end in a few words: `SIGSEGV`, `exit code 3`, `ValueError: no such file`."""
    if end.kind is EndKind.EXCEPTION and end.error is not None:
        first_line = end.error.message.strip().splitlines()
        text = f": {_shorten(first_line[0])}" if first_line else ""
        return f"{end.error.type_name}{text}"
    if end.kind is EndKind.SIGNAL and end.signum is not None:
        return contract.signal_name(end.signum)
    if end.kind is EndKind.NODE_LOST:
        return end.detail or "its node was lost"
    if end.kind is EndKind.NOT_STARTED:
        return end.detail or "it could not be started"
    if end.kind is EndKind.HANG:
        return end.detail or "it stood still"
    if end.kind is EndKind.PREEMPTED:
        return f"exit code {contract.EX_TEMPFAIL} (preempted)"
    handled = end.error.handled if end.error is not None else None
    return f"exit code {end.exit_code}" + (
        f" while it handled {_shorten(handled)}" if handled else ""
    )


def _shorten(line: str) -> str:
    """Return a line cut for a sentence, without Gloo's leading source path."""
    bare = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", line)
    return bare if len(bare) <= 100 else f"{bare[:97]}..."
