"""Download files from a store into a folder: in ranges, resumed, verified, complete or absent."""

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchmuster.workflow.data import copying
from torchmuster.workflow.data.copying import Stamp
from torchmuster.workflow.data.faults import DataError, explain
from torchmuster.workflow.data.files import (
    NoteCallback,
    ProgressCallback,
    TransferMeter,
    TransferResult,
    check_names,
    run_all,
    target_path,
)
from torchmuster.workflow.data.store import Entry, LocalStore, Store
from torchmuster.workflow.data.tree import copy_file

_MAX_BYTES = 1 << 30
_MAX_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A complete file: its version in the store, and its stamp on disk."""

    source: str
    tag: str
    sha256: str | None
    stamp: Stamp


class DownloadRecord:
    """The record of a download, next to its folder: `.NAME.muster.jsonl`.

    Each line says that a file is complete, or to which version of a file a `.part` belongs. Lines
    are only appended, so a killed download leaves at most one incomplete line, which is ignored.
    Its lock allows only one download at a time in a folder.
    """

    def __init__(self, folder: str) -> None:
        parent, base = os.path.split(os.path.realpath(folder))
        self.path = os.path.join(parent, f".{base or 'root'}.muster.jsonl")
        self.finished: dict[str, Finished] = {}
        self.parts: dict[str, tuple[str, str]] = {}
        self.problem: str | None = None
        self._lock = threading.Lock()
        self._fd = -1

    def open(self) -> None:
        """Lock and read the record; if it can't be written, set `problem`.

        Raises:
            DataError: Another download uses this folder.
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
        except OSError:  # the file system has no locks
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
        """Record the version to which the `.part` of a file belongs."""
        self.parts[name] = (source, tag)
        self._append({"part": name, "source": source, "tag": tag})

    def finish(self, name: str, done: Finished) -> None:
        """Record that a file is complete."""
        self._append({"name": name, **asdict(done)})

    def _append(self, line: dict[str, Any]) -> None:
        if self._fd < 0:
            return
        data = json.dumps(line).encode() + b"\n"
        with self._lock:
            # A line break first ends an incomplete line that a killed download left.
            os.write(self._fd, data if os.fstat(self._fd).st_size == 0 else b"\n" + data)

    def close(self) -> None:
        """Unlock and close the record."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def fetch_all(
    store: Store,
    files: Mapping[str, Entry],
    folder: str,
    *,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
    num_parallel: int = 8,
) -> TransferResult:
    """Download files of a store into a folder; skip complete ones.

    Args:
        store: The store that has the files.
        files: The files, by their name in the folder.
        folder: The target, created if it is missing.
        progress: Called after every piece; from several threads, but one call at a time.
        note: Receives messages for the user.
        num_parallel: The number of simultaneous downloads.

    Raises:
        DataError: A name is unsafe, a file can't be read or written, or is damaged in the store.
    """
    check_names(files, store.url)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise explain(error, folder) from error
    record = DownloadRecord(folder)
    record.open()
    if record.problem and note:
        note(f"{record.problem}: an interrupted download continues after its last complete file")
    meter = TransferMeter(len(files), sum(file.size_bytes for file in files.values()), progress)
    stop = threading.Event()
    fetcher = _Fetcher(store.trying(stop=stop), folder, record, meter, note, stop)
    try:
        run_all(fetcher.fetch, files.items(), num_parallel, stop)
    finally:
        record.close()
    return meter.result()


@dataclass(frozen=True, slots=True)
class _Fetcher:
    _store: Store
    _folder: str
    _record: DownloadRecord
    _meter: TransferMeter
    _note: NoteCallback | None
    _stop: threading.Event

    def fetch(self, pair: tuple[str, Entry]) -> None:
        """Download one file unless it is complete."""
        name, file = pair
        url = self._store.where(file.name)
        try:
            path = target_path(self._folder, name)
            if self._is_complete(name, file, path):
                self._meter.add(file.size_bytes, files=1, skipped=1)
                return
            folder, base = os.path.split(path)
            part = os.path.join(folder, f".{base[:200]}.muster.part")
            sha256 = self._bring(name, file, part, url)
            if file.mode is not None:
                os.chmod(part, file.mode & 0o777)
            os.replace(part, path)
        except OSError as error:
            raise explain(error, url) from error
        done = Finished(source=url, tag=file.tag, sha256=sha256, stamp=copying.stamp(path))
        self._record.finish(name, done)
        self._meter.add(files=1)

    def _is_complete(self, name: str, file: Entry, path: str) -> bool:
        if not os.path.isfile(path) or os.path.getsize(path) != file.size_bytes:
            return False
        done = self._record.finished.get(name)
        if done is not None and done.stamp == copying.stamp(path) and done.tag == file.tag:
            return True
        if file.sha256 is None and file.md5 is None:
            return False
        digests = copying.hash_file(path)
        return digests.sha256 == file.sha256 or digests.md5 == file.md5

    def _bring(self, name: str, file: Entry, part: str, url: str) -> str | None:
        """Fill the `.part` file; return the SHA-256 of its content, None for a plain local copy."""
        if isinstance(self._store, LocalStore):
            return self._copy(self._store.local(file.name), file, part)
        before: str | None = None
        for round_number in range(_MAX_ROUNDS):
            self._read_ranges(name, file, part, url, from_start=round_number > 0)
            digests = copying.hash_file(part)
            if digests.size_bytes != file.size_bytes or self._has_changed(file):
                _unlink(part)
                what = "the file was changed in the store while it was read"
                raise DataError(what, where=url, may_pass=True)
            if _matches(file, digests):
                return digests.sha256
            if file.sha256 is None and digests.sha256 == before:
                # The ETag of an encrypted object looks like an MD5 but is not one.
                if self._note:
                    self._note(f"{name}: the store's ETag is no MD5; two reads were equal")
                return digests.sha256
            before = digests.sha256
            self._meter.add(-file.size_bytes)
        _unlink(part)
        why = f"its checksum should be {file.sha256 or file.md5}"
        raise DataError("the file is damaged in the store", where=url, why=why)

    def _copy(self, source: str, file: Entry, part: str) -> str | None:
        for _ in range(_MAX_ROUNDS):
            before = copying.stamp(source)
            copy_file(source, part)
            if copying.stamp(source) == before and os.path.getsize(part) == before.size_bytes:
                break
        else:
            _unlink(part)
            raise DataError("the file keeps changing", where=source, may_pass=True)
        self._meter.add(file.size_bytes)
        if file.sha256 is None:
            return None
        digests = copying.hash_file(part)
        if digests.size_bytes != file.size_bytes:
            why = f"it has {digests.size_bytes} bytes, and its manifest says {file.size_bytes}"
        elif digests.sha256 != file.sha256:
            why = f"its checksum should be {file.sha256}"
        else:
            return file.sha256
        _unlink(part)
        raise DataError("the file is damaged in the store", where=source, why=why)

    def _read_ranges(
        self, name: str, file: Entry, part: str, url: str, *, from_start: bool
    ) -> None:
        """Fetch the rest of the `.part` file; start over if it belongs to another version."""
        version = (url, file.tag)
        keep = self._record.parts.get(name) == version and not from_start and os.path.isfile(part)
        begin = os.path.getsize(part) if keep else 0
        if begin > file.size_bytes:
            begin = 0
        self._record.begin(name, *version)
        self._meter.add(begin)
        with open(part, "ab" if begin else "wb", buffering=0) as target:
            while begin < file.size_bytes:
                if self._stop.is_set():
                    raise DataError("the transfer was stopped", where=url, may_pass=True)
                data = self._store.read_piece(file.name, begin, file.size_bytes)
                target.write(data)
                begin += len(data)
                self._meter.add(len(data))

    def _has_changed(self, file: Entry) -> bool:
        """Return whether the file has changed in the store: ranges of two versions may be mixed."""
        if file.sha256 is not None or file.size_bytes <= copying.CHUNK_BYTES:
            return False
        entry = self._store.stat(file.name)
        return entry is None or entry.tag != file.tag


def _matches(file: Entry, digests: copying.Digests) -> bool:
    if file.sha256 is not None:
        return digests.sha256 == file.sha256
    return file.md5 is None or digests.md5 == file.md5


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
