"""Versioned datasets in a folder or an object store.

    objects/<2 digits>/<sha256>             each content, stored once
    uploads/<random>.json                   the contents that one running upload needs
    sets/<name>/versions/<n>.json           the manifest: written last, exclusively; the version
    sets/<name>/versions/<n>.deleted        prevents the reuse of a number
    sets/<name>/tags/<tag>                  a version's number
    sets/<name>/labels.json                 labels of the dataset, not of a version

An interrupted upload leaves objects without a manifest; `gc` removes them when they are old.
"""

import hashlib
import json
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from torchmuster.errors import UsageError
from torchmuster.workflow.data import copying
from torchmuster.workflow.data.faults import DataError, retrying
from torchmuster.workflow.data.fetch import fetch_all
from torchmuster.workflow.data.files import (
    NoteCallback,
    ProgressCallback,
    TransferMeter,
    TransferResult,
    check_names,
    compile_regex,
    local_files,
    run_all,
    unsafe_reason,
)
from torchmuster.workflow.data.reference import (
    LATEST,
    Reference,
    check_tag,
    datasets_url,
    parse_reference,
    unknown,
)
from torchmuster.workflow.data.remote import open_store
from torchmuster.workflow.data.store import Entry, FileChangedError, Store
from torchmuster.workflow.data.tree import LocalFile

FORMAT = "muster-dataset-1"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def object_name(sha256: str) -> str:
    """Return the name of the object that stores a content."""
    return f"objects/{sha256[:2]}/{sha256}"


def stored_file(source: str, size_bytes: int, sha256: str, mode: int) -> Entry:
    """Return the entry of a file whose content is the object `source`."""
    return Entry(name=source, size_bytes=size_bytes, tag=sha256, sha256=sha256, mode=mode)


def listed_file(name: str, source: str, size_bytes: Any, sha256: Any, mode: Any) -> Entry:
    """Return a checked file entry, from the values in a manifest.

    Raises:
        ValueError: A name is unsafe, or the checksum, size or mode is invalid.
    """
    is_whole = type(size_bytes) is int and size_bytes >= 0 and type(mode) is int
    if not is_whole or not _SHA256.fullmatch(sha256):
        raise ValueError(f"`{name}` has no checksum, size or mode")
    if reason := unsafe_reason(name) or unsafe_reason(source):
        raise ValueError(f"`{name}`: {reason}")
    return stored_file(source, size_bytes, sha256, mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    """A version of a dataset.

    Attributes:
        name: `[bucket/]NAME`.
        version: The number, counted from 1.
        created: The time, UTC in ISO 8601.
        run_id: The run that made it, if any.
        writer: A random text that distinguishes equal manifests of two writers.
        files: The files by path, sorted, each with the object that has its content.
        metadata: The user's metadata of this version.
    """

    name: str
    version: int
    created: str
    run_id: str | None = None
    writer: str
    files: Mapping[str, Entry]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Return the total size of the files."""
        return sum(file.size_bytes for file in self.files.values())

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of all paths, modes and contents, whatever the version."""
        digest = hashlib.sha256()
        for path, file in self.files.items():
            digest.update(f"{file.sha256} {file.mode or 0:o} {path}\0".encode())
        return digest.hexdigest()

    def plain(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        files = [
            {"path": path, "sha256": f.sha256, "size_bytes": f.size_bytes, "mode": f.mode}
            for path, f in self.files.items()
        ]
        names = ("name", "version", "created", "run_id", "writer")
        first = {name: getattr(self, name) for name in names}
        return {**first, "files": files, "metadata": dict(self.metadata)}


def encode_manifest(manifest: DatasetManifest) -> bytes:
    """Encode a manifest, with the checksum of its files."""
    body = {"format": FORMAT, **manifest.plain(), "checksum": manifest.checksum}
    return json.dumps(body, indent=1, sort_keys=True).encode()


def decode_manifest(data: bytes, where: str) -> DatasetManifest:
    """Decode a manifest.

    Raises:
        DataError: The manifest is damaged.
    """
    try:
        value = json.loads(data)
        if value["format"] != FORMAT:
            raise _damaged(where, f"its format is {value['format']!r}, not `{FORMAT}`")
        manifest = DatasetManifest(
            name=str(value["name"]),
            version=int(value["version"]),
            created=str(value["created"]),
            run_id=value["run_id"],
            writer=str(value["writer"]),
            files=dict(map(_file, value["files"])),
            metadata=dict(value["metadata"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(where, f"{type(error).__name__}: {error}") from error
    if value.get("checksum") != manifest.checksum:
        raise _damaged(where, "its checksum does not match its contents")
    return manifest


def _file(row: Any) -> tuple[str, Entry]:
    path, sha256 = row["path"], row["sha256"]
    return path, listed_file(path, object_name(sha256), row["size_bytes"], sha256, row["mode"])


def _damaged(where: str, why: str) -> DataError:
    fix = "use another version, or upload this one again"
    return DataError("the list of a dataset's files is damaged", where=where, why=why, fix=fix)


# Version numbers: several writers may want the same one.
#
# A local disk links a finished file to the name, and a store accepts `If-None-Match: *`; both give
# a number to one writer only. If a store can do neither, each writer writes a separate claim file
# and then lists the claims. It owns the number if it sees no other claim; otherwise it withdraws
# and retries later. The later of two writers always sees both claims, so two never own the same
# number.


_MAX_TRIES = 1000


def write_next_number(
    store: Store,
    newest: Callable[[], int],
    name_of: Callable[[int], str],
    encode: Callable[[int], bytes],
) -> int:
    """Write `encode(n)` to `name_of(n)` for the first free n above `newest()`; return n.

    Raises:
        DataError: The store can't be written, or other writers take every number.
    """
    number = newest() + 1
    waiter = threading.Event()
    for attempt in range(_MAX_TRIES):
        name, data = name_of(number), encode(number)
        done = store.create(name, data)
        if done is None:
            done = _create_by_claim(store, name, data, number)
        if done:
            return number
        if done is None:  # another writer claims it too
            waiter.wait(random.uniform(0.05, 0.2) * min(attempt + 1, 10))
        else:
            number += 1
        number = max(number, newest() + 1)
    what = "other writers have taken every number that was tried"
    raise DataError(what, where=store.url, may_pass=True)


def _create_by_claim(store: Store, name: str, data: bytes, number: int) -> bool | None:
    """Return True if written, False if the number is taken, None if other writers claim it."""
    folder = f"claims/{name}"
    ours = f"{folder}/{secrets.token_hex(8)}"
    store.write(ours, str(number).encode())
    try:
        others = [entry for entry in store.entries(folder) if entry.name != ours]
        if store.stat(name) is not None:
            return False
        if others:
            return None
        store.write(name, data)
        return True
    finally:
        store.delete(ours)


# Contents of all datasets, stored once under their SHA-256, and the removal of unused ones.


_NUM_PARALLEL = 8
_MAX_SENDS = 3
# An older upload counts as dead.
_UPLOAD_LIMIT_S = 7 * 86400.0


class ObjectUpload:
    """The contents that one upload sends; until its end, `gc` keeps those that it needs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._note = f"uploads/{secrets.token_hex(8)}.json"
        self._needed: set[str] = set()
        self._sources: dict[str, LocalFile] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._store.delete(self._note)

    def add(
        self, files: Sequence[LocalFile], progress: ProgressCallback | None, prefix: str = ""
    ) -> dict[str, Entry]:
        """Send the contents that the store lacks; return the files' manifest entries, by path.

        Raises:
            DataError: A file can't be read or keeps changing, or the store can't be written.
        """
        meter = TransferMeter(len(files), sum(file.size_bytes for file in files), progress)
        hashes = run_all(self._hash, files, _NUM_PARALLEL, self._stop)
        self.protect(digests.sha256 for digests in hashes)
        first = {digests.sha256: file for file, digests in zip(files, hashes, strict=True)}
        there: set[str] | None = None
        if len(first) > _NUM_PARALLEL:  # a listing: one request per 1,000 objects
            there = first.keys() & map(_sha256_in, self._store.entries("objects"))

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

    def protect(self, hashes: Iterable[str | None]) -> None:
        """Let `gc` keep these contents."""
        self._needed.update(sha256 for sha256 in hashes if sha256)
        self._store.write(self._note, json.dumps(sorted(self._needed)).encode())

    def check(self) -> None:
        """Resend contents that a concurrent `gc` has removed since we saw them."""
        for sha256, file in self._sources.items():
            if self._store.stat(object_name(sha256)) is None:
                self._send(file, copying.hash_file(file.path), None)

    def _hash(self, file: LocalFile) -> copying.Digests:
        return retrying(lambda: copying.hash_file(file.path), file.path, stop=self._stop)

    def _send(
        self, file: LocalFile, digests: copying.Digests, there: set[str] | None
    ) -> copying.Digests:
        for _ in range(_MAX_SENDS):
            name = object_name(digests.sha256)
            if (there is not None and digests.sha256 in there) or self._store.stat(name):
                self._sources[digests.sha256] = file
                return digests
            try:
                return self._store.put(file.path, name, sha256=digests.sha256)
            except FileChangedError:
                digests = self._hash(file)
                self.protect([digests.sha256])
        raise FileChangedError("the file keeps changing", where=file.path)


_VERSION = re.compile(r"sets/(.+)/versions/(\d{1,12})\.(json|deleted)")
_TAG = re.compile(r"sets/(.+)/tags/([A-Za-z0-9_-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """A dataset in the list: its versions, oldest first, and when the newest was written."""

    name: str
    versions: tuple[int, ...]
    tags: tuple[str, ...]
    modified_s: float


@dataclass(slots=True)
class DatasetScan:
    """A dataset's versions with their times, the highest version it ever had, and its tags."""

    versions: dict[int, float] = field(default_factory=dict)
    highest: int = 0
    tags: list[str] = field(default_factory=list)


def version_name(name: str, number: int) -> str:
    """Return the name of a version's manifest in the store."""
    return f"sets/{name}/versions/{number}.json"


def scan(store: Store, below: str) -> dict[str, DatasetScan]:
    """Return the datasets in a folder of the store, by name."""
    by_name: dict[str, DatasetScan] = {}
    for entry in store.entries(below):
        if match := _VERSION.fullmatch(entry.name):
            found = by_name.setdefault(match[1], DatasetScan())
            found.highest = max(found.highest, int(match[2]))
            if match[3] == "json":  # during its deletion, a version briefly has both files
                found.versions[int(match[2])] = entry.modified_s
        elif match := _TAG.fullmatch(entry.name):
            by_name.setdefault(match[1], DatasetScan()).tags.append(match[2])
    return by_name


class DatasetStore:
    """All datasets of a store, by default of the store in the settings."""

    def __init__(self, url: str | Store | None = None, *, note: NoteCallback | None = None) -> None:
        where = datasets_url() if url is None else url
        self._store = open_store(where) if isinstance(where, str) else where
        self._note = note
        self.url = self._store.url

    def upload(
        self,
        name: str,
        folder: str,
        *,
        paths: Sequence[str] | None = None,
        regex: str | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        labels: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        keep: bool = False,
        progress: ProgressCallback | None = None,
    ) -> int:
        """Make a new version from a folder's files; return its number.

        With `keep`, the new version also has the files of an older version that are not in the
        folder: of the one that `name` refers to, or of the newest if its tag is new.

        Raises:
            UsageError: The name or a tag is invalid.
            DataError: A file can't be read, or the store can't be written.
        """
        files, sentences = local_files(folder, regex, paths)
        self._say(sentences)
        if not files:
            raise DataError("there is nothing to upload", where=folder, why="no file was chosen")
        with ObjectUpload(self._store) as begun:
            stored = begun.add(files, progress)
            reference = parse_reference(name)
            found = self._find(reference.name)
            if keep and found.versions:
                is_new_tag = reference.tag is not None and reference.tag not in found.tags
                old = self.info(reference.name if is_new_tag else name)
                stored = {**old.files, **stored}
                begun.protect(file.sha256 for file in stored.values())
            return self._publish(name, stored, tags, metadata, labels, run_id, begun.check)

    def update(
        self,
        name: str,
        *,
        add: Sequence[tuple[str, str]] = (),
        remove: str | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        progress: ProgressCallback | None = None,
    ) -> int:
        """Make a new version from an older one; return its number.

        Args:
            name: `NAME` starts from the newest version, `NAME:tag` from the tagged one.
            add: Pairs of a local path and the target folder in the dataset, empty for its top.
            remove: A regex; files whose path matches (`re.match`) are left out.
            tags: The tags of the new version.
            metadata: Updates the metadata of the older version.
            progress: Receives the progress, as in `upload`.

        Raises:
            UsageError: The name or a tag is invalid.
            DataError: There is no such dataset, the new version would be empty, or a file can't be
                read.
        """
        old = self.info(name)
        removes = compile_regex(remove) if remove is not None else lambda path: False
        kept = {path: file for path, file in old.files.items() if not removes(path)}
        with ObjectUpload(self._store) as begun:
            for local, below in add:
                files, sentences = local_files(local)
                self._say(sentences)
                prefix = f"{below.strip('/')}/" if below.strip("/") else ""
                kept |= begun.add(files, progress, prefix)
            if not kept:
                raise DataError("the new version would be empty", where=name)
            begun.protect(file.sha256 for file in kept.values())
            both = {**old.metadata, **(metadata or {})}
            return self._publish(
                parse_reference(name).name, kept, tags, both, None, None, begun.check
            )

    def _publish(
        self,
        name: str,
        files: Mapping[str, Entry],
        tags: Sequence[str],
        metadata: Mapping[str, Any] | None,
        labels: Mapping[str, Any] | None,
        run_id: str | None,
        check: Any,
    ) -> int:
        reference = parse_reference(name)
        if reference.version is not None:
            raise UsageError("the store assigns version numbers", where=name)
        all_tags = [*tags, *([reference.tag] if reference.tag else [])]
        for tag in all_tags:
            check_tag(tag)
        check_names(files, name)
        manifest = DatasetManifest(
            name=reference.name,
            version=0,  # the next free one
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            run_id=run_id,
            writer=secrets.token_hex(8),
            files=dict(sorted(files.items())),
            metadata=metadata or {},
        )
        version = write_next_number(
            self._store,
            lambda: self._find(reference.name).highest,
            lambda number: version_name(reference.name, number),
            lambda number: encode_manifest(replace(manifest, version=number)),
        )
        check()
        for tag in all_tags:
            self.tag(f"{reference.name}:{version}", tag)
        if labels:
            self.set_labels(reference.name, labels)
        return version

    def download(
        self,
        reference: str,
        folder: str,
        *,
        regex: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> TransferResult:
        """Download a version's files into a folder; keep other files there.

        Raises:
            DataError: There is no such dataset, no file matches, or an object is missing or
                damaged.
        """
        matches = compile_regex(regex)
        found = self.info(reference).files
        files = {path: file for path, file in found.items() if matches(path)}
        if not files:
            raise DataError(f"no file of `{reference}` matches `{regex}`", where=self.url)
        return fetch_all(self._store, files, folder, progress=progress, note=self._note)

    def info(self, reference: str) -> DatasetManifest:
        """Return a version's manifest.

        Raises:
            DataError: There is no such dataset or version, or its manifest is damaged.
        """
        wanted = self.resolve(reference)
        manifest, where = self._read(wanted)
        if (manifest.name, manifest.version) != (wanted.name, wanted.version):
            why = f"it says that it is {manifest.name}:{manifest.version}"
            raise DataError("a manifest has the wrong name", where=where, why=why)
        return manifest

    def _read(self, version: Reference) -> tuple[DatasetManifest, str]:
        """Return a version's manifest and its URL."""
        name = version_name(version.name, version.version or 0)
        where = f"{self.url}/{name}"
        return decode_manifest(self._store.read(name), where), where

    def resolve(self, reference: str) -> Reference:
        """Resolve a reference to its version's number.

        Raises:
            DataError: There is no such dataset, tag or version; the message names the nearest one.
        """
        wanted = parse_reference(reference)
        found = self._find(wanted.name)
        if not found.versions:
            known = [summary.name for summary in self.list()]
            raise unknown("dataset", wanted.name, known, self.url)
        version, where = wanted.version, f"{self.url}: {wanted.name}"
        if wanted.tag is not None:
            if wanted.tag not in found.tags:
                raise unknown("tag", wanted.tag, [*found.tags, LATEST], where)
            version = self._tagged(wanted.name, wanted.tag)
        if version is None:
            version = max(found.versions)
        if version not in found.versions:
            numbers = [str(number) for number in sorted(found.versions)]
            raise unknown("version", str(version), numbers, where)
        return Reference(name=wanted.name, version=version)

    def list(self) -> list[DatasetSummary]:
        """Return all datasets, from one listing of the store that reads no manifests."""
        by_name = scan(self._store, "sets")
        return [
            DatasetSummary(
                name=name,
                versions=tuple(sorted(found.versions)),
                tags=tuple(found.tags),
                modified_s=found.versions[max(found.versions)],
            )
            for name, found in sorted(by_name.items())
            if found.versions
        ]

    def tag(self, reference: str, tag: str, *, remove: bool = False) -> None:
        """Set a tag to a version, or remove the tag.

        Raises:
            UsageError: The tag is invalid.
            DataError: There is no such version.
        """
        check_tag(tag)
        wanted = self.resolve(reference)
        name = f"sets/{wanted.name}/tags/{tag}"
        data = json.dumps({"version": wanted.version}).encode()
        if not remove:
            self._store.write(name, data)
            return
        known = self._find(wanted.name).tags
        if tag not in known:
            raise unknown("tag", tag, known, f"{self.url}: {wanted.name}")
        self._store.delete(name)

    def tags_of(self, reference: str) -> Sequence[str]:
        """Return the tags of a version, `latest` included."""
        wanted = self.resolve(reference)
        found = self._find(wanted.name)
        tags = [tag for tag in found.tags if self._tagged(wanted.name, tag) == wanted.version]
        return [*tags, LATEST] if wanted.version == max(found.versions) else tags

    def labels(self, name: str) -> dict[str, Any]:
        """Return a dataset's labels."""
        path = f"sets/{parse_reference(name).name}/labels.json"
        if self._store.stat(path) is None:
            return {}
        value = _json(self._store.read(path), f"{self.url}/{path}")
        return dict(value)

    def set_labels(self, name: str, labels: Mapping[str, Any]) -> None:
        """Update the labels of a dataset; the value None removes a label."""
        both = {**self.labels(name), **labels}
        left = {key: value for key, value in both.items() if value is not None}
        path = f"sets/{parse_reference(name).name}/labels.json"
        self._store.write(path, json.dumps(left).encode())

    def delete(self, reference: str, *, all_versions: bool = False) -> Sequence[int]:
        """Remove one version or all; return their numbers. `gc` removes the contents later.

        Raises:
            UsageError: There are several versions, and no version, tag or `all_versions` was given.
            DataError: There is no such version.
        """
        wanted = parse_reference(reference)
        version = self.resolve(reference).version
        found = self._find(wanted.name)
        doomed = sorted(found.versions) if all_versions else [version or 0]
        is_bare = wanted.version is None and wanted.tag is None
        if is_bare and not all_versions and len(found.versions) > 1:
            what = f"`{wanted.name}` has {len(found.versions)} versions"
            fix = f"name one, `{wanted.name}:{version}`, or choose all of them"
            raise UsageError(what, where=self.url, fix=fix)
        pointing = {tag: self._tagged(wanted.name, tag) for tag in found.tags}
        for number in doomed:
            name = version_name(wanted.name, number)
            grave = name.removesuffix(".json") + ".deleted"
            self._store.write(grave, b"{}")
            self._store.delete(name)
        for tag in [tag for tag, number in pointing.items() if number in doomed]:
            self._store.delete(f"sets/{wanted.name}/tags/{tag}")
        return doomed

    def verify(self, reference: str, progress: ProgressCallback | None = None) -> Sequence[str]:
        """Read every object of a version; return a sentence for each missing or damaged one."""
        files = self.info(reference).files
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

    def gc(self, *, older_than_s: float = 86400.0) -> tuple[int, int]:
        """Remove old contents that no version or running upload needs.

        Returns:
            Their number and size in bytes.

        Raises:
            DataError: A manifest is damaged; nothing is removed.
        """
        limit_s = time.time() - older_than_s
        # List the objects before their users, so that uploads in between are never candidates.
        old = [entry for entry in self._store.entries("objects") if entry.modified_s <= limit_s]
        needed = self._needed_by_uploads()  # first: one that ends meanwhile is a version then
        needed |= self._referenced()
        doomed = [entry for entry in old if _sha256_in(entry) not in needed]
        names = [entry.name for entry in doomed]
        run_all(self._store.delete, names, _NUM_PARALLEL, threading.Event())
        return len(doomed), sum(entry.size_bytes for entry in doomed)

    def _referenced(self) -> set[str]:
        versions = [
            Reference(name=summary.name, version=number)
            for summary in self.list()
            for number in summary.versions
        ]
        found = run_all(self._read, versions, _NUM_PARALLEL, threading.Event())
        return {file.sha256 or "" for manifest, _ in found for file in manifest.files.values()}

    def _needed_by_uploads(self) -> set[str]:
        needed: set[str] = set()
        for entry in self._store.entries("uploads"):
            if entry.modified_s < time.time() - _UPLOAD_LIMIT_S:
                self._store.delete(entry.name)
                continue
            try:
                needed.update(json.loads(self._store.read(entry.name)))
            except FileNotFoundError:  # the upload has just ended
                continue
            except ValueError as error:
                where = self._store.where(entry.name)
                raise DataError("the note of an upload is damaged", where=where) from error
        return needed

    def _find(self, name: str) -> DatasetScan:
        return scan(self._store, f"sets/{name}").get(name, DatasetScan())

    def _tagged(self, name: str, tag: str) -> int:
        where = f"{self.url}/sets/{name}/tags/{tag}"
        data = self._store.read(f"sets/{name}/tags/{tag}")
        version = _json(data, where).get("version")
        if not isinstance(version, int):
            raise DataError("a tag is damaged", where=where, fix="set it again")
        return version

    def _say(self, sentences: Sequence[str]) -> None:
        if self._note is not None:
            for sentence in sentences:
                self._note(sentence)


def _sha256_in(entry: Entry) -> str:
    """Return the checksum in the name of an object."""
    return entry.name.rsplit("/", 1)[-1]


def _json(data: bytes, where: str) -> dict[str, Any]:
    what = "a file of the store is damaged"
    try:
        value = json.loads(data)
    except ValueError as error:
        raise DataError(what, where=where, why=str(error)) from error
    if not isinstance(value, dict):
        raise DataError(what, where=where, why="it is not a JSON object")
    return value
