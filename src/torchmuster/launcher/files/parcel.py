"""Pack and unpack a parcel: the files of an environment as one stream of pieces with checksums.

The name of the parcel is the checksum of the list of its pieces. So a node verifies each piece by
itself before it parses it, unpacks while the next pieces arrive, and names the piece at which a
sender has to continue. In the stream an entry is a kind, the lengths of name and content, the name,
the content: what may not be sent (devices, owners, absolute links) can't be expressed, and many
small files take less than half the time of a tar. Pieces that zlib makes smaller are compressed. In
a file the list comes last.
"""

import contextlib
import hashlib
import json
import os
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

PIECE_BYTES = 1 << 20
MAX_PIECES = 100_000
LISTED = struct.Struct(">32sI")
_ENTRY = struct.Struct(">cHQ")
FILE, PROGRAM, LINK, NOTES = b"f", b"x", b"l", b"n"
_IS_COMPRESSED = 1 << 31
_SAMPLE_BYTES = 64 << 10
_PAYS = 0.9
_MOST_FOLDERS = 200  # nested; the code that removes them is recursive
_MAX_NAME_BYTES = 4096
_MAX_NOTES_BYTES = 64 << 20
_AHEAD = 8


class ParcelError(ValueError):
    """The received or stored data does not match the name of the parcel."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece in the list; `length` is that of its bytes as sent, perhaps compressed."""

    digest: bytes
    length: int
    is_compressed: bool

    def check(self, data: bytes | memoryview) -> bool:
        """Return whether the data is this piece's."""
        return len(data) == self.length and hashlib.sha256(data).digest() == self.digest

    def content(self, data: bytes) -> bytes:
        """Return the piece's part of the stream, decompressed, from checked data.

        Raises:
            ParcelError: It can't be decompressed, or is larger than a piece may be.
        """
        if not self.is_compressed:
            return data
        opening = zlib.decompressobj()
        try:
            content = opening.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            raise ParcelError(f"a piece can't be decompressed: {error}") from None
        if opening.unconsumed_tail or not opening.eof:
            raise ParcelError("a piece is larger than pieces are")
        return content


def read_list(data: bytes, sha: str) -> tuple[Piece, ...]:
    """Return the pieces of a list.

    Raises:
        ParcelError: It is not the list of this parcel.
    """
    if hashlib.sha256(data).hexdigest() != sha or len(data) % LISTED.size:
        raise ParcelError("the list of the environment's pieces came damaged")
    pieces = []
    for digest, word in LISTED.iter_unpack(data):
        length = word & ~_IS_COMPRESSED
        if not 0 < length <= PIECE_BYTES:
            raise ParcelError("a piece is larger than pieces are")
        pieces.append(Piece(digest, length, bool(word & _IS_COMPRESSED)))
    return tuple(pieces)


class ParcelWriter:
    """Writes a parcel to a file; threads compress and hash pieces: both release the GIL."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 4), "parcel")
        self._sealing: deque[Future[tuple[bytes, bytes]]] = deque()
        self._open = bytearray()
        self._list: list[bytes] = []
        self.size_bytes = self.unpacked_bytes = self.num_files = 0

    def add(self, kind: bytes, name: str, content: Any) -> None:
        """Write an entry; the content is bytes or an mmap."""
        raw, size = os.fsencode(name), len(content)
        if len(raw) > _MAX_NAME_BYTES:
            raise ParcelError(f"{name[:80]!r}... is too long a name")
        self._open += _ENTRY.pack(kind, len(raw), size) + raw
        self.unpacked_bytes += size
        self.num_files += 1
        at = 0
        while at < size:
            part = content[at : at + max(1, PIECE_BYTES - len(self._open))]
            self._open += part
            at += len(part)
            self._seal()
        self._seal()

    def _seal(self, *, all_of_it: bool = False) -> None:
        while len(self._open) >= PIECE_BYTES or (all_of_it and self._open):
            self._sealing.append(self._pool.submit(_sealed, bytes(self._open[:PIECE_BYTES])))
            del self._open[:PIECE_BYTES]
        while len(self._sealing) > (0 if all_of_it else _AHEAD):
            listed, data = self._sealing.popleft().result()
            self._list.append(listed)
            self._file.write(data)
            self.size_bytes += len(data)

    def finish(self, notes: dict[str, Any]) -> str:
        """Write the end, with the notes for the unpacker; return the parcel's name.

        Raises:
            ParcelError: The environment is too large.
        """
        self.add(NOTES, "", json.dumps(notes).encode())
        self._seal(all_of_it=True)
        if len(self._list) > MAX_PIECES:
            raise ParcelError(f"the environment is larger than {MAX_PIECES * PIECE_BYTES} bytes")
        whole = b"".join(self._list)
        self._file.write(whole)
        self.size_bytes += len(whole)
        return hashlib.sha256(whole).hexdigest()

    @property
    def num_pieces(self) -> int:
        """Return the number of pieces of a finished parcel."""
        return len(self._list)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _sealed(data: bytes) -> tuple[bytes, bytes]:
    """Return a piece's list entry and its bytes to send; try zlib on a sample first."""
    flag, sample = 0, data[:_SAMPLE_BYTES]
    if len(zlib.compress(sample, 1)) < _PAYS * len(sample):
        smaller = zlib.compress(data, 1)
        if len(smaller) < _PAYS * len(data):
            flag, data = _IS_COMPRESSED, smaller
    return LISTED.pack(hashlib.sha256(data).digest(), len(data) | flag), data


class ParcelFile:
    """A parcel in a file.

    Raises:
        ParcelError: The file is damaged.
        OSError: The file can't be read.
    """

    def __init__(self, path: str, sha: str, num_pieces: int) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            length = num_pieces * LISTED.size
            end = os.fstat(self._fd).st_size - length
            self.list_bytes = os.pread(self._fd, length, max(0, end))
            self.pieces = read_list(self.list_bytes, sha)
        except BaseException:
            os.close(self._fd)
            raise
        self._offsets = [0]
        for piece in self.pieces:
            self._offsets.append(self._offsets[-1] + piece.length)

    def piece(self, index: int) -> bytes:
        """Return the bytes of a piece as sent.

        Raises:
            ParcelError: The file was changed or damaged.
        """
        piece = self.pieces[index]
        data = os.pread(self._fd, piece.length, self._offsets[index])
        if not piece.check(data):
            raise ParcelError("the kept archive of the environment is damaged")
        return data

    def offset(self, index: int) -> int:
        """Return the number of bytes before a piece."""
        return self._offsets[index]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Unpacker:
    """Unpacks a stream, part by part, into an empty folder.

    Links are made after all files, so no file is written through a link.

    Args:
        root: An empty folder that nobody else writes to.
        max_bytes: Limit on the size of all contents; `max_files` limits the entries.
    """

    def __init__(self, root: str, max_bytes: int, max_files: int) -> None:
        self._root = root
        self._left_bytes, self._left_files = max_bytes, max_files
        self._head = bytearray()
        self._folders = {""}
        self._links: dict[str, str] = {}
        self._kind, self._name, self._left = b"", "", 0
        self._fd: int | None = None
        self._text = bytearray()
        self.notes: dict[str, Any] | None = None

    def feed(self, data: bytes) -> None:
        """Unpack the next part of the stream.

        Raises:
            ParcelError: An entry leaves the folder, has an unknown kind, or exceeds the limits.
            OSError: A file can't be written.
        """
        rest = memoryview(data)
        while rest:
            if self._left:
                part, rest = rest[: self._left], rest[self._left :]
                self._write(part)
                self._left -= len(part)
            else:
                rest = self._begin(rest)
            if not self._left and self._kind:
                self._end()

    def _begin(self, rest: memoryview) -> memoryview:
        """Read the header of an entry, or as much of it as has arrived; return the rest."""
        for size in (_ENTRY.size, 0):
            wanted = size or _ENTRY.size + _ENTRY.unpack_from(self._head)[1]
            lacks = max(0, wanted - len(self._head))
            self._head += rest[:lacks]
            rest = rest[lacks:]
            if len(self._head) < wanted:
                return rest
        kind, name_bytes, size = _ENTRY.unpack_from(self._head)
        name = os.fsdecode(bytes(self._head[_ENTRY.size :]))
        self._head.clear()
        self._left_bytes -= size
        self._left_files -= 1
        if self.notes is not None or self._left_bytes < 0 or self._left_files < 0:
            raise ParcelError("it holds more than was announced")
        small = _MAX_NAME_BYTES if kind == LINK else _MAX_NOTES_BYTES
        if name_bytes > _MAX_NAME_BYTES or (kind in (LINK, NOTES) and size > small):
            raise ParcelError(f"{name[:80]!r} is too long")
        if kind != NOTES:
            self._make_folder(os.path.dirname(_checked(name)))
        if kind in (FILE, PROGRAM):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            mode = 0o700 if kind == PROGRAM else 0o600
            self._fd = os.open(f"{self._root}/{name}", flags, mode)
        elif kind not in (LINK, NOTES):
            raise ParcelError(f"{name[:80]!r} is not a file")
        self._kind, self._name, self._left = kind, name, size
        return rest

    def _make_folder(self, name: str) -> None:
        if name in self._folders:
            return
        self._make_folder(os.path.dirname(name))
        try:
            os.mkdir(f"{self._root}/{name}", 0o700)
        except FileExistsError:
            raise ParcelError(f"{name[:80]!r} is a file and a folder") from None
        self._folders.add(name)

    def _write(self, part: memoryview) -> None:
        if self._fd is None:
            self._text += part
            return
        while part:
            part = part[os.write(self._fd, part) :]

    def _end(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        elif self._kind == LINK:
            self._links[self._name] = _inside(self._name, os.fsdecode(bytes(self._text)))
        else:
            try:
                notes = json.loads(self._text)
            except (ValueError, RecursionError):
                notes = None
            if not isinstance(notes, dict):
                raise ParcelError("what is noted of the environment is damaged")
            self.notes = notes
        self._kind = b""
        self._text.clear()

    def finish(self) -> dict[str, Any]:
        """Make the links; return the notes.

        Raises:
            ParcelError: The stream is incomplete.
        """
        if self.notes is None or self._head:
            raise ParcelError("the environment came in part only")
        for name, target in self._links.items():
            os.symlink(target, f"{self._root}/{name}")
        return self.notes

    def close(self) -> None:
        """Close the file that is being written."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def _checked(name: str) -> str:
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ParcelError(f"{name[:80]!r} leaves its folder")
    if len(parts) > _MOST_FOLDERS:
        raise ParcelError(f"{name[:80]!r} lies in too many folders")
    return name


def _inside(name: str, target: str) -> str:
    """Return a checked link target.

    `..` may only begin it: after another link's name it would lead elsewhere.
    """
    parts: Sequence[str] = target.split("/")
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    is_plain = all(part not in ("", ".", "..") for part in parts[ups:])
    if "\0" in target or not is_plain or ups > name.count("/"):
        raise ParcelError(f"the link {name[:80]!r} leaves its folder")
    return target
