"""The values of an explanation: lines and their writers, their meaning, and the verdict."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchmuster.diagnose.finding import Confidence, Finding


class LineRole(enum.Enum):
    """The role of a line in the story of a failure."""

    CAUSE = "cause"  # may have begun it
    ECHO = "echo"  # what others print when a rank has gone; never first if there is anything else
    CONFIRMS = "confirms"  # proves a cause, opens none by itself
    CONTEXT = "context"  # sizes, addresses, names, progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """The writer of a line, as far as it is known; `task` is a label of srun or a local rank."""

    host: str | None = None
    rank: int | None = None
    task: int | None = None

    def known(self, other: "Who") -> "Who":
        """Return both combined; the values of this one win."""
        if other.host is None and other.rank is None and other.task is None:
            return self  # the usual case: create no object
        return Who(
            host=self.host or other.host,
            rank=other.rank if self.rank is None else self.rank,
            task=other.task if self.task is None else self.task,
        )

    def __str__(self) -> str:
        """Return `rank 3 on n1`, as much of it as is known."""
        rank = f"rank {self.rank}" if self.rank is not None else ""
        if self.host:
            return f"{rank} on {self.host}" if rank else self.host
        return rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a log.

    Attributes:
        text: Without colours, prefix and time, at most 2,000 characters.
        order: Its place among all lines that were read.
        when: Seconds since 1970 by the line's own time (taken as UTC); None without a time.
        level: Its logger's level: `info`, `warning` or `error`; empty when it has none.
    """

    path: str
    number: int
    text: str
    order: int
    who: Who = Who()
    when: float | None = None
    level: str = ""

    @property
    def place(self) -> str:
        """Return `file:line`."""
        return f"{self.path}:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """A meaningful line, with the lines that belong to it.

    Attributes:
        kind: What happened, e.g. `store_connect`; most kinds are in `catalogue/lines.txt`.
        fields: What the line names: addresses, ports, ranks, error numbers.
        detail: Lines that belong to it: a traceback.
    """

    kind: str
    role: LineRole
    line: LogLine
    fields: Mapping[str, str] = field(default_factory=dict)
    detail: tuple[str, ...] = ()

    @property
    def who(self) -> Who:
        """Return the writer of the line."""
        return self.line.who

    def get(self, name: str) -> str:
        """Return a field, or an empty string."""
        return self.fields.get(name) or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFinding(Finding):
    """A finding that is argued from lines of logs.

    Attributes:
        began: The line with which it began.
        ruled_out: Other explanations, and why they don't hold.
        confirm: The one command that would prove it.
        rivals: Causes that the evidence does not rule out.
    """

    confidence: Confidence
    evidence: tuple[LogLine, ...] = ()
    ruled_out: tuple[str, ...] = ()
    confirm: str | None = None
    rivals: tuple[str, ...] = ()
    began: LogLine | None = None


class JobOutcome(enum.Enum):
    """The state of the job, as far as its logs prove it."""

    FAILED = "failed"
    ENDED_WELL = "ended well"
    RUNNING = "running"
    UNKNOWN = "unknown"  # neither an end nor a failure is in these lines


@dataclass(frozen=True, slots=True, kw_only=True)
class LogVerdict:
    """The result of an explanation.

    Attributes:
        found: The causes, the first one decides; empty when the logs do not tell.
        outcome: Whether the job failed, ended or runs; never healthy without proof.
        next_to_fail: What would fail next, once the first cause is fixed.
        collect: What to collect when the logs do not tell the cause; commands to type next if it runs.
    """

    found: tuple[LogFinding, ...]
    outcome: JobOutcome = JobOutcome.FAILED
    next_to_fail: tuple[LogFinding, ...] = ()
    collect: tuple[str, ...] = ()
    num_lines: int = 0
    num_files: int = 0
    notes: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Return whether the logs prove that nothing has failed so far."""
        return self.outcome in (JobOutcome.ENDED_WELL, JobOutcome.RUNNING)

    @property
    def first(self) -> LogFinding | None:
        """Return the cause, or None."""
        return self.found[0] if self.found else None
