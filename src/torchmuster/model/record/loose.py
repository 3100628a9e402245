"""Take values from a record that may be of another version, half written or made to deceive: by type, bounded, printable."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torchmuster.model.display.text import printable

MAX_TEXT = 2000


def text(value: object, most: int = MAX_TEXT) -> str:
    """Return a text without control characters, cut; empty where it is none."""
    if not isinstance(value, str):
        return ""
    cut = value if len(value) <= most else f"{value[:most]} ..."
    return printable(cut.encode(errors="replace").decode())


def lines(value: object, most_lines: int = 60) -> tuple[str, ...]:
    """Return the lines of a text, or of a list of texts; of very many the first and the last."""
    parts = value.splitlines() if isinstance(value, str) else listed(value)
    found = [text(part, 500) for part in parts if isinstance(part, str)]
    if len(found) > most_lines:
        half = most_lines // 2
        left = len(found) - 2 * half
        found = [*found[:half], f"... {left} lines ...", *found[-half:]]
    return tuple(found)


def number(value: object) -> float | None:
    """Return a finite number; None where it is none."""
    if type(value) is float:  # nearly all
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: object) -> int | None:
    """Return a whole number that is not negative; None where it is none."""
    if type(value) is int and 0 <= value < 2**53:  # nearly all
        return value
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**53 else None


def listed(value: object) -> list[Any]:
    """Return a list; empty where it is none."""
    return value if isinstance(value, list) else []


def mapped(value: object) -> Mapping[str, Any]:
    """Return an object; empty where it is none."""
    return value if isinstance(value, dict) else {}


def several(count: int, one: str, many: str | None = None) -> str:
    """Return `1 line`, `3 lines`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def ends_of(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Return the least and the most of the known values; None where none is known."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None
