"""Upload a task's checkpoints while it runs, each complete or absent, and keep the last three.

A file that changes while it is read is never part of a checkpoint: its stamp (size, time of change,
inode) must be equal before the first read and after the second, and both reads must have the same
SHA-256. A folder of checkpoints has

    CHECKPOINT.json                 written last: the number and the manifest's name
    checkpoint-<n>.json             the manifest: every file's name, object, size, SHA-256, mode
    checkpoint-<n>-<random>/<name>  the files; later manifests refer to unchanged ones
"""

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from torchmuster.workflow.data import copying
from torchmuster.workflow.data.dataset import listed_file, stored_file, write_next_number
from torchmuster.workflow.data.faults import DataError, explain
from torchmuster.workflow.data.files import NoteCallback, compile_regex, local_files
from torchmuster.workflow.data.remote import open_store
from torchmuster.workflow.data.store import Entry, FileChangedError, Store
from torchmuster.workflow.data.tree import LocalFile

POINTER = "CHECKPOINT.json"
FORMAT = "muster-checkpoint-1"
_NUMBERED = re.compile(r"checkpoint-(\d{1,12})\.json")
_FOLDER = re.compile(r"checkpoint-(\d{1,12})-[0-9a-f]{8}/.+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: its files by name, each with its object."""

    number: int
    created: str
    files: dict[str, Entry]


def manifest_name(number: int) -> str:
    """Return the name of a checkpoint's manifest."""
    return f"checkpoint-{number}.json"


def read_pointer(store: Store) -> int | None:
    """Return the number of the last complete checkpoint; None without one.

    Raises:
        DataError: The pointer is damaged.
    """
    if store.stat(POINTER) is None:
        return None
    number = _read(store, POINTER).get("number")
    if not isinstance(number, int):
        raise _damaged(store, POINTER, "it holds no number")
    return number


def read_checkpoint(store: Store, number: int) -> Checkpoint:
    """Read a checkpoint's manifest.

    Raises:
        DataError: The manifest is missing or damaged.
    """
    name = manifest_name(number)
    value = _read(store, name)
    try:
        files = dict(map(_file, value["files"]))
        return Checkpoint(number=number, created=str(value["created"]), files=files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(store, name, f"{type(error).__name__}: {error}") from error


def _file(row: Any) -> tuple[str, Entry]:
    name = row["name"]
    return name, listed_file(name, row["object"], row["size_bytes"], row["sha256"], row["mode"])


def _read(store: Store, name: str) -> dict[str, Any]:
    data = store.read(name)
    try:
        value = json.loads(data)
    except ValueError as error:
        raise _damaged(store, name, str(error)) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _damaged(store, name, f"its format is not `{FORMAT}`")
    return value


def _damaged(store: Store, name: str, why: str) -> DataError:
    return DataError(
        "the list of a checkpoint's files is damaged", where=store.where(name), why=why
    )


NUM_KEPT = 3
# A file changed more recently may be written again without a new time of change.
_SETTLED_S = 0.1
_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUpload:
    """The result of one upload; `number` is None when there was nothing new to upload."""

    number: int | None
    num_files: int
    sent_bytes: int


class CheckpointUploader:
    """Uploads the files in a path repeatedly.

    Args:
        path: A folder or a file; it need not exist yet.
        url: The folder of the checkpoints.
        frequency_s: The pause between two uploads, in seconds.
        regex: Applied with `re.match` to the relative path.
        note: Receives messages for the user.
        settle_s: The maximum wait for files that are being written, in seconds.
    """

    def __init__(
        self,
        path: str,
        url: str | Store,
        frequency_s: float,
        regex: str | None = None,
        *,
        note: NoteCallback | None = None,
        settle_s: float = _LONGEST_WAIT_S,
    ) -> None:
        compile_regex(regex)
        self._path = path
        self._store = open_store(url) if isinstance(url, str) else url
        self._frequency_s = frequency_s
        self._regex = regex
        self._note = note or (lambda sentence: None)
        self._settle_s = settle_s
        self._stop = threading.Event()  # `run` has its caller's

    def run(
        self, stop: threading.Event, done: Callable[[CheckpointUpload], None] | None = None
    ) -> CheckpointUpload:
        """Upload until `stop` is set, then once more; return the last round.

        If a round fails, report the error and try again in the next one.

        Raises:
            DataError: The last round failed.
        """
        self._stop = stop
        while not stop.wait(self._frequency_s):
            try:
                result = self.upload_once()
            except DataError as error:
                why = f" ({error.why})" if error.why else ""
                self._note(f"the checkpoint was not uploaded: {error.what}{why}; retrying")
                continue
            if done is not None:
                done(result)
        self._stop = threading.Event()  # the last round waits for files that are being written
        return self.upload_once()

    def upload_once(self) -> CheckpointUpload:
        """Upload a checkpoint unless the last one has the same files.

        Raises:
            DataError: The store can't be written to, or a file keeps changing.
        """
        try:
            return self._upload()
        except OSError as error:
            raise explain(error, self._store.url) from error

    def _upload(self) -> CheckpointUpload:
        files = self._files()
        if not files:
            return CheckpointUpload(number=None, num_files=0, sent_bytes=0)
        last = read_pointer(self._store)
        known = {} if last is None else read_checkpoint(self._store, last).files
        folder = f"checkpoint-{self._newest() + 1}-{secrets.token_hex(4)}"
        sent: list[str] = []
        try:
            stored = self._send_all(files, known, folder, sent)
            if not stored or stored == known:
                return CheckpointUpload(number=None, num_files=len(stored), sent_bytes=0)
            number = self._claim(stored)
        except BaseException:
            self._discard(sent)
            raise
        current = read_pointer(self._store)
        if current is None or current < number:
            pointer = {"format": FORMAT, "number": number, "manifest": manifest_name(number)}
            self._store.write(POINTER, json.dumps(pointer).encode())
        ours = [file for name, file in stored.items() if file.name == f"{folder}/{name}"]
        sent_bytes = sum(file.size_bytes for file in ours)
        self._prune(number)
        return CheckpointUpload(number=number, num_files=len(stored), sent_bytes=sent_bytes)

    def _files(self) -> list[LocalFile]:
        return local_files(self._path, self._regex)[0] if os.path.exists(self._path) else []

    def _send_all(
        self, files: list[LocalFile], known: dict[str, Entry], folder: str, sent: list[str]
    ) -> dict[str, Entry]:
        """Send all files; retry those that are being written, until the time limit."""
        deadline_s = time.monotonic() + self._settle_s
        stored: dict[str, Entry] = {}
        waiting = files
        while waiting:
            busy: list[LocalFile] = []
            for file in waiting:
                done = self._send(file, known.get(file.name), folder, sent)
                if done is None:
                    busy.append(file)
                else:
                    stored[file.name] = done
            if busy and (self._stop.is_set() or time.monotonic() >= deadline_s):
                what = f"`{busy[0].name}` keeps changing, so this checkpoint was skipped"
                fix = "write to another name, then rename it (os.replace)"
                raise FileChangedError(what, where=self._path, fix=fix, may_pass=True)
            if busy:
                self._stop.wait(_SETTLED_S)
            names = {file.name for file in busy}  # skips files that are gone by now
            waiting = [file for file in self._files() if file.name in names]
        return stored

    def _send(
        self, file: LocalFile, known: Entry | None, folder: str, sent: list[str]
    ) -> Entry | None:
        """Send one file; return None if it is being written."""
        try:
            before = copying.stamp(file.path)
            if 0 <= time.time() - before.mtime_ns / 1e9 < _SETTLED_S:
                return None
            digests = copying.hash_file(file.path)
            object_name = f"{folder}/{file.name}"
            if known is not None and known.sha256 == digests.sha256:
                object_name = known.name
                if copying.hash_file(file.path) != digests:
                    return None
            else:
                sent.append(object_name)
                self._store.put(file.path, object_name, sha256=digests.sha256)
            if copying.stamp(file.path) != before:
                return None
        except (FileNotFoundError, FileChangedError):
            return None  # removed, or replaced by a rename between two checks
        return stored_file(object_name, digests.size_bytes, digests.sha256, file.mode)

    def _claim(self, stored: dict[str, Entry]) -> int:
        """Write the manifest under the next free number; return that."""
        created = datetime.now(UTC).isoformat(timespec="microseconds")
        files = [
            {
                "name": name,
                "object": file.name,
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "mode": file.mode,
            }
            for name, file in sorted(stored.items())
        ]

        def encode(number: int) -> bytes:
            value = {"format": FORMAT, "number": number, "created": created, "files": files}
            return json.dumps(value, indent=1).encode()

        return write_next_number(self._store, self._newest, manifest_name, encode)

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        found = (_NUMBERED.fullmatch(entry.name) for entry in self._store.entries())
        return sorted(int(match[1]) for match in found if match)

    def _prune(self, number: int) -> None:
        """Remove older checkpoints: first their manifests, then objects that no manifest names."""
        try:
            numbers = self._numbers()
            for old in [one for one in numbers if one <= number][:-NUM_KEPT]:
                self._store.delete(manifest_name(old))
            kept = [read_checkpoint(self._store, one) for one in self._numbers()]
            needed = {file.name for one in kept for file in one.files.values()}
            oldest = min(one.number for one in kept)
            for entry in self._store.entries():
                # Newer folders can belong to another writer's running upload.
                begun = _FOLDER.fullmatch(entry.name)
                if begun and int(begun[1]) <= oldest and entry.name not in needed:
                    self._store.delete(entry.name)
        except (OSError, DataError) as error:
            self._note(f"old checkpoints were not removed: {error}")

    def _discard(self, sent: list[str]) -> None:
        for name in sent:
            try:
                self._store.delete(name)
            except OSError as error:
                self._note(f"a file of a skipped checkpoint was not removed: {error}")
                return
