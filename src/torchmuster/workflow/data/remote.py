"""Stores that fsspec supports, and the choice of a store by URL.

The stores' own libraries handle credentials, through their environment variables and files.
"""

import contextlib
import difflib
import importlib.util
import os
import re
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from torchmuster.workflow.data import copying
from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.store import Entry, LocalStore, Store, check_digest

# Larger files are sent in parts while they are read; others are read into memory as a whole.
SMALL_BYTES = 64 << 20
_PART_BYTES = 64 << 20

# Scheme: fsspec's protocol, the module that implements it, the package to install.
_STORES = {
    "s3": ("s3", "s3fs", "s3fs"),
    "gs": ("gs", "gcsfs", "gcsfs"),
    "azure": ("abfs", "adlfs", "adlfs"),
    "abfs": ("abfs", "adlfs", "adlfs"),
    "memory": ("memory", "fsspec", "fsspec"),
}
_UNSUPPORTED = ("swift", "tos")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


class RemoteStore(Store):
    """A prefix in an fsspec file system."""

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        super().__init__(url)
        self._fs = filesystem
        self._root = root

    # For snapshots.

    def names(self, below: str = "") -> list[str]:
        """Return the names of files and folders directly below; empty without such a folder."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path(below), detail=False)
        except FileNotFoundError:
            return []
        return [str(one).rstrip("/").rsplit("/", 1)[-1] for one in found]

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return int(self._fs.size(self._path(name)))

    def open_new(self, name: str) -> Any:
        """Open a file for writing; it exists once it is closed."""
        return self._fs.open(self._path(name), "wb")

    def make_folder(self, name: str = "") -> None:
        """Make a folder, if the store has folders."""
        self._fs.makedirs(self._path(name), exist_ok=True)

    def move_folder(self, name: str, to: str, first: str) -> None:
        """Move the files of a folder one by one, `first` before all others."""
        # Not copy(), nor rm(recursive=True) below: they treat a `[` or `*` in a name as a pattern.
        self.make_folder(to)
        for base in self._first(name, first):
            self._fs.cp_file(self._path(f"{name}/{base}"), self._path(f"{to}/{base}"))
            self._fs.rm_file(self._path(f"{name}/{base}"))

    def delete_folder(self, name: str, first: str) -> None:
        """Remove a folder's files one by one, `first` before all others, then the folder."""
        for base in self._first(name, first):
            self._fs.rm_file(self._path(f"{name}/{base}"))
        with contextlib.suppress(OSError):  # many stores have no folders
            self._fs.rmdir(self._path(name))

    def _first(self, name: str, first: str) -> Sequence[str]:
        return sorted(self.names(name), key=lambda base: base != first)

    # Requests.

    def _check(self) -> None:
        self._fs.invalidate_cache()
        try:
            self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            # No file has this prefix, so check that the bucket is readable.
            self._fs.ls(self._root.partition("/")[0] or "/", detail=False)

    def _stat(self, name: str) -> Entry | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return _entry(name, info) if info.get("type") == "file" else None

    def _entries(self, below: str) -> list[Entry]:
        self._fs.invalidate_cache()
        top = self._path(below)
        try:
            found: dict[str, Any] = self._fs.find(top, detail=True)
        except FileNotFoundError:
            return []
        cut = len(self._root) + 1
        return [
            _entry(path[cut:], info)
            for path, info in found.items()
            # The second test is for stores that list folders as empty objects.
            if path.startswith(top + "/") and not path.endswith("/")
        ]

    def _read(self, name: str, begin: int, end: int | None) -> bytes:
        if end is not None and end <= begin:
            return b""
        data: bytes = self._fs.cat_file(self._path(name), start=begin or None, end=end)
        return data

    def _write(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(name), data)

    def _create(self, name: str, data: bytes) -> bool | None:
        """Write with `If-None-Match: *` if the store honours it, else return None."""
        return self._create_exclusively(name, data) if self._is_exclusive() else None

    def _create_exclusively(self, name: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            # s3fs has no classes for these answers: 412, and 409 during another write.
            if re.search(r"PreconditionFailed|pre-?conditions?|Conflict|412|409", str(error)):
                return False
            raise
        return True

    def _is_exclusive(self) -> bool:
        """Test whether the store creates exclusively; some accept the header but overwrite."""
        probe = f".probe-{secrets.token_hex(8)}"
        create = self._create_exclusively
        try:
            return create(probe, b"1") and not create(probe, b"2")
        except (NotImplementedError, TypeError, ValueError):
            return False
        finally:
            with contextlib.suppress(OSError):
                self._delete(probe)

    def _put(self, source: str, name: str, sha256: str | None) -> copying.Digests:
        if os.path.getsize(source) > SMALL_BYTES:
            return self._put_parts(source, name, sha256)
        data, digests = copying.read_hashed(source)
        check_digest(source, digests, sha256)
        self._fs.pipe_file(self._path(name), data)
        return digests

    def _put_parts(self, source: str, name: str, sha256: str | None) -> copying.Digests:
        # Not fs.put_file(), because the bytes that it sends can't be compared with the hash.
        target = self._fs.open(self._path(name), "wb", block_size=_PART_BYTES)
        try:
            digests = copying.hash_and_feed(source, target.write)
            check_digest(source, digests, sha256)
        except BaseException:
            # A multipart upload that is not completed never becomes a file.
            with contextlib.suppress(Exception):
                target.discard()
            target.closed = True
            raise
        target.close()
        return digests

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _entry(name: str, info: dict[str, Any]) -> Entry:
    times = ("LastModified", "last_modified", "updated", "mtime", "created")
    moment = next((info[key] for key in times if info.get(key) is not None), None)
    tags = (info[key] for key in ("ETag", "etag", "generation", "md5") if info.get(key))
    return Entry(
        name=name,
        size_bytes=int(info.get("size") or 0),
        tag=str(next(tags, f"{info.get('size')}-{moment}")).strip('"'),
        modified_s=_seconds(moment),
    )


def _seconds(moment: object) -> float:
    if isinstance(moment, str):
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(moment)
    if isinstance(moment, datetime):
        return moment.timestamp()
    return float(moment) if isinstance(moment, (int, float)) else 0.0


def open_store(url: str) -> Store:
    """Return the store at a URL or plain path, without accessing it.

    Raises:
        DataError: The URL is invalid, its scheme unknown, or its package not installed.
    """
    if not url or "\0" in url:
        raise DataError("a URL or a path is needed, but the text is empty", where=repr(url))
    match = _SCHEME.fullmatch(url)
    if match is None:
        return LocalStore(os.path.expanduser(url))
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        if not rest.startswith("/"):
            raise DataError("a file:// URL has an absolute path", where=url, fix=f"file:///{rest}")
        return LocalStore(rest)
    if scheme not in _STORES:
        raise _unknown(scheme, url)
    return _open_remote(scheme, rest, url)


def open_fsspec_store(url: str) -> RemoteStore:
    """Return the store at a URL of any scheme of fsspec, even if not supported for datasets.

    Raises:
        ValueError: fsspec does not know the scheme.
        ImportError: The package for it is not installed.
    """
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url.rstrip("/"))
    return RemoteStore(url.rstrip("/"), filesystem, root)


def _unknown(scheme: str, url: str) -> DataError:
    if scheme in _UNSUPPORTED:
        what = f"{scheme}:// can't be reached: fsspec has no file system for it"
        fix = "if the store has an S3-compatible endpoint: use s3:// and set AWS_ENDPOINT_URL"
        return DataError(what, where=url, fix=fix)
    near = difflib.get_close_matches(scheme, [*_STORES, "file"], n=1, cutoff=0.5)
    known = "s3://, gs://, azure://, abfs://, file:// and plain paths are known"
    what = f"`{scheme}://` is not a supported kind of URL"
    meant = f"did you mean `{near[0]}://`?" if near else None
    return DataError(what, where=url, why=known, fix=meant)


def _open_remote(scheme: str, rest: str, url: str) -> Store:
    protocol, module, package = _STORES[scheme]
    if importlib.util.find_spec("fsspec") is None or importlib.util.find_spec(module) is None:
        fix = f"pip install {package}"
        raise DataError(f"{scheme}:// needs the package {package}", where=url, fix=fix)
    import fsspec

    path = rest.strip("/")
    if not path and scheme != "memory":
        raise DataError("the URL names no bucket", where=url, fix=f"{scheme}://BUCKET/FOLDER")
    options: dict[str, object] = {}
    if scheme in ("s3", "gs"):
        options["use_listings_cache"] = False  # other writers change the store
    if scheme == "azure":
        account, _, path = path.partition("/")
        if not path:
            fix = "azure://ACCOUNT/CONTAINER/FOLDER"
            raise DataError("the URL names no container", where=url, fix=fix)
        options["account_name"] = account
    try:
        filesystem = fsspec.filesystem(protocol, **options)
    except (ImportError, ValueError) as error:
        raise DataError("the store can't be opened", where=url, why=str(error)) from error
    root = f"/{path}" if scheme == "memory" else path
    return RemoteStore(url.rstrip("/"), filesystem, root.rstrip("/"))
