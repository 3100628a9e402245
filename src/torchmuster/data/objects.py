"""The contents of all datasets, each stored once under its SHA-256; and removal of unused ones."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torchmuster.data import copying
from torchmuster.data.faults import DataError, retrying
from torchmuster.data.manifest import object_name, stored_file
from torchmuster.data.progress import ProgressCallback, TransferMeter, run_all
from torchmuster.data.store import Entry, FileChangedError, Store
from torchmuster.files.tree import LocalFile

_NUM_PARALLEL = 8
_MAX_SENDS = 3
# An upload that began longer ago than this is taken for dead.
_UPLOAD_LIMIT_S = 7 * 86400.0


class ObjectStore:
    """Content-addressed objects of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @contextmanager
    def upload_begun(self) -> "Iterator[ObjectUpload]":
        """Begin an upload; the sweep keeps the contents that it needs until it ends."""
        upload = ObjectUpload(self._store)
        try:
            yield upload
        finally:
            upload.end()

    def verify(
        self, files: Mapping[str, Entry], progress: ProgressCallback | None = None
    ) -> list[str]:
        """Read every object again; return a sentence for each that is missing or damaged."""
        meter = TransferMeter(len(files), sum(file.size_bytes for file in files.values()), progress)

        def check(path: str) -> str | None:
            problem = self._problem(files[path], meter)
            meter.add(files=1)
            return f"`{path}`: {problem}" if problem else None

        found: list[str | None] = run_all(check, files, _NUM_PARALLEL, threading.Event())
        return [sentence for sentence in found if sentence]

    def _problem(self, file: Entry, meter: TransferMeter) -> str | None:
        entry = self._store.stat(file.name)
        if entry is None:
            return "its object is missing"
        if entry.size_bytes != file.size_bytes:
            return f"its object has {entry.size_bytes} bytes, not {file.size_bytes}"
        digest = self._store.sha256_of(file.name, file.size_bytes, meter.add)
        return None if digest == file.sha256 else "its object is damaged"

    def sweep(self, referenced: Callable[[], set[str]], older_than_s: float) -> tuple[int, int]:
        """Remove old objects that neither a version nor a running upload needs."""
        limit_s = time.time() - older_than_s
        # First the objects, then who needs them: what is uploaded in between is never a candidate.
        old = [entry for entry in self._store.entries("objects") if entry.modified_s <= limit_s]
        needed = referenced()
        doomed = [entry for entry in old if entry.name.rsplit("/", 1)[-1] not in needed]
        needed = self._under_way()
        doomed = [entry for entry in doomed if entry.name.rsplit("/", 1)[-1] not in needed]
        names = [entry.name for entry in doomed]
        run_all(self._store.delete, names, _NUM_PARALLEL, threading.Event())
        return len(doomed), sum(entry.size_bytes for entry in doomed)

    def _under_way(self) -> set[str]:
        needed: set[str] = set()
        for entry in self._store.entries("uploads"):
            if entry.modified_s < time.time() - _UPLOAD_LIMIT_S:
                self._store.delete(entry.name)
                continue
            try:
                needed.update(json.loads(self._store.read(entry.name)))
            except FileNotFoundError:  # it has just ended
                continue
            except ValueError as error:
                where = self._store.where(entry.name)
                raise DataError("the note of an upload is damaged", where=where) from error
        return needed


class ObjectUpload:
    """The contents that one upload sends and needs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._note = f"uploads/{secrets.token_hex(8)}.json"
        self._needed: set[str] = set()
        self._sources: dict[str, LocalFile] = {}
        self._stop = threading.Event()

    def add(
        self, files: Sequence[LocalFile], progress: ProgressCallback | None, prefix: str = ""
    ) -> dict[str, Entry]:
        """Send the contents that the store lacks; return the files as a manifest lists them, by path.

        Raises:
            DataError: A file can't be read or keeps changing, or the store can't be written.
        """
        meter = TransferMeter(len(files), sum(file.size_bytes for file in files), progress)
        hashes = run_all(self._hash, files, _NUM_PARALLEL, self._stop)
        self.count_on(digests.sha256 for digests in hashes)
        first = {digests.sha256: file for file, digests in zip(files, hashes, strict=True)}
        there = self._there(first) if len(first) > _NUM_PARALLEL else None

        def send(pair: tuple[LocalFile, copying.Digests]) -> tuple[str, Entry]:
            file, digests = pair
            sent = digests
            if first[digests.sha256] is file:
                sent = self._send(file, digests, there)
            meter.add(digests.size_bytes, files=1)
            source = object_name(sent.sha256)
            return prefix + file.name, stored_file(source, sent.size_bytes, sent.sha256, file.mode)

        pairs = list(zip(files, hashes, strict=True))
        return dict(run_all(send, pairs, _NUM_PARALLEL, self._stop))

    def count_on(self, hashes: Iterable[str | None]) -> None:
        """Protect these contents from a sweep."""
        self._needed.update(sha256 for sha256 in hashes if sha256)
        data = json.dumps(sorted(self._needed)).encode()
        self._store.write(self._note, data)

    def check(self) -> None:
        """Send contents again that a concurrent sweep has removed after we saw them."""
        for sha256, file in self._sources.items():
            if self._store.stat(object_name(sha256)) is None:
                self._send(file, copying.hash_file(file.path), None)

    def end(self) -> None:
        """End the protection: the sweep may remove contents without a version."""
        self._store.delete(self._note)

    def _hash(self, file: LocalFile) -> copying.Digests:
        return retrying(lambda: copying.hash_file(file.path), file.path, stop=self._stop)

    def _there(self, hashes: Iterable[str]) -> set[str]:
        """Return the contents in the store, from a listing: one request for 1,000 objects."""
        wanted = set(hashes)
        listed = self._store.entries("objects")
        return wanted & {entry.name.rsplit("/", 1)[-1] for entry in listed}

    def _send(
        self, file: LocalFile, digests: copying.Digests, there: set[str] | None
    ) -> copying.Digests:
        for _ in range(_MAX_SENDS):
            name = object_name(digests.sha256)
            is_there = digests.sha256 in there if there is not None else False
            if is_there or self._store.stat(name):
                self._sources[digests.sha256] = file
                return digests
            try:
                return self._store.put(file.path, name, sha256=digests.sha256)
            except FileChangedError:
                digests = self._hash(file)
                self.count_on([digests.sha256])
        raise FileChangedError("the file keeps changing", where=file.path)
