"""The catalogue: the form of a row, all rows, and an index that compares a line only with messages that share a stem with it.

A row has a message's wordings, its meaning, how much it tells, cause and remedy. All rows stand in the text files of this folder,
a paragraph each (`launcher/files/paragraphs.py`): messages of programs in files by program, shapes of lines that many programs
print in `lines.txt`, causes that rules argue in `rules.txt`, signs beside causes in `signs.txt`. `tables.txt` has tables of names
and words.
"""

import enum
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
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
    or names of `advice.py`; `{words}` is the message itself.

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


# Stems: what a line must contain for a regular expression to match; searched first, for speed. A
# stem is a piece of one word, in lower case and without digits, because the searched lines have all
# digits replaced by zeros.


_LEAST = 4
_PIECE = re.compile(r"[^\W\d_]{4,}")


def stems_of(wording: str) -> frozenset[str]:
    """Return stems of which each line that matches a regular expression has at least one.

    Raises:
        ValueError: The expression may match a line without any piece of four letters.
    """
    found = _stems_of_sequence(parser.parse(wording))
    if not found:
        raise ValueError(
            f"no word of {_LEAST} letters is sure to be in a line that fits: {wording}"
        )
    return found


def _stems_of_sequence(parts: Sequence[Any]) -> frozenset[str]:
    """Return a sequence's best choice: its shortest stem is longest; empty when there is none."""
    best: frozenset[str] = frozenset()
    run: list[str] = []
    for code, value in (*parts, (None, None)):
        if code is codes.LITERAL:
            run.append(chr(value))
            continue
        pieces = _PIECE.findall("".join(run).lower())
        if pieces:
            best = _better(best, frozenset({max(pieces, key=len)}))
        run = []
        if code is not None:
            best = _better(best, _of_part(code, value))
    return best


def _of_part(code: Any, value: Any) -> frozenset[str]:
    if code is codes.SUBPATTERN:
        return _stems_of_sequence(value[3])
    if code is codes.BRANCH:
        choices = [_stems_of_sequence(branch) for branch in value[1]]
        return frozenset().union(*choices) if all(choices) else frozenset()
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT) and value[0] > 0:
        return _stems_of_sequence(value[2])
    return frozenset()


def _better(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    return max((one, other), key=lambda stems: min(map(len, stems), default=0))


def shorten_stems(stems: Iterable[str]) -> set[str]:
    """Return an end of each stem, so that few letters begin them all: this speeds up the search."""
    ends_by_letter: dict[str, dict[str, str]] = {}
    waiting = set(stems)
    for stem in waiting:
        for begin in range(max(0, len(stem) - _LEAST), -1, -1):  # so that the longest end stays
            ends_by_letter.setdefault(stem[begin], {})[stem] = stem[begin:]
    chosen: set[str] = set()
    while waiting:
        _, ends = max(
            ends_by_letter.items(), key=lambda one: (len(waiting & one[1].keys()), one[0])
        )
        chosen |= {ends[stem] for stem in waiting & ends.keys()}
        waiting -= ends.keys()
    return chosen


class StemFinder:
    """Finds all of many stems in a text, also overlapping ones, in one pass."""

    def __init__(self, stems: Iterable[str]) -> None:
        root: dict[str, Any] = {}
        for stem in stems:
            node = root
            for letter in stem:
                node = node.setdefault(letter, {})
            node[""] = {}
        self._regex = re.compile(f"(?=({_longest_of(root)}))")
        known = set(stems)
        self._begins = {
            stem: [stem[:n] for n in range(1, len(stem) + 1) if stem[:n] in known] for stem in known
        }

    def find(self, text: str) -> set[str]:
        """Return the stems that a text in lower case contains."""
        return {stem for longest in self._regex.findall(text) for stem in self._begins[longest]}


def _longest_of(node: Mapping[str, Any]) -> str:
    """Return a regular expression for the longest path through a tree of letters."""
    parts = [re.escape(letter) + _longest_of(below) for letter, below in node.items() if letter]
    if not parts:
        return ""
    joined = parts[0] if len(parts) == 1 and "" not in node else f"(?:{'|'.join(parts)})"
    return f"{joined}?" if "" in node else joined


_OF_NO_PROGRAM = ("lines", "rules", "signs", "tables")
_STEMS = "stems.tsv"
_NEVER_RAISED = (Telling.NOISE, Telling.FACT)
_FOLDER = os.path.dirname(__file__)


def read_messages() -> tuple[Row, ...]:
    """Return the messages of all programs."""
    names = sorted(name[:-4] for name in os.listdir(_FOLDER) if name.endswith(".txt"))
    return tuple(row for name in names if name not in _OF_NO_PROGRAM for row in read_rows(name))


def known_stems() -> dict[str, frozenset[str]]:
    """Return the messages' stems by name, as `scripts/make-reference` saved them: it is faster."""
    with open(os.path.join(_FOLDER, _STEMS), encoding="utf-8") as file:
        lines = (line.rstrip("\n").split("\t") for line in file)
        return {name: frozenset(stems) for name, *stems in lines}


def stems_of_row(row: Row) -> frozenset[str]:
    """Return stems of which each line with a row's message has at least one."""
    return frozenset(stem for wording in row.says for stem in stems_of(wording))


class Catalogue:
    """Messages by name, and by the stems of their wordings.

    Args:
        rows: The messages.
        stems: Known stems by message name; those of other messages are computed.
    """

    def __init__(
        self, rows: Iterable[Row], stems: Mapping[str, frozenset[str]] | None = None
    ) -> None:
        self.by_name: dict[str, Row] = {row.name: row for row in rows}
        self._by_stem: dict[str, list[tuple[int, Row]]] = {}
        known = stems or {}
        for number, row in enumerate(self.by_name.values()):
            for stem in known.get(row.name) or stems_of_row(row):
                self._by_stem.setdefault(stem, []).append((number, row))
        self._in_lines = {
            stem for stem, found in self._by_stem.items() if not all(row.raised for _, row in found)
        }

    @property
    def stems(self) -> Iterable[str]:
        """Return pieces of words in lower case without digits; a line without any is no message."""
        return self._in_lines

    @cached_property
    def _finder(self) -> StemFinder:
        return StemFinder(self._by_stem)

    def find(self, text: str, *, is_raised: bool = False) -> tuple[Row, Mapping[str, str]] | None:
        """Return a line's message that tells most, with its fields; None when there is none.

        Args:
            text: A line, or an exception's type and message.
            is_raised: The text is an exception's: it is neither noise nor a mere fact.
        """
        near = {
            number: row
            for stem in self._finder.find(text.lower())
            for number, row in self._by_stem[stem]
            if (row.tells not in _NEVER_RAISED if is_raised else not row.raised)
        }
        # Messages that tell most come first; among equals, those that come first in their file.
        for _, row in sorted(near.items(), key=lambda one: (-(one[1].tells or 0), one[0])):
            found = row.find(text)
            if found is not None:
                fields = {name: value for name, value in found.groupdict().items() if value}
                return row, fields
        return None


CATALOGUE = Catalogue(read_messages(), known_stems())
RULE_ROWS: Mapping[str, Row] = {row.name: row for row in read_rows("rules")}


def rule_rows(prefix: str) -> tuple[Row, ...]:
    """Return the rows of rules whose names begin with a prefix, in their order."""
    return tuple(row for name, row in RULE_ROWS.items() if name.startswith(prefix))


def signs(prefix: str) -> dict[str, Row]:
    """Return the rows of `signs.txt` whose names begin with a prefix, by the rest of their names."""
    rows = {row.name: row for row in _SIGNS if row.name.startswith(prefix)}
    return {name.removeprefix(prefix): row for name, row in rows.items()}


_SIGNS = read_rows("signs")
TABLES = {table.name: table for table in read_paragraphs(os.path.join(_FOLDER, "tables.txt"))}
CAUSES = TABLES["causes"].table
