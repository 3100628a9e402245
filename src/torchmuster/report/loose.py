"""Take values from a record that may be of another version, half written or made to deceive: by type, bounded, printable."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchmuster.model.display.text import printable
from torchmuster.plainfile import open_plain

MAX_TEXT = 2000
_MAX_LINE_BYTES = 8 << 20  # a line of samples of 4,096 ranks has about 0.5 MB
_DEEP = (ValueError, RecursionError)


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
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**53 else None


def listed(value: object) -> list[Any]:
    """Return a list; empty where it is none."""
    return value if isinstance(value, list) else []


def mapped(value: object) -> Mapping[str, Any]:
    """Return an object; empty where it is none."""
    return value if isinstance(value, dict) else {}


class LooseRecord:
    """The lines of a file, each an object; counts what could not be read.

    Attributes:
        num_bad: Lines that are no objects: torn by a crash, or not ours.
        why_not: Why the file can't be read; empty when it can or is not there.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.num_bad = 0
        self.why_not = ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with open_plain(self.path) as file:
                while line := file.readline(_MAX_LINE_BYTES):
                    event = _object(line)
                    if event is None:
                        self.num_bad += bool(line.strip())
                    else:
                        yield event
        except FileNotFoundError:
            return
        except OSError as error:
            self.why_not = error.strerror or str(error)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except _DEEP:
        return None
    return found if isinstance(found, dict) else None


def object_in(path: str) -> tuple[dict[str, Any], str]:
    """Return the object in a file of JSON, and why there is none; both empty where the file is missing."""
    try:
        with open_plain(path) as file:
            found = json.loads(file.read(64 << 20))
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, error.strerror or str(error)
    except _DEEP:
        return {}, "it is not complete JSON"
    return (found, "") if isinstance(found, dict) else ({}, "it is no object")


def several(count: int, one: str, many: str | None = None) -> str:
    """Return `1 line`, `3 lines`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def ends_of(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Return the least and the most of the known values; None where none is known."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None
