"""Copy growing files to another machine: send appended data piece by piece to a copy's keeper.

The keeper of the copy speaks first: which folder the copy is of, and how much it has of each file
(`CopyHas`). The source names its folder (`CopyOf`), sends what is missing (`FilePiece`), and then
that this is all (`CopyEnd`). Once everything is in place, the keeper answers `CopyHeld`. So an
interrupted copy continues where it was, and the source removes nothing that has not arrived.

A piece truncates the copy's file at the piece's beginning before it is written. A file that was
truncated, or replaced by another, begins again at 0.
"""

import contextlib
import errno
import fnmatch
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torchmuster.launcher.net.relay import SendsMessages
from torchmuster.launcher.net.remote_messages import (
    CHUNK_BYTES,
    MAX_DEPTH,
    CopyHas,
    FilePiece,
    FrameError,
)

EVERY_S = 0.3
MAX_SMALL_BYTES = 1 << 20
MAX_FILE_BYTES = 64 << 30
_BUSY_SHARE = 0.1  # at most this share of the time goes into scanning
_MOST_PAUSE_S = 5.0
_MAX_FILES = 1 << 18
_MESSAGE_BYTES = 1 << 20
_NAME_BYTES = 64  # of a file in a message besides its name
# Errors of one path that a retry does not fix.
_OF_PATH = (
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM),
    *(errno.EINVAL, errno.EISDIR, errno.ENXIO),
)
_HEAD_BYTES, _TAIL_BYTES = 512, 4096
_READS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITES = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class CopyScope:
    """The files of a folder that are copied, as patterns of relative paths.

    `*` matches within a name; a last `**` matches all files below.

    Attributes:
        grows: Files that are appended to, copied as they grow.
        settles: Files that are written once, copied at the end; those matched by a wildcard only if
            they are small.
        never: First names of paths that each side has for itself.
    """

    grows: tuple[str, ...]
    settles: tuple[str, ...] = ()
    never: frozenset[str] = frozenset()

    def has(self, path: str) -> bool:
        """Return whether a file may be copied."""
        parts = path.split("/")
        return self._may(path) and any(
            _matches(parts, pattern.split("/")) for pattern in (*self.grows, *self.settles)
        )

    def files(
        self, root: str, *, is_over: bool = False, unread: dict[str, str] | None = None
    ) -> Iterator[str]:
        """Yield the paths of the existing files: those that grow and, with `is_over`, the others.

        Add to `unread` the folders that can't be read, and why.
        """
        found, why_not = set(), unread if unread is not None else {}
        for pattern in (*self.grows, *(self.settles if is_over else ())):
            is_small = pattern in self.settles and _is_pattern(pattern)
            for path in _below(root, "", pattern.split("/"), why_not):
                if (
                    self._may(path)
                    and path not in found
                    and (not is_small or _size_of(root, path) <= MAX_SMALL_BYTES)
                ):
                    found.add(path)
                    yield path

    def _may(self, path: str) -> bool:
        return path.partition("/")[0] not in self.never and ".tmp" not in path


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if pattern[-1] == "**":
        pattern = [*pattern[:-1], *["*"] * max(1, len(parts) - len(pattern) + 1)]
    return len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern))


def _is_pattern(word: str) -> bool:
    return any(sign in word for sign in "*?[")


def _below(root: str, prefix: str, pattern: Sequence[str], unread: dict[str, str]) -> Iterator[str]:
    """Yield the paths of the matching files below a folder; follow no links."""
    first, rest = pattern[0], pattern[1:]
    if not _is_pattern(first):
        path = f"{prefix}{first}"
        if rest:
            yield from _below(root, f"{path}/", rest, unread)
        elif os.path.lexists(os.path.join(root, path)):
            yield path
        return
    if prefix.count("/") >= MAX_DEPTH:
        unread[prefix[:80]] = "too many folders in each other"
        return
    try:
        with os.scandir(os.path.join(root, prefix)) as entries:
            found = [entry for entry in entries if fnmatch.fnmatchcase(entry.name, first)]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        unread[prefix] = error.strerror or str(error)
        return
    for entry in found:
        path = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            if first == "**" or rest:
                yield from _below(root, f"{path}/", rest or pattern, unread)
        elif not rest and entry.is_file(follow_symlinks=False):
            yield path


def _size_of(root: str, path: str) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(os.path.join(root, path)).st_size
    return 0


def _check(head: bytes, tail: bytes) -> int:
    return zlib.crc32(tail, zlib.crc32(head))


def _ends(fd: int, size: int, base: int = 0) -> tuple[bytes, bytes]:
    """Return the first and the last bytes of a file's `size` bytes from `base` on."""
    tail_bytes = min(size, _TAIL_BYTES)
    head = os.pread(fd, min(size, _HEAD_BYTES), base)
    return head, os.pread(fd, tail_bytes, base + size - tail_bytes)


@dataclass(slots=True)
class CopyState:
    """The other side's copy: its mark, and each file's size and the checksum over its ends."""

    mark: str = ""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    is_whole: bool = True

    def take(self, message: CopyHas) -> bool:
        """Record a message of the other side; return whether it was the last one.

        Raises:
            FrameError: The copy has more files than any record, or one of an impossible size.
        """
        if self.is_whole:
            self.files.clear()
        self.mark, self.is_whole = message.mark, not message.more
        self.files.update(message.files)
        are_sizes = all(0 <= size <= 1 << 50 for size, _ in message.files.values())
        if len(self.files) > _MAX_FILES or not are_sizes:
            raise FrameError("the other side has too many files, or one of an impossible size")
        return self.is_whole


class DiskTimer:
    """Measures how long the current disk operation takes, to detect a disk that hangs."""

    def __init__(self) -> None:
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    @property
    def elapsed_s(self) -> float:
        """Return how long the operation has taken so far, in seconds; 0 while there is none."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


@dataclass(slots=True)
class _Sent:
    """How much of a file has been sent, and its inode, size and modification time then."""

    size: int
    check: int
    stamp: tuple[int, int, int] = (0, 0, 0)


class Feed:
    """Sends the new contents of a folder.

    Args:
        root: The folder.
        scope: Which of its files are copied.
        session: Carries the pieces.
        known: What the other side has.

    Attributes:
        unread: Why files could not be read, by path.
        busy: How long the feed has waited for the disk, or for the other side.
    """

    def __init__(
        self, root: str, scope: CopyScope, session: SendsMessages, known: CopyState | None = None
    ) -> None:
        self.unread: dict[str, str] = {}
        self.busy = DiskTimer()
        self._root, self._scope, self._session = root, scope, session
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._sent: dict[str, _Sent] = {}
        self._known = known

    def go_back(self, known: CopyState) -> None:
        """Continue, with the next scan, from what the other side has."""
        self._known = CopyState(known.mark, dict(known.files))

    def start(self) -> None:
        """Scan the folder repeatedly, in a thread."""
        threading.Thread(target=self._work, name="feed", daemon=True).start()

    def _work(self) -> None:
        pause_s = EVERY_S
        while not self._stopping.wait(pause_s):
            begun = time.monotonic()
            self.look()
            pause_s = min(max(EVERY_S, (time.monotonic() - begun) / _BUSY_SHARE), _MOST_PAUSE_S)

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()

    def look(self, *, is_over: bool = False) -> None:
        """Scan the folder once; send what is new and, with `is_over`, the files that settle."""
        with self._lock, self.busy:
            if (known := self._known) is not None:
                self._known = None
                self._sent = {name: _Sent(*held) for name, held in known.files.items()}
            unread: dict[str, str] = {}
            for path in self._scope.files(self._root, is_over=is_over, unread=unread):
                try:
                    self._send(path)
                except FileNotFoundError:
                    pass  # the file was removed meanwhile; its copy stays
                except OSError as error:
                    unread[path] = error.strerror or str(error)
                except ValueError as error:  # a name that can't be sent
                    unread[path] = str(error)
            self.unread = unread

    def _send(self, path: str) -> None:
        before, where = self._sent.get(path), os.path.join(self._root, path)
        if before is not None and before.stamp == _stamp(os.lstat(where)):
            return
        fd = os.open(where, _READS)
        try:
            stamp = _stamp(os.fstat(fd))
            offset, head, tail = 0, b"", b""
            is_same = before is not None and before.stamp[0] in (0, stamp[0])
            if before is not None and is_same and stamp[1] >= before.size:
                ends = _ends(fd, before.size)
                if _check(*ends) == before.check:
                    offset, (head, tail) = before.size, ends
            is_new = offset == 0
            while True:
                data = os.pread(fd, CHUNK_BYTES, offset)
                if not data and not is_new:
                    break
                if not self._session.send(
                    FilePiece(path=path, offset=offset, data=data), bulk=True
                ):
                    return
                offset, is_new = offset + len(data), False
                head = (head + data[: _HEAD_BYTES - len(head)]) if len(head) < _HEAD_BYTES else head
                tail = (tail + data)[-_TAIL_BYTES:]
                if not data:
                    break
        finally:
            os.close(fd)
        self._sent[path] = _Sent(offset, _check(head, tail), stamp)

    def unread_report(self) -> tuple[str, ...]:
        """Return up to 20 of the files that can't be read, each with the reason."""
        return tuple(f"{path}: {why}" for path, why in sorted(self.unread.items())[:20])


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def send_file(
    session: SendsMessages, where: str, path: str, note: Callable[[int], None] | None = None
) -> None:
    """Send one whole file.

    Args:
        session: Carries the pieces.
        where: Its path here.
        path: Its path at the other side.
        note: Called after each piece with the bytes sent so far.
    """
    offset = 0
    with open(where, "rb") as file:
        while data := file.read(CHUNK_BYTES):
            if not session.send(FilePiece(path=path, offset=offset, data=data), bulk=True):
                return
            offset += len(data)
            if note is not None:
                note(offset)


class Copy:
    """Writes the pieces of a feed.

    Args:
        root: The folder here.
        scope: The files that are accepted; others are refused.
        mark: Mark of the folder from which all files of the scope here were copied; None: only
            files that came through this object count.
        mode: Mode of new files.
        most_bytes: Largest size of a file; larger ones are left out.

    Attributes:
        bases: Offset in our file at which the other side's file begins, in bytes.
        is_whole: Whether all pieces were written since the feed began or went back.
        trouble: Why a piece could not be written.
        left_out: Why files can't be stored here at all, by path.
        busy: How long it has waited for the disk.
    """

    def __init__(
        self,
        root: str,
        scope: CopyScope,
        mark: str | None = None,
        *,
        mode: int = 0o644,
        most_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self.root, self.scope = root, scope
        self._most_bytes = most_bytes
        self.bases: dict[str, int] = {}
        self.trouble: OSError | None = None
        self.is_whole = True
        self.left_out: dict[str, str] = {}
        self.busy = DiskTimer()
        self._mode, self._has_all = mode, mark is not None
        self.mark = mark or ""
        self._sizes: dict[str, int] = {}  # of the other side's files, as received so far

    def has(self) -> Iterator[CopyHas]:
        """Yield the state of the copy, to start the other side's feed or to make it go back."""
        with self.busy:
            self.trouble, self.is_whole = None, True
            if self._has_all:
                for path in self.scope.files(self.root):
                    self._sizes.setdefault(path, self._size_of(path))
            found = {name: self._held(name) for name in sorted(self._sizes)}
        held = {name: state for name, state in found.items() if state is not None}
        self._sizes = {name: size for name, (size, _) in held.items()}
        part: dict[str, tuple[int, int]] = {}
        room = _MESSAGE_BYTES
        for name, state in held.items():
            num_bytes = 6 * len(name) + _NAME_BYTES  # a byte that is not UTF-8 takes six in JSON
            if num_bytes > room:
                yield CopyHas(mark=self.mark, files=part, more=True)
                part, room = {}, _MESSAGE_BYTES
            part[name], room = state, room - num_bytes
        yield CopyHas(mark=self.mark, files=part)

    @property
    def is_in_place(self) -> bool:
        """Return whether each file is as long as what was received: nobody else has written it."""
        return self.is_whole and all(
            self._size_of(path) == size for path, size in self._sizes.items()
        )

    def _size_of(self, path: str) -> int:
        return max(0, _size_of(self.root, path) - self.bases.get(path, 0))

    def _held(self, path: str) -> tuple[int, int] | None:
        """Return a file's size here and the checksum over its ends; None if it can't be read."""
        size = min(self._sizes[path], self._size_of(path))
        with contextlib.suppress(OSError):
            fd = os.open(os.path.join(self.root, path), _READS)
            try:
                return size, _check(*_ends(fd, size, self.bases.get(path, 0)))
            finally:
                os.close(fd)
        return None

    def begin(self, mark: str) -> bool:
        """Set the mark of the source folder; return whether the files here are of that folder."""
        is_same = mark == self.mark
        if not is_same:
            self._sizes.clear()
        self.mark = mark
        return is_same

    def take(self, piece: FilePiece) -> bool:
        """Write one piece; return False if it could not be written (`trouble` has the reason).

        Raises:
            FrameError: The scope does not include the file.
        """
        base = self.bases.get(piece.path, 0)
        if not self.scope.has(piece.path):
            raise FrameError(f"the other side sends {piece.path}")
        if base + piece.offset + len(piece.data) > self._most_bytes:
            self.left_out[piece.path] = f"it is larger than {self._most_bytes} bytes"
        if piece.path in self.left_out:
            return True
        if piece.offset > self._sizes.get(piece.path, 0):
            self.is_whole = False  # one before it could not be written
            return False
        try:
            with self.busy:
                self._write(piece, base + piece.offset)
        except OSError as error:
            if error.errno in _OF_PATH:
                self.left_out[piece.path] = error.strerror or str(error)
                self._sizes.pop(piece.path, None)
                return True
            self.trouble, self.is_whole = error, False
            self._sizes[piece.path] = min(self._sizes.get(piece.path, 0), piece.offset)
            return False
        self._sizes[piece.path] = piece.offset + len(piece.data)
        return True

    def put(self, piece: FilePiece) -> None:
        """Write one piece.

        Raises:
            OSError: The piece can't be written.
            FrameError: The scope does not include the file, or an earlier piece is missing.
        """
        if not self.take(piece):
            raise self.trouble or FrameError(f"a piece of {piece.path} is missing")

    def _write(self, piece: FilePiece, offset: int) -> None:
        path = os.path.join(self.root, piece.path)
        try:
            fd = self._open(path)
        except (FileExistsError, NotADirectoryError):
            self._make_way(piece.path)
            fd = self._open(path)
        try:
            size = os.fstat(fd).st_size
            if size < offset:
                raise OSError(errno.ESTALE, "somebody else writes it, or has removed it", path)
            if size > offset:
                os.ftruncate(fd, offset)
            view = memoryview(piece.data)
            while view:
                done = os.pwrite(fd, view, offset)
                view, offset = view[done:], offset + done
        finally:
            os.close(fd)

    def _open(self, path: str) -> int:
        if os.path.dirname(path) != self.root:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, _WRITES, self._mode)

    def _make_way(self, path: str) -> None:
        """Remove files in place of folders.

        A folder in place of a file stays: the other side may not remove folders.
        """
        where = self.root
        for name in path.split("/")[:-1]:
            where = os.path.join(where, name)
            if os.path.lexists(where) and not os.path.isdir(where):
                os.unlink(where)
