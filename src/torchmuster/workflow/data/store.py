"""One interface to list, read and write files in a folder on disk or a prefix of an object store.

Names are relative, with `/`. Files appear complete or not at all. Requests are retried after
failures that may pass (`faults.retrying`). `workflow/data/remote.py` has the stores of fsspec, and
opens both kinds by URL.
"""

import contextlib
import copy
import hashlib
import os
import re
import secrets
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from torchmuster.core.plainfile import open_plain
from torchmuster.workflow.data import copying
from torchmuster.workflow.data.faults import NUM_TRIES, DataError, retrying

_T = TypeVar("_T")

_IN_FLIGHT = re.compile(r"\..+\.[0-9a-f]{8}\.part")
_NUM_TRIES = 100


class FileChangedError(DataError):
    """A file changed while it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file in a store.

    Attributes:
        name: The name, relative to the store.
        size_bytes: The size of the file.
        tag: A text that changes with the content: the ETag, or size and time of change.
        modified_s: The Unix time of the last change; 0 if the store does not report it.
        mode: The permission bits; None if there are none.
        sha256: The SHA-256 of the content, if known from a manifest.
    """

    name: str
    size_bytes: int
    tag: str
    modified_s: float = 0.0
    mode: int | None = None
    sha256: str | None = None

    @property
    def md5(self) -> str | None:
        """Return the MD5 of the content, if the tag is one (S3: single-part uploads), else None."""
        return self.tag if re.fullmatch(r"[0-9a-f]{32}", self.tag) else None


class Store(ABC):
    """A store of files by name. Its methods raise DataErrors, except in a `bare` store."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._tries = NUM_TRIES
        self._stop: threading.Event | None = None
        self._is_bare = False

    def trying(self, tries: int = NUM_TRIES, *, stop: threading.Event | None = None) -> Self:
        """Return the same store with this number of tries; setting `stop` ends its retries."""
        other = copy.copy(self)
        other._tries, other._stop = tries, stop
        return other

    def bare(self) -> Self:
        """Return the same store without retries and with its library's errors."""
        other = copy.copy(self)
        other._is_bare = True
        return other

    def check(self) -> None:
        """Raise an error if the store can't be read; a missing prefix in a bucket is no error."""
        self._again("", self._check)

    def stat(self, name: str = "") -> Entry | None:
        """Return the file of this name, or None."""
        return self._again(name, lambda: self._stat(name))

    def entries(self, below: str = "") -> list[Entry]:
        """Return all files below, sorted by name; empty without such a folder."""
        found = self._again(below, lambda: self._entries(below))
        return sorted(found, key=lambda entry: entry.name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of a file from `begin` to `end`."""
        return self._again(name, lambda: self._read(name, begin, end))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, or overwrite it."""
        self._again(name, lambda: self._write(name, data))

    def create(self, name: str, data: bytes) -> bool | None:
        """Create a small file if it does not exist; `data` must be unique among writers.

        Returns:
            True if it was created, False if it exists, None if the store can't create exclusively.
        """

        def work() -> bool | None:
            created = self._create(name, data)
            # After a lost answer, the name looks taken, but by ourselves.
            if created is False and self._stat(name) is not None:
                return self._read(name, 0, None) == data
            return created

        return self._again(name, work)

    def put(self, source: str, name: str, *, sha256: str | None = None) -> copying.Digests:
        """Send a local file; with `sha256`, only if its content matches.

        Raises:
            OSError: The local file can't be read; this is not retried.
            FileChangedError: The content does not match `sha256`; this is not retried.
        """

        def work() -> copying.Digests | OSError | FileChangedError:
            try:
                with open_plain(source):
                    pass
            except OSError as error:
                return error  # not the store's fault
            try:
                return self._put(source, name, sha256)
            except FileChangedError as error:
                return error

        done = self._again(name, work)
        if isinstance(done, BaseException):
            raise done
        return done

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""
        self._again(name, lambda: self._delete(name))

    def read_piece(self, name: str, begin: int, size_bytes: int) -> bytes:
        """Return one piece, or the rest, of a file of this size from `begin` on."""
        end = min(begin + copying.CHUNK_BYTES, size_bytes)

        def work() -> bytes:
            data = self._read(name, begin, end)
            if not 0 < len(data) <= end - begin:
                raise ConnectionError(f"{len(data)} bytes were received of {end - begin}")
            return data

        return self._again(name, work)

    def sha256_of(self, name: str, size_bytes: int, count: Callable[[int], object] = int) -> str:
        """Read a file and return its SHA-256; `count` gets the size of each piece."""
        digest, begin = hashlib.sha256(), 0
        while begin < size_bytes:
            data = self.read_piece(name, begin, size_bytes)
            digest.update(data)
            begin += len(data)
            count(len(data))
        return digest.hexdigest()

    def where(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{name}" if name else self.url

    def _again(self, name: str, work: Callable[[], _T]) -> _T:
        if self._is_bare:
            return work()
        return retrying(work, self.where(name), stop=self._stop, tries=self._tries)

    # Single requests, which raise the errors of the file system or the store's library.

    @abstractmethod
    def _check(self) -> None: ...

    @abstractmethod
    def _stat(self, name: str) -> Entry | None: ...

    @abstractmethod
    def _entries(self, below: str) -> list[Entry]: ...

    @abstractmethod
    def _read(self, name: str, begin: int, end: int | None) -> bytes: ...

    @abstractmethod
    def _write(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def _create(self, name: str, data: bytes) -> bool | None: ...

    @abstractmethod
    def _put(self, source: str, name: str, sha256: str | None) -> copying.Digests: ...

    @abstractmethod
    def _delete(self, name: str) -> None: ...


class LocalStore(Store):
    """A folder on this machine."""

    def __init__(self, path: str) -> None:
        super().__init__(os.path.abspath(path))

    def local(self, name: str = "") -> str:
        """Return the local path of a name."""
        return os.path.join(self.url, name) if name else self.url

    def _check(self) -> None:
        if os.path.isdir(self.url):
            os.listdir(self.url)
        else:
            with open_plain(self.url):
                pass

    def _stat(self, name: str) -> Entry | None:
        try:
            facts = os.stat(self.local(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(facts.st_mode):
            return None
        return Entry(
            name=name,
            size_bytes=facts.st_size,
            tag=f"{facts.st_size}-{facts.st_mtime_ns}-{facts.st_ino}",
            modified_s=facts.st_mtime,
            mode=stat.S_IMODE(facts.st_mode),
        )

    def _entries(self, below: str) -> list[Entry]:
        paths = (
            os.path.relpath(os.path.join(folder, name), self.url)
            for folder, _, names in os.walk(self.local(below), onerror=_raise_unless_missing)
            for name in names
            if not _IN_FLIGHT.fullmatch(name)
        )
        return [entry for path in paths if (entry := self._stat(path)) is not None]

    def _read(self, name: str, begin: int, end: int | None) -> bytes:
        with open_plain(self.local(name)) as file:
            file.seek(begin)
            return file.read(-1 if end is None else end - begin)

    def _write(self, name: str, data: bytes) -> None:
        os.replace(self._write_aside(name, data), self.local(name))
        copying.sync_folder(os.path.dirname(self.local(name)))

    def _create(self, name: str, data: bytes) -> bool | None:
        """Write a temporary file, then link it: one writer only gets the name, with its content."""
        temporary = self._write_aside(name, data)
        try:
            os.link(temporary, self.local(name))
        except FileExistsError:
            return False
        except OSError:  # the file system has no links
            return None
        finally:
            os.unlink(temporary)
        copying.sync_folder(os.path.dirname(self.local(name)))
        return True

    def _put(self, source: str, name: str, sha256: str | None) -> copying.Digests:
        temporary = self._aside(name)
        try:
            digests = copying.copy_hashed(source, temporary)
            check_digest(source, digests, sha256)
            os.replace(temporary, self.local(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        copying.sync_folder(os.path.dirname(self.local(name)))
        return digests

    def _delete(self, name: str) -> None:
        """Remove a file, and the folders that this leaves empty."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.local(name))
        with contextlib.suppress(OSError):
            while name := os.path.dirname(name):
                os.rmdir(self.local(name))

    def _aside(self, name: str) -> str:
        """Create an empty temporary file in the folder of this name; return its path."""
        folder, base = os.path.split(self.local(name))
        # Shortened, so that a name of 255 bytes can have a temporary file too.
        path = os.path.join(folder, f".{base[:40]}.{secrets.token_hex(4)}.part")
        for left in range(_NUM_TRIES - 1, -1, -1):
            try:
                os.makedirs(folder, exist_ok=True)
                with open(path, "xb"):
                    return path
            except FileNotFoundError:  # another writer has just removed the empty folder
                if left == 0:
                    raise
        raise ValueError("there is at least one try")

    def _write_aside(self, name: str, data: bytes) -> str:
        temporary = self._aside(name)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return temporary


def check_digest(source: str, digests: copying.Digests, sha256: str | None) -> None:
    """Raise FileChangedError if the sent content differs from the expected one."""
    if sha256 is not None and digests.sha256 != sha256:
        what = "the file was changed while it was sent"
        raise FileChangedError(what, where=source, may_pass=True)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error
