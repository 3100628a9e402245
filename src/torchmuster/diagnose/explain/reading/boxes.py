"""Tracebacks and messages in boxes, as rich draws them: read as if Python had written them.

Source: rich 13 to 15, `traceback.py` and `panel.py`: a title, one line `FILE:LINE in FUNCTION` for each frame, its code with numbers.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from torchmuster.diagnose.explain.events import LogLine
from torchmuster.diagnose.explain.reading.levels import level_named

_TITLE = re.compile(r"^(?P<left> *)[╭┌][─━]+ (?P<title>.+?) [─━]+[╮┐]?")
_BOTTOM = re.compile(r"^ *[╰└][─━]*[╯┘]?$")
_SIDE = re.compile(r"^(?P<left> *)[│┃] ?(?P<text>.*?)\s*[│┃]?$")
_FRAME = re.compile(r"^(?P<file>[^\s:]\S*):(?P<line>\d+)(?: in ?(?P<function>\S.*)?)?$")
_CODE = re.compile(r"^(?:(?P<mark>❱) +|  +)\d+ (?:[│ ] ?)?(?P<code>.*)$")
# A row of rich's logging: level, text, place; what had no room stands below, moved as far to the right.
_ROW = re.compile(
    r"^ *(?P<level>WARNING|ERROR|CRITICAL) +(?P<text>\S.*?) {2,}\S+\.py:\d+$|^ *(?P<level2>WARNING|ERROR|CRITICAL) +(?P<text2>\S.*?) \S+\.py:\d+$"
)
_BELOW = re.compile(r"^ {20,}(?P<text>\S.*)$")
_MAX_ROWS = 40
_EDGES = ("╭", "╰", "│", "┌", "└")
_IS_TRACEBACK = "Traceback (most recent call last)"


def is_drawn(text: str) -> bool:
    """Say whether a line may be part of a box."""
    return "─" in text or "│" in text or "┃" in text


def undrawn(text: str) -> str:
    """Return a line without its box; the title of a traceback keeps its width, at which its message will be wrapped."""
    title = _TITLE.match(text)
    if title is not None:
        plain = f"{title['left']}{title['title']}"
        return f"{plain}:".ljust(len(text)) if title["title"] == _IS_TRACEBACK else plain
    if _BOTTOM.match(text):
        return ""
    side = _SIDE.match(text)
    if side is None:
        return text
    left, inner = side["left"], side["text"].rstrip("│┃ ")
    frame = _FRAME.match(inner)
    if frame is not None:
        return (
            f'{left}  File "{frame["file"]}", line {frame["line"]}, in {frame["function"] or "?"}'
        )
    code = _CODE.match(inner)
    if code is not None:
        return f"{left}    {code['code'].strip()}" if code["mark"] else ""
    is_nested = inner.lstrip().startswith(_EDGES)  # the values of variables
    return f"{left}{inner}" if inner and not is_nested else ""


class RowReader:
    """Puts the rows of rich's logging together again: of an error the words that matter often stand in a later row."""

    def __init__(self) -> None:
        self._line: LogLine | None = None
        self._parts: list[str] = []

    @property
    def is_open(self) -> bool:
        """Say whether rows are waited for."""
        return self._line is not None

    def begins(self, line: LogLine) -> bool:
        """Say whether a line is the first row of a warning or an error."""
        row = _ROW.match(line.text)
        if row is None:
            return False
        level = level_named(row["level"] or row["level2"])
        self._line, self._parts = replace(line, level=level), [row["text"] or row["text2"]]
        return True

    def takes(self, line: LogLine) -> bool:
        """Say whether a line is a further row; a traceback is none."""
        row = _BELOW.match(line.text)
        if row is None or _ROW.match(line.text) or "Traceback (most" in line.text:
            return False
        self._parts.append(row["text"].strip())
        return len(self._parts) < _MAX_ROWS

    def close(self) -> Iterator[LogLine]:
        """Yield the message in one line, if there is one."""
        if self._line is not None:
            width = max(map(len, self._parts))
            text = "".join(
                part if " " not in part and len(part) == width else f"{part} "
                for part in self._parts
            )
            line, self._line = self._line, None
            yield replace(line, text=text.strip())
