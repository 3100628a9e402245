"""The form of a row: a message's wordings, its meaning, how much it tells, cause and remedy.

All rows stand in the text files of this folder, a paragraph each (`launcher/files/paragraphs.py`): messages of programs in files by
program, shapes of lines that many programs print in `lines.txt`, causes that rules argue in `rules.txt`, signs beside
causes in `signs.txt`. `tables.txt` has tables of names and words.
"""

import enum
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchmuster.diagnose.explain.events import LineRole
from torchmuster.diagnose.finding import Confidence
from torchmuster.launcher.files.paragraphs import Paragraph, read_paragraphs

MESSAGE_PREFIX = "told:"  # before a message's name: the kind of its event


class Telling(enum.IntEnum):
    """How much a message tells about the cause, from nothing to all of it."""

    NOISE = 0  # printed by healthy runs as well; it explains no failure
    ECHO = 1  # what other ranks print when one has gone
    FACT = 2  # a version, a size, an address: for rules that compare
    HINTS = 3  # trouble, but of any cause; less than any exception
    NAMES = 4  # names what went wrong; why may have several answers
    PROVES = 5  # names the cause itself: there is no second reading


class Weight:
    """The order of argued causes, largest first; all in one place, so that they can be compared."""

    SCHEDULER = 100
    START = 90
    PROVED = 85
    SPECIFIC = 80
    LAUNCH = 70
    NETWORK = 65
    PROGRAM = 60
    ABSENCE = 50
    SIGNAL = 40
    COLLECTIVE = 35
    ENVELOPE = 10


# How a rank ended, not why: a line that proves a cause says more.
ENDINGS = frozenset(
    {"exception", "exit-code", "killed", "bus-error", "aborted", "segfault", "signal"}
)
# What the lines themselves report: only what led to it can be in doubt.
OBSERVED = ENDINGS | {"reported", "peer-lost"}


_DEFAULTS_BY_TELLS = {
    Telling.PROVES: (Confidence.HIGH, Weight.SPECIFIC),
    Telling.NAMES: (Confidence.MEDIUM, Weight.PROGRAM + 1),
    Telling.HINTS: (Confidence.LOW, Weight.COLLECTIVE - 2),
}
_ROLES = {
    Telling.NOISE: LineRole.CONTEXT,
    Telling.ECHO: LineRole.ECHO,
    Telling.FACT: LineRole.CONTEXT,
    Telling.HINTS: LineRole.CAUSE,
    Telling.NAMES: LineRole.CAUSE,
    Telling.PROVES: LineRole.CAUSE,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One message, one shape of lines, or one cause that a rule argues.

    In `error`, `at`, `hint` and `confirm`, names in braces are fields of the event that began it,
    or names of `advice/values.py`; `{words}` is the message itself.

    Attributes:
        name: Unique: program, a dot, the message's topic; `nccl.ib-timeout`.
        says: Regular expressions of all releases' wordings; named groups become fields.
        source: Program, releases and file from which a message was taken.
        tells: How much a message tells; None for shapes and rules.
        role: The role of a line with this message in the story of a failure.
        kind: The kind of its event; for a message that rules know already, theirs.
        raised: The meaning holds only for an exception's message, not anywhere in a line.
        cause: A word of the table of causes; empty when the row names no cause.
        error: The sentence for the user.
        hint: What to change: one sentence, one command.
        hint_in: Hints for surroundings that the logs show: container, kubernetes, slurm, ...; or
            `anywhere`. The first whose placeholders are all known replaces `hint`.
        confirm: The one command that would prove it.
        rivals: Causes with the same evidence; shown where it does not decide.
        evidence: Kinds of events, one of which is required; empty if a rule chooses the row.
        words: A regular expression that such an event has to match.
        also_needs: Kinds of events, one of which is required as well.
        unless: Kinds of events that rule the cause out.
        proof: A regular expression that makes the cause certain.
        at: Where it happened, if the event says so itself.
        lines: How many lines are shown as evidence; with one, the first.
    """

    name: str
    cause: str = ""
    error: str = ""
    hint: str = ""
    says: tuple[str, ...] = ()
    source: str = ""
    tells: Telling | None = None
    role: LineRole = LineRole.CONTEXT
    kind: str = ""
    raised: bool = False
    hint_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    confirm: str | None = None
    rivals: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    words: str = ""
    also_needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    proof: str = ""
    because: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()
    at: str = ""
    confidence: Confidence = Confidence.HIGH
    weight: int = Weight.SPECIFIC
    lines: int = 3

    @cached_property
    def regexes(self) -> tuple[re.Pattern[str], ...]:
        """The wordings as patterns, compiled at first use."""
        return tuple(re.compile(wording) for wording in self.says)

    def find(self, text: str) -> re.Match[str] | None:
        """Return where a line matches; None when it does not."""
        for regex in self.regexes:
            if (found := regex.search(text)) is not None:
                return found
        return None


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


def _weight(text: str) -> int:
    """Return the number for `program`, `program + 2` or `program - 1`."""
    name, _, change = text.partition(" ")
    base = getattr(Weight, name.upper(), None)
    if base is None:
        raise ValueError(f"{name} is no weight")
    return int(base) + int(change.replace(" ", "") or 0)


# How the value of a field is read; other fields are text.
_READ: Mapping[str, Callable[[str], Any]] = {
    "tells": lambda text: Telling[text.upper()],
    "role": LineRole,
    "raised": lambda text: text == "yes",
    "rivals": _words,
    "evidence": _words,
    "also_needs": _words,
    "unless": _words,
    "confidence": Confidence,
    "weight": _weight,
    "lines": int,
}
_SEVERAL = ("says", "because", "ruled out")
_IN = "hint in "


def row_of(paragraph: Paragraph) -> Row:
    """Return the row that a paragraph describes.

    Raises:
        ValueError: A field or its value is unknown, or a field has more lines than it may.
    """
    fields: dict[str, Any] = {}
    hint_in: dict[str, tuple[str, ...]] = {}
    try:
        for key, values in paragraph.fields.items():
            if key.startswith(_IN):
                hint_in[key.removeprefix(_IN)] = tuple(values)
            elif key in _SEVERAL:
                fields[key.replace(" ", "_")] = tuple(values)
            else:
                (value,) = values
                fields[key] = _READ[key](value) if key in _READ else value
        tells = fields.get("tells")
        if tells is not None:
            fields = {"kind": f"{MESSAGE_PREFIX}{paragraph.name}", "role": _ROLES[tells], **fields}
            if fields.get("cause"):
                sure, weight = _DEFAULTS_BY_TELLS[tells]
                fields = {"confidence": sure, "weight": weight, **fields}
        return Row(name=paragraph.name, hint_in=hint_in, **fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{paragraph.where}: {paragraph.name}: {error}") from error


def read_rows(name: str, names: Mapping[str, str] | None = None) -> tuple[Row, ...]:
    """Return the rows of a file of this folder, in their order.

    Args:
        name: The file's name without its ending.
        names: Pieces of regular expressions that the file refers to as `<<name>>`.
    """
    path = os.path.join(os.path.dirname(__file__), f"{name}.txt")
    return tuple(row_of(paragraph) for paragraph in read_paragraphs(path, names))
