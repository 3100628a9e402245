"""What moving files needs of a folder on a disk and of a prefix of an object store: the same things.

Names are relative, with `/`. What is written appears whole or not at all, on both kinds.
"""

import contextlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from torchmuster.data import copying
from torchmuster.data.faults import DataError
from torchmuster.plainfile import open_plain

# Above this, a file is sent in parts while it is read; below, it fits into memory as a whole.
SMALL_BYTES = 64 << 20
_PART_BYTES = 64 << 20
_IN_FLIGHT = re.compile(r"\..+\.[0-9a-f]{8}\.part")

_NUM_TRIES = 100


class FileChangedError(DataError):
    """A file was written to while it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file in a place.

    Attributes:
        name: Relative to the place.
        size_bytes: Its size.
        tag: Differs when the content differs: ETag, or size and time of change.
        modified_s: Unix time of the last change; 0 when the store does not say.
        mode: Permission bits; None where there are none.
    """

    name: str
    size_bytes: int
    tag: str
    modified_s: float = 0.0
    mode: int | None = None

    @property
    def md5(self) -> str | None:
        """The MD5 of the content, where the tag is one (S3: a single part)."""
        return self.tag if re.fullmatch(r"[0-9a-f]{32}", self.tag) else None


class Store(Protocol):
    """A folder or a prefix."""

    url: str

    def check(self) -> None:
        """Raise when the place can't be read; a missing folder of a store is an empty one."""

    def stat(self, name: str = "") -> Entry | None:
        """Return a file, or None when there is none of that name."""

    def entries(self, below: str = "") -> list[Entry]:
        """Return all files below, sorted by name; none when there is no such folder."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes of a file."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, over an older one."""

    def create(self, name: str, data: bytes) -> bool | None:
        """Write a small file if none is there; False when one is, None if the place can't tell."""

    def put(self, source: str, name: str, *, sha256: str | None = None) -> copying.Digests:
        """Send a local file; with `sha256`, only if that is what was read."""

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""


class LocalPlace:
    """A folder on this machine."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.url = self.path

    def local(self, name: str = "") -> str:
        """Return the path of a name."""
        return os.path.join(self.path, name) if name else self.path

    def check(self) -> None:
        """Raise when the folder can't be read."""
        if os.path.isdir(self.path):
            os.listdir(self.path)
        else:
            with open_plain(self.path):
                pass

    def stat(self, name: str = "") -> Entry | None:
        """Return a file, or None when there is none of that name."""
        try:
            facts = os.stat(self.local(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _local_entry(name, facts) if stat.S_ISREG(facts.st_mode) else None

    def entries(self, below: str = "") -> list[Entry]:
        """Return all files below, sorted by name."""
        found: list[Entry] = []
        top = self.local(below)
        for folder, _, names in os.walk(top, onerror=_raise_unless_missing):
            for name in names:
                relative = os.path.relpath(os.path.join(folder, name), self.path)
                entry = None if _IN_FLIGHT.fullmatch(name) else self.stat(relative)
                if entry is not None:
                    found.append(entry)
        return sorted(found, key=lambda entry: entry.name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes of a file."""
        with open_plain(self.local(name)) as file:
            file.seek(begin)
            return file.read(-1 if end is None else end - begin)

    def write(self, name: str, data: bytes) -> None:
        """Write, fsync and rename."""
        temporary = self._write_aside(name, data)
        os.replace(temporary, self.local(name))
        copying.sync_folder(os.path.dirname(self.local(name)))

    def create(self, name: str, data: bytes) -> bool | None:
        """Write aside, then link: the name appears with its content, and to one writer only."""
        temporary = self._write_aside(name, data)
        try:
            os.link(temporary, self.local(name))
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            return None
        finally:
            os.unlink(temporary)
        copying.sync_folder(os.path.dirname(self.local(name)))
        return True

    def put(self, source: str, name: str, *, sha256: str | None = None) -> copying.Digests:
        """Copy a local file; with `sha256`, only if that is what was read."""
        temporary = self._aside(name)
        try:
            digests = copying.copy_hashed(source, temporary)
            _check_digest(source, digests, sha256)
            os.replace(temporary, self.local(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        copying.sync_folder(os.path.dirname(self.local(name)))
        return digests

    def delete(self, name: str) -> None:
        """Remove a file, if it is there, and folders that are empty then."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.local(name))
        parent = os.path.dirname(name)
        while parent:
            try:
                os.rmdir(self.local(parent))
            except OSError:
                return
            parent = os.path.dirname(parent)

    def _aside(self, name: str) -> str:
        """Return a new, empty file beside the one of this name."""
        folder, base = os.path.split(self.local(name))
        # Short, so that a name of 255 bytes has a temporary file too.
        path = os.path.join(folder, f".{base[:40]}.{secrets.token_hex(4)}.part")
        for left in range(_NUM_TRIES - 1, -1, -1):
            try:
                os.makedirs(folder, exist_ok=True)
                with open(path, "xb"):
                    return path
            except (
                FileNotFoundError
            ):  # another has deleted the last file of a folder, and the folder
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


class StorePlace:
    """A prefix of what fsspec can reach."""

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.url = url
        self._fs = filesystem
        self._root = root

    def check(self) -> None:
        """Raise when the bucket or the prefix can't be read."""
        self._fs.invalidate_cache()
        try:
            self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            # No file has this prefix; whether that is an empty prefix shows in the bucket.
            self._fs.ls(self._root.partition("/")[0] or "/", detail=False)

    def stat(self, name: str = "") -> Entry | None:
        """Return a file, or None when there is none of that name."""
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return _store_entry(name, info) if info.get("type") == "file" else None

    def entries(self, below: str = "") -> list[Entry]:
        """Return all files below, sorted by name."""
        self._fs.invalidate_cache()
        top = self._path(below)
        try:
            found: dict[str, Any] = self._fs.find(top, detail=True)
        except FileNotFoundError:
            return []
        cut = len(self._root) + 1
        entries = [
            _store_entry(path[cut:], info)
            for path, info in found.items()
            # The second test: some stores show folders as empty objects.
            if path.startswith(top + "/") and not path.endswith("/")
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes of a file."""
        if end is not None and end <= begin:
            return b""
        data: bytes = self._fs.cat_file(self._path(name), start=begin or None, end=end)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a small file in one request."""
        self._fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool | None:
        """Write with `If-None-Match: *`, where the store keeps to it; None where it does not."""
        if not self._is_exclusive():
            return None
        return self._create(name, data)

    def _create(self, name: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            # Answers for which s3fs has no class of its own: 412, and 409 while another writes.
            if re.search(r"PreconditionFailed|pre-?conditions?|Conflict|412|409", str(error)):
                return False
            raise
        return True

    def _is_exclusive(self) -> bool:
        """Measure it: some stores take the header and overwrite all the same."""
        probe = f".probe-{secrets.token_hex(8)}"
        try:
            return self._create(probe, b"1") and not self._create(probe, b"2")
        except (NotImplementedError, TypeError, ValueError):
            return False
        finally:
            with contextlib.suppress(OSError):
                self.delete(probe)

    def put(self, source: str, name: str, *, sha256: str | None = None) -> copying.Digests:
        """Send a local file; with `sha256`, only if that is what was read."""
        if os.path.getsize(source) > SMALL_BYTES:
            return self._put_parts(source, name, sha256)
        data, digests = copying.read_hashed(source)
        _check_digest(source, digests, sha256)
        self._fs.pipe_file(self._path(name), data)
        return digests

    def _put_parts(self, source: str, name: str, sha256: str | None) -> copying.Digests:
        target = self._fs.open(self._path(name), "wb", block_size=_PART_BYTES)
        try:
            digests = copying.feed_hashed(source, target.write)
            _check_digest(source, digests, sha256)
        except BaseException:
            # An upload in parts that is not completed never becomes a file.
            with contextlib.suppress(Exception):
                target.discard()
            target.closed = True
            raise
        target.close()
        return digests

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _check_digest(source: str, digests: copying.Digests, sha256: str | None) -> None:
    if sha256 is not None and digests.sha256 != sha256:
        what = "the file was changed while it was sent"
        raise FileChangedError(what, where=source, may_pass=True)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _local_entry(name: str, facts: os.stat_result) -> Entry:
    return Entry(
        name=name,
        size_bytes=facts.st_size,
        tag=f"{facts.st_size}-{facts.st_mtime_ns}-{facts.st_ino}",
        modified_s=facts.st_mtime,
        mode=stat.S_IMODE(facts.st_mode),
    )


def _store_entry(name: str, info: dict[str, Any]) -> Entry:
    times = (
        info.get(key) for key in ("LastModified", "last_modified", "updated", "mtime", "created")
    )
    moment = next((one for one in times if one is not None), None)
    return Entry(
        name=name,
        size_bytes=int(info.get("size") or 0),
        tag=_tag(info, moment),
        modified_s=_seconds(moment),
    )


def _tag(info: dict[str, Any], moment: object) -> str:
    for key in ("ETag", "etag", "generation", "md5"):
        if info.get(key):
            return str(info[key]).strip('"')
    return f"{info.get('size')}-{moment}"


def _seconds(moment: object) -> float:
    if isinstance(moment, str):
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(moment)
    if isinstance(moment, datetime):
        return moment.timestamp()
    return float(moment) if isinstance(moment, (int, float)) else 0.0
