"""The form, order, texts and rendering of the findings of doctor, explain and lint.

A finding has the four parts of every message (`error / at / because / hint`), a level and a cause
word. Doctor and explain use the same word for the same cause, whether a node's facts or its logs
show it. The texts of doctor and lint are data: `doctor/checks.txt`, `lint/rules.txt`.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core.model.text import render_report
from torchmuster.core.model.verdict import Report
from torchmuster.launcher.files.paragraphs import Paragraph, read_paragraphs


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
MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem or note, with its evidence and a hint.

    Attributes:
        cause: A fixed, documented word for tests and scripts.
        is_certain: The job can't work: its run ends before workers start.
        weight: Orders findings of the same level; the largest comes first.
        line: The line of a job script, from 1; 0 for other findings.
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
    line: int = 0

    @property
    def word(self) -> str:
        """The name of its level in lint: a line that breaks the job is an error."""
        return "error" if self.level is Level.FAILURE else self.level.value

    @property
    def report(self) -> Report:
        """The finding in the form of every message."""
        because = tuple(text for text in self.because if text)
        return Report(error=self.error, at=self.at, because=because, hint=self.hint, more=self.more)


def has(names: Sequence[str]) -> str:
    """Return `has` or `have`."""
    return "has" if len(names) == 1 else "have"


def names_of(names: Sequence[str]) -> str:
    """Return `n1`, `n1 and n2`, or `n1, n2, n3 and 5 others`."""
    if len(names) > MAX_NAMED:
        return f"{', '.join(names[: MAX_NAMED - 1])} and {len(names) - MAX_NAMED + 1} others"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckText:
    """What a check of doctor or a rule of lint says: a paragraph of `checks.txt` or `rules.txt`.

    `error`, `because` and `hint` may contain the names of values, and in doctor's `{nodes}` and
    `{has}` (has or have).

    Attributes:
        of: The part of the facts that a check examines; empty for what a function says.
        what: The name of a value that should be equal, as in `n3 has torch 2.6.0`; may be empty.
    """

    of: str = ""
    cause: str = ""
    level: Level = Level.NOTE
    error: str
    because: tuple[str, ...] = ()
    hint: str | None = None
    weight: int = 0
    is_certain: bool = False
    what: str = ""

    def finding(
        self,
        nodes: Sequence[str] = (),
        *,
        level: Level | None = None,
        at: str | None = None,
        line: int = 0,
        **words: object,
    ) -> Finding:
        """Return the finding.

        Args:
            nodes: Those that have the problem.
            level: How bad it is, if that depends on something.
            at: The place, if it is not just the nodes.
            line: The line of a job script.
            **words: Values by name.
        """
        names = {"nodes": names_of(nodes), "has": has(nodes), **words}
        return Finding(
            level=level or self.level,
            cause=self.cause,
            error=self.error.format_map(names),
            at=at or names_of(nodes) or None,
            because=tuple(line for text in self.because for line in _lines_of(text, names)),
            hint=self.hint.format_map(names) if self.hint is not None else None,
            is_certain=self.is_certain,
            weight=self.weight,
            line=line,
        )


def _lines_of(text: str, names: Mapping[str, object]) -> list[str]:
    """Return the lines of one text of evidence; a list in a placeholder gives a line per entry."""
    listed = names.get(text.strip("{}"))
    return listed if isinstance(listed, list) else [text.format_map(names)]


# How the values are read that are no text.
_READ: dict[str, Callable[[str], Any]] = {
    "level": Level,
    "weight": int,
    "is_certain": {"yes": True}.__getitem__,
}


def _text_of(paragraph: Paragraph) -> CheckText:
    fields: dict[str, Any] = {"cause": paragraph.name}
    try:
        for key, values in paragraph.fields.items():
            name = "is_certain" if key == "certain" else key
            if name == "because":
                fields[name] = tuple(values)
            else:
                (value,) = values
                fields[name] = _READ.get(name, str)(value)
        return CheckText(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{paragraph.where}: {paragraph.name}: {error}") from error


def read_texts(path: str) -> Mapping[str, CheckText]:
    """Return the texts of a file by name; the cause is the name unless it is given.

    Raises:
        ValueError: A field or its value is unknown, the error is missing, or a field but `because`
            has several lines.
    """
    return {paragraph.name: _text_of(paragraph) for paragraph in read_paragraphs(path)}


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings in the order in which a person should read them."""
    return sorted(findings, key=lambda f: (_ORDER.index(f.level), not f.is_certain, -f.weight))


def render(finding: Finding, word: str | None = None) -> str:
    """Return a finding in the form of every message; it begins with its level or `word`."""
    rendered = render_report(finding.report)
    return (word or finding.level.value) + rendered.removeprefix("error")
