"""From the bytes of a terminal to the names of keys."""

import re

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
# Source: ECMA-48 5.4: parameters, intermediate bytes, one final byte; `ESC O x` are the cursor keys of application mode.
_SEQUENCE = re.compile(r"\x1b(?:\[|O)([0-?]*[ -/]*[@-~])")


def read_keys(data: bytes) -> list[str]:
    """Return the keys in what a terminal has sent; those that have no name here are left out."""
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
