"""Read files that may be of another version, half written or made to deceive: line by line, bounded."""

import json
from collections.abc import Iterator
from typing import Any

from torchmuster.plainfile import open_plain

_MAX_LINE_BYTES = 8 << 20  # a line of samples of 4,096 ranks has about 0.5 MB
_DEEP = (ValueError, RecursionError)


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
