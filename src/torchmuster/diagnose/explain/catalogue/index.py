"""What explain knows, found by the words that it has: a line is held only against messages that share a word with it."""

import os
from collections.abc import Iterable, Mapping
from functools import cached_property

from torchmuster.diagnose.explain.catalogue.entry import Row, Tells, read_rows
from torchmuster.diagnose.explain.catalogue.stems import StemFinder, stems_of

_OF_NO_PROGRAM = ("lines", "rules")
_STEMS = "stems.tsv"
_NEVER_RAISED = (Tells.NOISE, Tells.FACT)
_FOLDER = os.path.dirname(__file__)


def read_messages() -> tuple[Row, ...]:
    """Return the messages of all programs."""
    names = sorted(name[:-4] for name in os.listdir(_FOLDER) if name.endswith(".txt"))
    return tuple(row for name in names if name not in _OF_NO_PROGRAM for row in read_rows(name))


def known_stems() -> dict[str, frozenset[str]]:
    """Return the stems of messages by name, as `scripts/make-reference` has written them: to work them out takes longer."""
    with open(os.path.join(_FOLDER, _STEMS), encoding="utf-8") as file:
        lines = (line.rstrip("\n").split("\t") for line in file)
        return {name: frozenset(stems) for name, *stems in lines}


def stems_of_row(row: Row) -> frozenset[str]:
    """Return stems of which each line that says a message has at least one."""
    return frozenset(stem for wording in row.says for stem in stems_of(wording))


class Catalogue:
    """Messages by name, and by the stems of their wordings.

    Args:
        rows: The messages.
        stems: Of some of them, by name; those of the others are worked out.
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
        """Return pieces of words, in lower case and without digits: a line without any of them is no message."""
        return self._in_lines

    @cached_property
    def _finder(self) -> StemFinder:
        return StemFinder(self._by_stem)

    def find(self, text: str, *, is_raised: bool = False) -> tuple[Row, Mapping[str, str]] | None:
        """Return the message that a line says, the one that tells most if it says several; None when it says none.

        Args:
            text: A line, or what an exception says with its type.
            is_raised: It is an exception's: then it is neither noise nor a mere fact.
        """
        near = {
            number: row
            for stem in self._finder.find(text.lower())
            for number, row in self._by_stem[stem]
            if (row.tells not in _NEVER_RAISED if is_raised else not row.raised)
        }
        # What tells most comes first; of the same kind, what stands first in its file.
        for _, row in sorted(near.items(), key=lambda one: (-(one[1].tells or 0), one[0])):
            found = row.find(text)
            if found is not None:
                fields = {name: value for name, value in found.groupdict().items() if value}
                return row, fields
        return None


CATALOGUE = Catalogue(read_messages(), known_stems())
RULE_ROWS: Mapping[str, Row] = {row.name: row for row in read_rows("rules")}


def rule_rows(prefix: str) -> tuple[Row, ...]:
    """Return the rows of rules whose names begin so, in their order."""
    return tuple(row for name, row in RULE_ROWS.items() if name.startswith(prefix))
