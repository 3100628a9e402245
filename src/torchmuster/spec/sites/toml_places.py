"""The position of each key of a TOML file: `tomllib` gives the values, this gives line and column.

Only for a text that `tomllib` has parsed: nothing is checked here. tomlkit keeps the text of a file, but no positions.
"""

import bisect
import re
import tomllib
from dataclasses import dataclass, field

from torchmuster.spec.problems import KeyPath

Place = tuple[int, int]
_STRING = r'"""(?:\\.|[^\\])*?"{3,5}' + r"|'''.*?'{3,5}" + r'|"(?:\\.|[^"\\])*"' + r"|'[^']*'"
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_PART_OF_KEY = re.compile(rf"{_STRING}|[^ \t.=\]\r\n]+", re.DOTALL)
_SCALAR = re.compile(rf"{_STRING}|[^,\]}}#\n]+", re.DOTALL)
_BRACKETS = re.compile(r"\[\[?|\]\]?")
_MARK = re.compile(r"[][{}.=,]")


def find_places(text: str) -> dict[KeyPath, Place]:
    """Return line and column, from 1, of every key, table header and element of a list."""
    scan = _Scan(text)
    scan.read()
    lines = [0, *(found.end() for found in re.finditer("\n", text))]
    numbers = {path: bisect.bisect_right(lines, at) for path, at in scan.places.items()}
    return {path: (line, scan.places[path] - lines[line - 1] + 1) for path, line in numbers.items()}


@dataclass(slots=True)
class _Scan:
    """One walk through the text, from left to right."""

    text: str
    at: int = 0
    table: KeyPath = ()
    places: dict[KeyPath, int] = field(default_factory=dict)
    _lengths: dict[KeyPath, int] = field(default_factory=dict)

    def read(self) -> None:
        """Read headers and pairs to the end of the text."""
        self._take(_BLANK)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                self._header()
            else:
                self._pair(self.table)

    def _take(self, pattern: re.Pattern[str]) -> str:
        """Return the match at the current position and move past it and the blanks that follow."""
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(f"tomllib has read it: {self.text[self.at : self.at + 20]!r}")
        after = _BLANK.match(self.text, found.end())
        self.at = after.end() if after is not None else found.end()
        return found[0]

    def _header(self) -> None:
        start = self.at
        is_list = self._take(_BRACKETS) == "[["
        path: KeyPath = ()
        parts = self._key()
        for left, part in zip(range(len(parts) - 1, -1, -1), parts, strict=True):
            path = (*path, part)
            self.places.setdefault(path, start)
            if path in self._lengths and (left or not is_list):
                path = (*path, self._lengths[path] - 1)
        if is_list:
            index = self._lengths.get(path, 0)
            self._lengths[path] = index + 1
            path = (*path, index)
        self.table = path
        self.places.setdefault(path, start)
        self._take(_BRACKETS)

    def _pair(self, above: KeyPath) -> None:
        start, path = self.at, above
        for part in self._key():
            path = (*path, part)
            self.places.setdefault(path, start)
        self._take(_MARK)  # the `=`
        self._value(path)

    def _key(self) -> list[str]:
        """Return the parts of a dotted key and move past it."""
        parts: list[str] = []
        while not parts or self.text.startswith(".", self.at):
            if parts:
                self._take(_MARK)
            part = self._take(_PART_OF_KEY)
            parts.append(tomllib.loads(f"x = {part}")["x"] if part[0] in "\"'" else part)
        return parts

    def _value(self, path: KeyPath) -> None:
        first = self.text[self.at]
        if first not in "[{":
            self._take(_SCALAR)
            return
        self._take(_MARK)
        index = 0
        while self.text[self.at] not in "]}":
            if first == "[":
                self.places.setdefault((*path, index), self.at)
                self._value((*path, index))
                index += 1
            else:
                self._pair(path)
            if self.text[self.at] == ",":
                self._take(_MARK)
        self._take(_MARK)
