"""Paint frames on a terminal; send only changed lines, so that a slow connection is enough.

The colours are those of Okabe and Ito, which people with any colour vision can distinguish, as
close as the terminal can show them; rich detects that and honours NO_COLOR. No information is in
the colour alone.
"""

import re
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.style import Style
from rich.text import Text

from torchmuster.launcher.ui.words import Line

# From the bytes of a terminal to the names of keys.


_NAMES = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "5~": "page-up",
    "6~": "page-down",
    "1~": "home",
    "4~": "end",
    "7~": "home",
    "8~": "end",
}
_CONTROL = {
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x03": "ctrl-c",
    "\x1b": "escape",
}
# Source: ECMA-48 5.4: parameters, intermediate bytes, one final byte; in application mode, cursor
# keys are `ESC O x`.
_SEQUENCE = re.compile(r"\x1b(?:\[|O)([0-?]*[ -/]*[@-~])")


def read_keys(data: bytes) -> list[str]:
    """Return the keys in a terminal's input; leave out sequences that have no name here."""
    text, keys, at = data.decode(errors="ignore"), [], 0
    while at < len(text):
        found = _SEQUENCE.match(text, at)
        if found is not None:
            name = _NAMES.get(found[1])
            keys += [name] if name is not None else []
            at = found.end()
            continue
        key = _CONTROL.get(text[at], text[at])
        keys += [key] if len(key) > 1 or key.isprintable() else []
        at += 1
    return keys


_STYLES = {
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "title": Style(bold=True, underline=True),
    "chosen": Style(reverse=True),
    "warn": Style(color="#E69F00", bold=True),
    "bad": Style(color="#D55E00", bold=True),
    "good": Style(color="#56B4E9", bold=True),
}
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[0m\x1b[?25h\x1b[?1049l"


def as_rich(one: Line, columns: int) -> Text:
    """Return a line as rich text, cut at the edge of the screen."""
    text = Text(no_wrap=True)
    for span in one.spans:
        text.append(span.text, _STYLES.get(span.style))
    text.truncate(columns, overflow="crop")
    return text


class Painter:
    """Paints one terminal.

    Args:
        write: Sends text to the terminal.
        console: The rich console that knows what the terminal can show.
    """

    def __init__(self, write: Callable[[str], None], console: Console | None = None) -> None:
        self._write = write
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._before: list[str] = []
        self._size = (0, 0)

    @property
    def has_unicode(self) -> bool:
        """Return whether the terminal can show more than ASCII."""
        return self._console.encoding.lower().startswith("utf")

    def enter(self) -> None:
        """Switch to the terminal's alternate screen; `leave` restores the normal one."""
        self._write(_ENTER)

    def leave(self) -> None:
        """Switch back to the normal screen."""
        self._write(_LEAVE)

    def paint(self, lines: Sequence[Line], columns: int) -> None:
        """Show these lines, cut at the edge of the screen."""
        if self._size != (columns, len(lines)):
            self._size, self._before = (columns, len(lines)), []
            self._write("\x1b[2J")
        now = [self._as_text(one, columns) for one in lines]
        changed = [
            f"\x1b[{row + 1};1H{text}\x1b[0m\x1b[K"
            for row, text in enumerate(now)
            if row >= len(self._before) or self._before[row] != text
        ]
        self._before = now
        if changed:
            self._write("".join(changed))

    def _as_text(self, one: Line, columns: int) -> str:
        text = as_rich(one, columns)
        text.end = ""
        if not self.has_unicode:
            text.plain = text.plain.encode("ascii", "replace").decode()
        with self._console.capture() as captured:
            self._console.print(text, end="", soft_wrap=True, markup=False)
        return captured.get()
