"""Read, hash and copy local files, and detect changes meanwhile."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from torchmuster.core.plainfile import open_plain, write_all

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """A file's size in bytes, and its SHA-256 and MD5 in hexadecimal."""

    size_bytes: int
    sha256: str
    md5: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """The attributes of a file that change when it is written or replaced."""

    size_bytes: int
    mtime_ns: int
    inode: int


def stamp(path: str) -> Stamp:
    """Return the current stamp of a file."""
    facts = os.stat(path)
    return Stamp(size_bytes=facts.st_size, mtime_ns=facts.st_mtime_ns, inode=facts.st_ino)


def hash_and_feed(path: str, write: Callable[[bytes], object]) -> Digests:
    """Pass a file in chunks to `write`; return the digests."""
    sha256, md5, size_bytes = hashlib.sha256(), _md5(), 0
    with open_plain(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            sha256.update(chunk)
            md5.update(chunk)
            size_bytes += len(chunk)
            write(chunk)
    return Digests(size_bytes=size_bytes, sha256=sha256.hexdigest(), md5=md5.hexdigest())


def hash_file(path: str) -> Digests:
    """Return the digests of a file."""
    return hash_and_feed(path, len)


def read_hashed(path: str) -> tuple[bytes, Digests]:
    """Return a small file's bytes and digests."""
    parts: list[bytes] = []
    digests = hash_and_feed(path, parts.append)
    return b"".join(parts), digests


def copy_hashed(source: str, target: str) -> Digests:
    """Copy a file with its mode and fsync it; return the digests of the copied bytes."""
    with open(target, "wb", buffering=0) as file:
        digests = hash_and_feed(source, lambda chunk: write_all(file.fileno(), chunk))
        os.fchmod(file.fileno(), stat.S_IMODE(os.stat(source).st_mode))
        os.fsync(file.fileno())
    return digests


def sync_folder(path: str) -> None:
    """Flush a folder's entries to the disk, if the file system supports that."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _md5() -> "hashlib._Hash":
    # Only compared with the store's ETag, not for security: hardened systems allow that.
    return hashlib.md5(usedforsecurity=False)
