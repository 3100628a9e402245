"""The form, order and rendering of the findings of doctor, explain and lint.

A finding has the four parts of every message (`error / at / because / hint`), a level and a cause
word. Doctor and explain use the same word for the same cause, whether a node's facts or its logs
show it.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.core.model.text import render_report
from torchmuster.core.model.verdict import Report


class Level(enum.Enum):
    """How bad a finding is.

    A failure ends the job or makes it wrong, a warning may do so, a note helps those who search for
    a cause.
    """

    FAILURE = "failure"
    WARNING = "warning"
    NOTE = "note"


class Confidence(enum.Enum):
    """How sure a finding is: HIGH only if the evidence allows no second reading."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


_ORDER = list(Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem or note, with its evidence and a hint.

    Attributes:
        cause: A fixed, documented word for tests and scripts.
        is_certain: The job can't work: its run ends before workers start.
        weight: Orders findings of the same level; the largest comes first.
    """

    level: Level = Level.FAILURE
    cause: str
    error: str
    at: str | None = None
    because: tuple[str, ...] = ()
    hint: str | None = None
    more: tuple[str, ...] = ()
    is_certain: bool = False
    weight: int = 0

    @property
    def report(self) -> Report:
        """The finding in the form of every message."""
        because = tuple(text for text in self.because if text)
        return Report(error=self.error, at=self.at, because=because, hint=self.hint, more=self.more)


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings in the order in which a person should read them."""
    return sorted(findings, key=lambda f: (_ORDER.index(f.level), not f.is_certain, -f.weight))


def render(finding: Finding, word: str | None = None) -> str:
    """Return a finding in the form of every message; it begins with its level or `word`."""
    rendered = render_report(finding.report)
    return (word or finding.level.value) + rendered.removeprefix("error")
