"""Where each key of a TOML file stands: `tomllib` gives the values, this gives line and column.

Only for a text that `tomllib` has read: nothing is checked here.
"""

import tomllib
from dataclasses import dataclass, field

from torchmuster.spec.findings import KeyPath

Place = tuple[int, int]
_BLANK = " \t\r\n"
_QUOTES = ('"""', "'''", '"', "'")


def find_places(text: str) -> dict[KeyPath, Place]:
    """Return line and column, from 1, of every key, table header and element of a list."""
    scan = _Scan(text)
    while not scan.at_end():
        scan.statement()
    return {path: scan.line_and_column(at) for path, at in scan.places.items()}


@dataclass(slots=True)
class _Scan:
    """One walk through the text, from left to right."""

    text: str
    at: int = 0
    table: KeyPath = ()
    places: dict[KeyPath, int] = field(default_factory=dict)
    _lengths: dict[KeyPath, int] = field(default_factory=dict)

    def at_end(self) -> bool:
        """Skip what means nothing; say whether nothing is left."""
        self._skip()
        return self.at >= len(self.text)

    def statement(self) -> None:
        """Read one header or one `key = value`."""
        if self.text[self.at] == "[":
            self._header()
        else:
            self._pair(self.table)

    def line_and_column(self, at: int) -> Place:
        """Return where a position is, both from 1."""
        start = self.text.rfind("\n", 0, at) + 1
        return self.text.count("\n", 0, at) + 1, at - start + 1

    def _header(self) -> None:
        start = self.at
        is_list = self.text.startswith("[[", self.at)
        self.at += 2 if is_list else 1
        path: KeyPath = ()
        parts = self._key()
        for left, part in zip(range(len(parts) - 1, -1, -1), parts, strict=True):
            path = (*path, part)
            self._note(path, start)
            if path in self._lengths and (left or not is_list):
                path = (*path, self._lengths[path] - 1)
        if is_list:
            index = self._lengths.get(path, 0)
            self._lengths[path] = index + 1
            path = (*path, index)
        self.table = path
        self._note(path, start)
        self._skip()
        self.at += 2 if is_list else 1

    def _pair(self, above: KeyPath) -> None:
        self._skip()
        start = self.at
        path = above
        for part in self._key():
            path = (*path, part)
            self._note(path, start)
        self._skip()
        self.at += 1  # the `=`
        self._value(path)

    def _key(self) -> list[str]:
        """Return the parts of a dotted key; the position is behind it then."""
        parts: list[str] = []
        while True:
            self._skip()
            start = self.at
            if self.text[self.at] in "\"'":
                self._string()
                parts.append(_text_of(self.text[start : self.at]))
            else:
                while self.at < len(self.text) and self.text[self.at] not in " \t.=]\r\n":
                    self.at += 1
                parts.append(self.text[start : self.at])
            self._skip()
            if self.at >= len(self.text) or self.text[self.at] != ".":
                return parts
            self.at += 1

    def _value(self, path: KeyPath) -> None:
        self._skip()
        first = self.text[self.at]
        if first == "[":
            self._list(path)
        elif first == "{":
            self._map(path)
        elif first in "\"'":
            self._string()
        else:
            while self.at < len(self.text) and self.text[self.at] not in ",]}#\n":
                self.at += 1

    def _list(self, path: KeyPath) -> None:
        self.at += 1
        index = 0
        while self._next("]"):
            self._note((*path, index), self.at)
            self._value((*path, index))
            index += 1
        self.at += 1

    def _map(self, path: KeyPath) -> None:
        self.at += 1
        while self._next("}"):
            self._pair(path)
        self.at += 1

    def _next(self, end: str) -> bool:
        """Skip a comma; say whether another element comes."""
        self._skip()
        if self.text[self.at] == ",":
            self.at += 1
            self._skip()
        return self.text[self.at] != end

    def _string(self) -> None:
        quote = next(mark for mark in _QUOTES if self.text.startswith(mark, self.at))
        self.at += len(quote)
        while not self.text.startswith(quote, self.at):
            escaped = quote[0] == '"' and self.text[self.at] == "\\"
            self.at += 2 if escaped else 1
        self.at += len(quote)
        while len(quote) == 3 and self.text.startswith(
            quote[0], self.at
        ):  # up to two more belong in
            self.at += 1

    def _skip(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.text[self.at] in _BLANK:
                self.at += 1
            else:
                return

    def _note(self, path: KeyPath, at: int) -> None:
        self.places.setdefault(path, at)


def _text_of(quoted: str) -> str:
    return str(tomllib.loads(f"x = {quoted}")["x"])
