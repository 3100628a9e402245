"""Pieces that have come and are still wanted: to be unpacked, or by the next host. They lie in files without names, so nothing is left behind."""

import os
import tempfile
import threading
from typing import BinaryIO

_SEGMENT = 64


class Spool:
    """Numbered pieces, from the first that is still wanted on.

    A file holds so many of them and is given up as a whole, mostly before the disk has got to write it.

    Args:
        folder: Where the files are made.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._segments: dict[int, BinaryIO] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def put(self, index: int, data: bytes | memoryview) -> None:
        """Keep the next piece.

        Raises:
            OSError: The disk is full.
        """
        number = index // _SEGMENT
        with self._lock:
            file = self._segments.get(number)
            if file is None:
                file = self._segments[number] = tempfile.TemporaryFile(  # noqa: SIM115
                    dir=self._folder, buffering=0
                )
            offset = sum(self._places.get(index - 1, (0, 0))) if index % _SEGMENT else 0
        rest, at = memoryview(data), offset
        while rest:
            written = os.pwrite(file.fileno(), rest, at)
            rest, at = rest[written:], at + written
        with self._lock:
            self._places[index] = (offset, len(data))

    def get(self, index: int) -> bytes | None:
        """Return a piece; None for one that is gone, or has not come."""
        with self._lock:
            place, file = self._places.get(index), self._segments.get(index // _SEGMENT)
            if place is None or file is None:
                return None
            return os.pread(file.fileno(), place[1], place[0])

    def forget(self, before: int) -> None:
        """Give up the pieces before one, as far as whole files go."""
        with self._lock:
            for number in [n for n in self._segments if (n + 1) * _SEGMENT <= before]:
                self._segments.pop(number).close()
                for index in range(number * _SEGMENT, (number + 1) * _SEGMENT):
                    self._places.pop(index, None)

    def close(self) -> None:
        """Give up all."""
        with self._lock:
            for file in self._segments.values():
                file.close()
            self._segments.clear()
            self._places.clear()
