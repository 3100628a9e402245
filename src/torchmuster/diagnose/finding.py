"""What doctor, explain and lint say: one form for all of them, one order, one way to print it. Values only.

A finding has the four parts of every message (`error / at / because / hint`), a level and a cause word. Where two of them
find the same cause, the one in a node's facts and the other in logs, the word is the same.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.core.model.text import render_report
from torchmuster.core.model.verdict import Report


class Level(enum.Enum):
    """How bad it is: a failure ends the job or makes it wrong, a warning may, a note is for who looks for it."""

    FAILURE = "failure"
    WARNING = "warning"
    NOTE = "note"


class Confidence(enum.Enum):
    """How sure it is: HIGH only where the evidence leaves no second reading."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


_ORDER = list(Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding.

    Attributes:
        cause: A fixed word, documented, for tests and scripts.
        is_certain: The job can't work: a run ends before its workers start.
        weight: Which of one level comes first; the larger.
    """

    level: Level = Level.FAILURE
    cause: str
    error: str
    at: str | None = None
    because: tuple[str, ...] = ()
    hint: str | None = None
    is_certain: bool = False
    weight: int = 0

    @property
    def report(self) -> Report:
        """The finding as a message."""
        because = tuple(text for text in self.because if text)
        return Report(error=self.error, at=self.at, because=because, hint=self.hint)


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings in the order in which a person should read them."""
    return sorted(findings, key=lambda f: (_ORDER.index(f.level), not f.is_certain, -f.weight))


def render(finding: Finding, word: str | None = None) -> str:
    """Return a finding in the form of every message, its level (or `word`) first."""
    told = render_report(finding.report)
    return (word or finding.level.value) + told.removeprefix("error")
