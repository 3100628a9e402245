"""A thread that writes files, so that no event loop ever waits for a disk.

A hung file system must not stop heartbeats, and a full one must not stop training: blocks wait in a
bounded queue; those that do not fit or can't be written are dropped, counted and marked in the file.
A disk that works but is slower than its writers makes them wait; one that makes no progress for half a
second does not. If the folder is removed, this is reported, and the folder is not created again.
"""

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster.files import atomic
from torchmuster.plainfile import write_all

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Append `data` to `path`, or replace the file, or close it."""

    path: str
    data: bytes = b""
    replace: bool = False
    is_room: bool = False
    close: bool = False
    mode: int = 0o644
    lost_lines: int = 0
    why: str = ""


@dataclass(slots=True)
class _Root:
    """The folder of all files: created once, accessible to its user only."""

    path: str
    _identity: tuple[int, int] | None = None

    def check(self) -> None:
        """Create it at the first use.

        Raises:
            OSError: It has been removed, or can't be made.
        """
        if self._identity is None:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            found = None
        identity = (found.st_dev, found.st_ino) if found is not None else None
        self._identity = self._identity or identity
        if identity is None or identity != self._identity:
            raise OSError(errno.ENOENT, f"{self.path} has been removed")


@dataclass(slots=True)
class DiskWriter:
    """Appends to files in a thread of its own; the queue is bounded in bytes.

    Attributes:
        on_loss: Called with (lines, why) when output is lost, often in the writer's thread.
        root: The run directory; None: folders are created as needed.
    """

    on_loss: Callable[[int, str], None] | None = None
    root: str | None = None
    _root: _Root | None = None
    _looked_at: float = 0.0
    _queue: deque[_Work] = field(default_factory=deque)
    _targets: dict[str, _Target] = field(default_factory=dict)
    _overflow: dict[str, int] = field(default_factory=dict)
    _waiting_bytes: int = 0
    _progress_at: float = 0.0
    _busy: bool = False
    _room: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        if self.root is not None:
            self.settle_in(self.root)
        self._thread = threading.Thread(target=self._work, name="disk writer", daemon=True)
        self._thread.start()

    def settle_in(self, root: str) -> None:
        """Set the run directory if it was not known at the start."""
        if self._root is None:
            self._root = _Root(os.path.normpath(root))

    @property
    def folder(self) -> str | None:
        """Return the run directory, once it is known."""
        return self._root.path if self._root is not None else None

    @property
    def is_congested(self) -> bool:
        """Return whether the disk works but is slower than its writers, so that a short wait helps."""
        return (
            self._waiting_bytes > _CONGESTED_BYTES
            and time.monotonic() - self._progress_at < _PATIENCE_S
        )

    def append(self, path: str, data: bytes) -> None:
        """Queue bytes to append to a file, which is created even without bytes; never waits."""
        with self._changed:
            if self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
                lines = _num_lines(data)
                self._overflow[path] = self._overflow.get(path, 0) + lines
                if self.on_loss is not None:  # now: a disk that hangs may never come back
                    self.on_loss(lines, _TOO_SLOW)
                return
            self._put_overflow(path)
            self._put(_Work(path=path, data=data))

    def replace(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Queue the whole new content of a small file; never waits."""
        with self._changed:
            self._put(_Work(path=path, data=data, replace=True, mode=mode))

    def keep_room(self, path: str) -> None:
        """Keep a file for a full disk: it makes room for what is written anew, so that the result of a run is not lost."""
        with self._changed:
            self._room = path
            self._put(_Work(path=path, data=bytes(_ROOM_BYTES), is_room=True))

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
            self._put(_Work(path=path, close=True))

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued was tried; return whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def _put_overflow(self, path: str) -> None:
        lines = self._overflow.pop(path, 0)
        if lines:
            self._put(_Work(path=path, lost_lines=lines, why=_TOO_SLOW))

    def _put(self, work: _Work) -> None:
        self._queue.append(work)
        self._waiting_bytes += len(work.data)
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                has_work = self._changed.wait_for(lambda: bool(self._queue), _LOOK_EVERY_S)
                work = self._queue.popleft() if has_work else None
                self._busy = work is not None
            self._look()
            if work is None:
                continue
            self._do(work)
            with self._changed:
                self._waiting_bytes -= len(work.data)
                self._busy = False
                self._progress_at = time.monotonic()
                self._changed.notify_all()

    def _look(self) -> None:
        """Check once a second whether the open files still exist in their folders: writing would not show it."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        for target in list(self._targets.values()):
            try:
                if target.fd is not None and os.fstat(target.fd).st_nlink == 0:
                    self._close(target)  # it is made again, if its folder is there
                    if self._root is not None:
                        self._root.check()
            except OSError as error:
                self._lose(target, 0, error.strerror or str(error))

    def _do(self, work: _Work) -> None:
        if work.is_room:
            with contextlib.suppress(OSError), open(work.path, "wb") as file:
                file.write(work.data)
            return
        if work.replace:
            self._replace(work)
            return
        target = self._targets.setdefault(work.path, _Target(work.path))
        if work.lost_lines:
            target.lost_lines += work.lost_lines
            target.why = work.why
        try:
            if work.data or target.lost_lines or not work.close:
                self._write(target, work.data)
        except OSError as error:
            self._lose(target, _num_lines(work.data), error.strerror or str(error))
        if work.close:
            self._close(target)
            self._targets.pop(work.path, None)

    def _replace(self, work: _Work) -> None:
        try:
            try:
                atomic.replace_file(work.path, work.data, mode=work.mode)
            except OSError as error:
                if error.errno not in _FULL or not self._give_room():
                    raise
                atomic.replace_file(work.path, work.data, mode=work.mode)
        except OSError as error:
            if self.on_loss is not None:
                self.on_loss(0, f"{os.path.basename(work.path)}: {error.strerror}")

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
        root = self._root
        if root is not None and folder.startswith(root.path):
            root.check()
        os.makedirs(folder, exist_ok=True)

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


def _num_lines(data: bytes) -> int:
    return data.count(b"\n") or int(bool(data))
