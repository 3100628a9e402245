"""What a line must contain for a regular expression to find something in it: looked for before the expression, for speed.

A stem is a piece of one word, in lower case and without digits, so that it can be looked for in lines whose digits were
made zeros.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_LEAST = 4
_PIECE = re.compile(r"[^\W\d_]{4,}")


def stems_of(wording: str) -> frozenset[str]:
    """Return stems of which each line that a regular expression fits has at least one.

    Raises:
        ValueError: It may fit a line without any piece of four letters.
    """
    found = _of_sequence(parser.parse(wording))
    if not found:
        raise ValueError(
            f"no word of {_LEAST} letters is sure to be in a line that fits: {wording}"
        )
    return found


def _of_sequence(parts: Sequence[Any]) -> frozenset[str]:
    """Return the best choice of a sequence: the one whose shortest stem is the longest; empty when there is none."""
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
        return _of_sequence(value[3])
    if code is codes.BRANCH:
        choices = [_of_sequence(branch) for branch in value[1]]
        return frozenset().union(*choices) if all(choices) else frozenset()
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT) and value[0] > 0:
        return _of_sequence(value[2])
    return frozenset()


def _better(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    return max((one, other), key=lambda stems: min(map(len, stems), default=0))


def cut_to_few_beginnings(stems: Iterable[str]) -> set[str]:
    """Return an end of each stem, so chosen that few letters begin them all: a search passes over the others at once."""
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
    """Finds all of many stems that a text has, also where they overlap, in one pass."""

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
        """Return the stems that a text in lower case has."""
        return {stem for longest in self._regex.findall(text) for stem in self._begins[longest]}


def _longest_of(node: Mapping[str, Any]) -> str:
    """Return a regular expression for the longest way through a tree of letters."""
    parts = [re.escape(letter) + _longest_of(below) for letter, below in node.items() if letter]
    if not parts:
        return ""
    joined = parts[0] if len(parts) == 1 and "" not in node else f"(?:{'|'.join(parts)})"
    return f"{joined}?" if "" in node else joined
