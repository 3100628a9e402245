"""A finding of lint about one line of a job script."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torchmuster.diagnose.finding import Finding, Level
from torchmuster.diagnose.lint.numbers import JobScript, number
from torchmuster.diagnose.lint.starts import ScriptStart


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding(Finding):
    """A finding of one line; its cause is the name of the rule.

    Attributes:
        line: From 1; 0 for the script as a whole.
    """

    line: int

    @property
    def word(self) -> str:
        """The name of its level in lint: a line that breaks the job is an error."""
        return "error" if self.level is Level.FAILURE else self.level.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptView:
    """A script and its starts: the input of every rule."""

    job: JobScript
    starts: tuple[ScriptStart, ...]

    @property
    def nodes(self) -> int | None:
        """The number of nodes in the directives."""
        return self.job.allocation.nodes

    def is_wide(self, start: ScriptStart) -> bool:
        """Return whether a start is for several nodes, by the job or by its own --nnodes."""
        if self.nodes is not None:
            return self.nodes > 1
        if start.given is None:
            return False
        low = start.given.nnodes.partition(":")[2] or start.given.nnodes
        return (number(low, self.job, start.line) or 1) > 1


Rule = Callable[[ScriptView], Iterable[LintFinding]]


def _finding(level: Level, rule: str, line: int, what: str, why: str, fix: str) -> LintFinding:
    return LintFinding(level=level, cause=rule, line=line, error=what, because=(why,), hint=fix)


error = partial(_finding, Level.FAILURE)  # it will break the job
warning = partial(_finding, Level.WARNING)  # it may break or slow the job
note = partial(_finding, Level.NOTE)  # harmless today
