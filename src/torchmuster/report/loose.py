"""Read files that may be of another version, half written or hostile; with bounds."""

import json
from collections.abc import Iterator
from typing import Any

from torchmuster.core.owner.record import RecordTail
from torchmuster.core.plainfile import open_plain

_DEEP = (ValueError, RecursionError)


class TolerantRecord:
    """The lines of a file, each a JSON object; counts lines that could not be read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._tail = RecordTail(path)

    @property
    def num_bad(self) -> int:
        """The number of lines that are not JSON objects: torn by a crash, or not ours."""
        return self._tail.num_torn

    @property
    def why_not(self) -> str:
        """Why the file can't be read; empty if it can, or does not exist."""
        return self._tail.why_not

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._tail.read()[0]


def object_in(path: str) -> tuple[dict[str, Any], str]:
    """Return the object in a JSON file, or why there is none; both empty if the file is missing."""
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
