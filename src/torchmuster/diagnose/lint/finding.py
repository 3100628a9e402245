"""What lint has to say about one line of a job script."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from torchmuster.diagnose.lint.jobscript import JobScript
from torchmuster.diagnose.lint.numbers import number
from torchmuster.diagnose.lint.starts import ScriptStart


class LintLevel(StrEnum):
    """How sure it is that the line does harm: it does, it may, it has no effect."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """One thing that will go wrong, or has no effect.

    Attributes:
        rule: Its name, for the page and for filters.
        line: From 1; 0 for the script as a whole.
        what: One sentence without a period.
        why: What follows from it.
        fix: One edit.
    """

    rule: str
    level: LintLevel
    line: int
    what: str
    why: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptView:
    """A script and its starts, as every rule sees them."""

    job: JobScript
    starts: tuple[ScriptStart, ...]

    @property
    def nodes(self) -> int | None:
        """How many nodes the directives ask for."""
        return self.job.allocation.nodes

    def is_wide(self, start: ScriptStart) -> bool:
        """Say whether a start is meant for several nodes: the job has them, or its own --nnodes says so."""
        if self.nodes is not None:
            return self.nodes > 1
        if start.given is None:
            return False
        low = start.given.nnodes.partition(":")[2] or start.given.nnodes
        return (number(low, self.job, start.line) or 1) > 1


Rule = Callable[[ScriptView], Iterable[LintFinding]]


def error(rule: str, line: int, what: str, why: str, fix: str) -> LintFinding:
    """Return a finding that will break the job."""
    return LintFinding(rule=rule, level=LintLevel.ERROR, line=line, what=what, why=why, fix=fix)


def warning(rule: str, line: int, what: str, why: str, fix: str) -> LintFinding:
    """Return a finding that may break or slow the job."""
    return LintFinding(rule=rule, level=LintLevel.WARNING, line=line, what=what, why=why, fix=fix)


def note(rule: str, line: int, what: str, why: str, fix: str) -> LintFinding:
    """Return a finding without harm today."""
    return LintFinding(rule=rule, level=LintLevel.NOTE, line=line, what=what, why=why, fix=fix)
