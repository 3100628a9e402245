"""Output on its way to a slow reader: what he has not taken yet waits in a file, so nobody waits for him and memory stays small."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster.files.disk import DiskWriter
from torchmuster.plainfile import open_own, write_all

_MAX_WAITING_BYTES = 1 << 20
_BLOCK_BYTES = 256 << 10
_WRITTEN_S = 0.05
_DISCARD_S = 5.0
SAY_AFTER_S = 5.0


class Backlog:
    """A queue of bytes in a file: putting never waits.

    Args:
        path: Returns the name of the file; asked for when there is something to put.
        disk: Writes it. What it loses is marked in the file, as in a log.
    """

    def __init__(self, path: Callable[[], str], disk: DiskWriter) -> None:
        self.is_empty = True
        self.position = 0  # how much of it has been taken
        self._path, self._disk = path, disk
        self._file = ""
        self._num_files = self._num_puts = 0
        self._lock = threading.Lock()

    def put(self, data: bytes) -> None:
        """Append bytes."""
        with self._lock:
            if self.is_empty:
                # A new name: the writer may still have to close the last one.
                self._file, self.position = f"{self._path()}.{self._num_files}", 0
                self._num_files += 1
                self.is_empty = False
            self._num_puts += 1
            self._disk.append(self._file, data)

    def take(self) -> bytes:
        """Return the next bytes, none if none are there yet or any more; waits for the disk, so a thread calls it."""
        num_puts = self._num_puts
        is_written = self._disk.flush(_WRITTEN_S)
        data = self._read()
        if not data and is_written:
            with self._lock:
                if num_puts == self._num_puts:
                    self._remove()
        return data

    def discard(self) -> None:
        """Forget what was not taken, once the disk has it: a file that is removed before would be made again."""
        self._disk.flush(_DISCARD_S)
        with self._lock:
            if not self.is_empty:
                self._remove()

    def _read(self) -> bytes:
        try:
            with open_own(self._file) as file:
                file.seek(self.position)
                data = file.read(_BLOCK_BYTES)
        except OSError:  # not written yet, or never: its writer says why
            return b""
        self.position += len(data)
        return data

    def _remove(self) -> None:
        self.is_empty = True
        self._disk.close_file(self._file)
        with contextlib.suppress(OSError):
            os.unlink(self._file)


@dataclass(slots=True)
class PatientWriter:
    """Writes everything to a file or a pipe, by a thread: who puts never waits, however slow the reader is.

    Attributes:
        lose: Called with (lines, why) when they could not be written; a reader that has gone wants none.
        waits: Called when the end of the output waits for its reader for long.
    """

    fd: int
    backlog: Backlog
    lose: Callable[[int, str], None]
    waits: Callable[[], None] = lambda: None
    _queue: deque[bytes] = field(default_factory=deque)
    _waiting_bytes: int = 0
    _is_busy: bool = False
    _has_gone: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name=f"output {self.fd}", daemon=True).start()

    def put(self, data: bytes) -> None:
        """Write this behind all else."""
        with self._changed:
            if self._has_gone:
                return
            if self.backlog.is_empty and self._waiting_bytes + len(data) <= _MAX_WAITING_BYTES:
                self._queue.append(data)
                self._waiting_bytes += len(data)
            else:
                self.backlog.put(data)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, or the reader has gone; a Ctrl-C gives up what he has not taken."""
        try:
            if not self._wait(SAY_AFTER_S):
                self.waits()
                self._wait(None)
        except KeyboardInterrupt:
            self._give_up()
            raise

    def _wait(self, within_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(self._is_done, within_s)

    def _is_done(self) -> bool:
        return not self._is_busy and (self._has_gone or not self._has_more)

    @property
    def _has_more(self) -> bool:
        return bool(self._queue) or not self.backlog.is_empty

    def _work(self) -> None:
        while not self._has_gone:
            with self._changed:
                self._changed.wait_for(lambda: self._has_more)
                self._is_busy = True
                data = self._queue.popleft() if self._queue else None
            if data is not None:
                self._write(data)
            else:
                self._write(self.backlog.take())
            with self._changed:
                self._waiting_bytes -= len(data or b"")
                self._is_busy = False
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        try:
            write_all(self.fd, data)
        except BrokenPipeError:
            self._give_up()
        except OSError as error:
            self.lose(data.count(b"\n") or 1, error.strerror or str(error))

    def _give_up(self) -> None:
        with self._changed:
            self._has_gone = True
            self._queue.clear()
        self.backlog.discard()
