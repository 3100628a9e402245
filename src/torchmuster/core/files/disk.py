"""Threads that write files and slow streams, so that no event loop ever waits for a disk.

A hung file system must not stop heartbeats, and a full one must not stop training: blocks wait in a
bounded queue; those that do not fit or can't be written are dropped, counted and marked in the
file. A disk that works but is slower than its writers makes them wait; one that makes no progress
for half a second does not. If the folder is removed, this is reported, and it is not recreated.
"""

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.plainfile import open_own, write_all

# Limit of a run's log files: thousands of attempts of thousands of ranks would fill a disk.


MOST_FILES = 100_000
_LEAST_KEPT = 20


def attempts_kept(world_size: int) -> int:
    """Return how many of the last attempts keep their logs; the first attempt always does."""
    return max(_LEAST_KEPT, MOST_FILES // max(1, world_size))


def too_old(newest: int, world_size: int) -> int | None:
    """Return the attempt whose logs are removed when `newest` starts; None while all are kept."""
    old = newest - attempts_kept(world_size)
    return old if old > 0 else None


def log_limit_notice(world_size: int) -> str:
    """Return the sentence for the first removal of an attempt's logs."""
    return (
        f"from now on the logs of old attempts are removed: a run of {world_size} ranks keeps those of its first"
        f" attempt and of the last {attempts_kept(world_size)}"
    )


def remove_old(run_dir: RunDir, old: int, ranks: Iterable[int]) -> None:
    """Remove the files of these ranks, written by this node, from an attempt."""
    folder = run_dir.attempt_logs(old)
    for rank in ranks:
        nccl = os.path.join(folder, f"nccl-{rank}.log")
        for path in (run_dir.rank_log(old, rank), run_dir.rank_value(old, rank), nccl):
            with contextlib.suppress(OSError):
                os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # succeeds for the last node on a shared disk


MAX_WAITING_BYTES = 32 << 20
_TOO_SLOW = "the disk was too slow"
_CONGESTED_BYTES = 8 << 20
_PATIENCE_S = 0.5
_LOOK_EVERY_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM_BYTES = 128 << 10


@dataclass(slots=True)
class _Target:
    path: str
    fd: int | None = None
    lost_lines: int = 0
    why: str = ""


@dataclass(slots=True)
class DiskWriter:
    """Appends to files in its own thread; the queue is bounded in bytes.

    Attributes:
        on_loss: Called with (lines, why) when output is lost, often from the writer's thread.
        root: The run directory, created once and accessible to its user only; None while it is not
            known: create folders as needed.
    """

    on_loss: Callable[[int, str], None] | None = None
    root: str | None = None
    _root_identity: tuple[int, int] | None = None
    _looked_at: float = 0.0
    _queue: deque[tuple[Callable[[], None], int]] = field(default_factory=deque)  # and its bytes
    _targets: dict[str, _Target] = field(default_factory=dict)
    _overflow: dict[str, int] = field(default_factory=dict)
    _waiting_bytes: int = 0
    _progress_at: float = 0.0
    _busy: bool = False
    _room: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="disk writer", daemon=True).start()

    @property
    def is_congested(self) -> bool:
        """Return whether the disk works but lags behind its writers, so that a short wait helps."""
        return (
            self._waiting_bytes > _CONGESTED_BYTES
            and time.monotonic() - self._progress_at < _PATIENCE_S
        )

    def append(self, path: str, data: bytes) -> None:
        """Queue bytes for a file, which is created even without bytes; never wait."""
        with self._changed:
            if self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
                lines = _num_lines(data)
                self._overflow[path] = self._overflow.get(path, 0) + lines
                if self.on_loss is not None:  # at once: a hung disk may never recover
                    self.on_loss(lines, _TOO_SLOW)
                return
            self._put_overflow(path)
            self._put(partial(self._append, path, data), len(data))

    def replace(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Queue the complete new content of a small file; never wait."""
        with self._changed:
            self._put(partial(self._replace, path, data, mode), len(data))

    def reserve_space(self, path: str) -> None:
        """Reserve disk space in a file; it is freed when a full disk would lose a run's result."""
        with self._changed:
            self._room = path
            self._put(partial(_fill_room, path), _ROOM_BYTES)

    def _give_room(self) -> bool:
        path, self._room = self._room, ""
        with contextlib.suppress(OSError):
            if path:
                os.unlink(path)
                return True
        return False

    def close_file(self, path: str) -> None:
        """Queue the closing of a file."""
        with self._changed:
            self._put_overflow(path)
            self._put(partial(self._finish, path))

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued has been tried; return whether this was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def _put_overflow(self, path: str) -> None:
        if lines := self._overflow.pop(path, 0):
            self._put(partial(self._append, path, b"", lines))

    def _put(self, work: Callable[[], None], num_bytes: int = 0) -> None:
        self._queue.append((work, num_bytes))
        self._waiting_bytes += num_bytes
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                has_work = self._changed.wait_for(lambda: bool(self._queue), _LOOK_EVERY_S)
                work, num_bytes = self._queue.popleft() if has_work else (None, 0)
                self._busy = work is not None
            self._look()
            if work is None:
                continue
            work()
            with self._changed:
                self._waiting_bytes -= num_bytes
                self._busy = False
                self._progress_at = time.monotonic()
                self._changed.notify_all()

    def _look(self) -> None:
        """Check once a second whether the open files still exist: writing would not show it."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        for target in list(self._targets.values()):
            try:
                if target.fd is not None and os.fstat(target.fd).st_nlink == 0:
                    self._close(target)  # it is recreated if its folder exists
                    if self.root is not None:
                        self._check_root(self.root)
            except OSError as error:
                self._lose(target, 0, error.strerror or str(error))

    def _append(self, path: str, data: bytes, lost_lines: int = 0) -> None:
        target = self._targets.setdefault(path, _Target(path))
        if lost_lines:
            target.lost_lines, target.why = target.lost_lines + lost_lines, _TOO_SLOW
        try:
            self._write(target, data)
        except OSError as error:
            self._lose(target, _num_lines(data), error.strerror or str(error))

    def _finish(self, path: str) -> None:
        if path in self._targets:
            if self._targets[path].lost_lines:
                self._append(path, b"")  # marks them
            self._close(self._targets.pop(path))

    def _replace(self, path: str, data: bytes, mode: int) -> None:
        try:
            try:
                atomic.replace_file(path, data, mode=mode)
            except OSError as error:
                if error.errno not in _FULL or not self._give_room():
                    raise
                atomic.replace_file(path, data, mode=mode)
        except OSError as error:
            if self.on_loss is not None:
                self.on_loss(0, f"{os.path.basename(path)}: {error.strerror}")

    def _write(self, target: _Target, data: bytes) -> None:
        if target.fd is None:
            self._make_folder(os.path.dirname(target.path))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            target.fd = os.open(target.path, flags, 0o644)
        if target.lost_lines:
            mark = f"\n[muster: {target.lost_lines} lines are lost here: {target.why}]\n"
            write_all(target.fd, mark.encode())
            target.lost_lines = 0
        write_all(target.fd, data)

    def _make_folder(self, folder: str) -> None:
        if self.root is not None and folder.startswith(self.root):
            self._check_root(self.root)
        os.makedirs(folder, exist_ok=True)

    def _check_root(self, root: str) -> None:
        """Create the run directory on first use; check that it is still the same folder.

        Raises:
            OSError: It has been removed, or can't be made.
        """
        if self._root_identity is None:
            os.makedirs(os.path.dirname(root), mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(root, 0o700)
        identity = None
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(root)
            identity = found.st_dev, found.st_ino
        self._root_identity = self._root_identity or identity
        if identity is None or identity != self._root_identity:
            raise OSError(errno.ENOENT, f"{root} has been removed")

    def _lose(self, target: _Target, lines: int, why: str) -> None:
        target.lost_lines += lines
        target.why = why
        self._close(target)
        if self.on_loss is not None:
            self.on_loss(lines, why)

    def _close(self, target: _Target) -> None:
        if target.fd is not None:
            os.close(target.fd)
            target.fd = None


def _fill_room(path: str) -> None:
    with contextlib.suppress(OSError), open(path, "wb") as file:
        file.write(bytes(_ROOM_BYTES))


def _num_lines(data: bytes) -> int:
    return data.count(b"\n") or int(bool(data))


_MAX_WAITING_BYTES = 1 << 20
_BLOCK_BYTES = 256 << 10
_WRITTEN_S = 0.05
_DISCARD_S = 5.0
SAY_AFTER_S = 5.0


class Backlog:
    """A queue of bytes in a file for a slow reader: `put` never waits, and memory stays small.

    Args:
        path: Returns a name for the file; called when an empty queue gets bytes.
        disk: Writes the file, and marks in it what is lost, as in a log.
    """

    def __init__(self, path: Callable[[], str], disk: DiskWriter) -> None:
        self.is_empty = True
        self.position = 0  # bytes already taken
        self._path, self._disk = path, disk
        self._file = ""
        self._num_files = self._num_puts = 0
        self._lock = threading.Lock()

    def put(self, data: bytes) -> None:
        """Append bytes."""
        with self._lock:
            if self.is_empty:
                # A new name, as the writer may not have closed the last file yet.
                self._file, self.position = f"{self._path()}.{self._num_files}", 0
                self._num_files += 1
                self.is_empty = False
            self._num_puts += 1
            self._disk.append(self._file, data)

    def take(self) -> bytes:
        """Wait for the disk and return the next bytes, if any; call it from a thread."""
        num_puts = self._num_puts
        is_written = self._disk.flush(_WRITTEN_S)
        data = self._read()
        if not data and is_written:
            with self._lock:
                if num_puts == self._num_puts:
                    self._remove()
        return data

    def discard(self) -> None:
        """Drop the rest once the disk has it: a file removed earlier would be created again."""
        self._disk.flush(_DISCARD_S)
        with self._lock:
            if not self.is_empty:
                self._remove()

    def _read(self) -> bytes:
        try:
            with open_own(self._file) as file:
                file.seek(self.position)
                data = file.read(_BLOCK_BYTES)
        except OSError:  # not written yet, or never: the writer reports why
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
    """Writes everything to a file or a pipe in a thread; `put` never waits for a slow reader.

    Attributes:
        lose: Called with (lines, why) for lost output, but not when the reader has gone.
        waits: Called when the end of the output has to wait long for its reader.
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
        """Queue data after everything else."""
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
        """Wait until all is written or the reader has gone; Ctrl-C drops the rest."""
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
