"""Read files that may be of another version, half written or made to deceive: line by line, bounded."""

import json
from collections.abc import Iterator
from typing import Any

from torchmuster.core.owner.record import RecordTail
from torchmuster.core.plainfile import open_plain

_DEEP = (ValueError, RecursionError)


class LooseRecord:
    """The lines of a file, each an object; counts what could not be read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._tail = RecordTail(path)

    @property
    def num_bad(self) -> int:
        """Lines that are no objects: torn by a crash, or not ours."""
        return self._tail.num_torn

    @property
    def why_not(self) -> str:
        """Why the file can't be read; empty when it can or is not there."""
        return self._tail.why_not

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._tail.read()[0]


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
