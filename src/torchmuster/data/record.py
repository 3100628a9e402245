"""The finished files of a download, in one file next to its folder: `.NAME.muster.jsonl`.

Each line says that a file is complete, or to which version of a file a `.part` belongs. Lines are only
appended, so a killed download leaves at most one incomplete line, which is ignored.
"""

import contextlib
import fcntl
import json
import os
import threading
from dataclasses import asdict, dataclass
from typing import Any

from torchmuster.data.copying import Stamp
from torchmuster.data.faults import DataError

_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A complete file: its version in the store, and its stamp on the disk."""

    source: str
    tag: str
    sha256: str | None
    stamp: Stamp


class DownloadRecord:
    """The record of a download; only one download at a time works in a folder."""

    def __init__(self, folder: str) -> None:
        parent, base = os.path.split(os.path.realpath(folder))
        self.path = os.path.join(parent, f".{base or 'root'}.muster.jsonl")
        self.finished: dict[str, Finished] = {}
        self.parts: dict[str, tuple[str, str]] = {}
        self.problem: str | None = None
        self._lock = threading.Lock()
        self._fd = -1

    def open(self) -> None:
        """Lock and read the record; without one, `problem` says why.

        Raises:
            DataError: Another download works in this folder.
        """
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self.problem = f"{self.path} can't be written ({error.strerror})"
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            what = "another download writes to this folder"
            raise DataError(what, where=self.path, may_pass=True) from error
        except OSError:  # a file system without locks
            pass
        for line in os.pread(self._fd, _MAX_BYTES, 0).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._take(json.loads(line))

    def _take(self, line: Any) -> None:
        if "part" in line:
            self.parts[str(line["part"])] = (str(line["source"]), str(line["tag"]))
            return
        self.finished[str(line["name"])] = Finished(
            source=str(line["source"]),
            tag=str(line["tag"]),
            sha256=line["sha256"],
            stamp=Stamp(**line["stamp"]),
        )

    def begin(self, name: str, source: str, tag: str) -> None:
        """Note the version to which the `.part` of a file belongs."""
        self.parts[name] = (source, tag)
        self._append({"part": name, "source": source, "tag": tag})

    def finish(self, name: str, done: Finished) -> None:
        """Note that a file is complete."""
        self._append({"name": name, **asdict(done)})

    def _append(self, line: dict[str, Any]) -> None:
        if self._fd < 0:
            return
        data = json.dumps(line).encode() + b"\n"
        with self._lock:
            # A line break first ends a line that a killed download left torn.
            os.write(self._fd, data if os.fstat(self._fd).st_size == 0 else b"\n" + data)

    def close(self) -> None:
        """Unlock and close the record."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
