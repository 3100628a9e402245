"""Upload a task's checkpoints while it runs, each complete or absent, and keep the last three.

A file that changes while it is read is never part of a checkpoint: its stamp (size, time of change,
inode) must be equal before the first read and after the second, and both reads must have the same
SHA-256.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from torchmuster.launcher.files.tree import LocalFile
from torchmuster.workflow.data import copying, pointer
from torchmuster.workflow.data.dataset import write_next_number
from torchmuster.workflow.data.faults import DataError, explain
from torchmuster.workflow.data.manifest import stored_file
from torchmuster.workflow.data.names import compile_regex, local_files
from torchmuster.workflow.data.pointer import Checkpoint
from torchmuster.workflow.data.progress import NoteCallback
from torchmuster.workflow.data.remote import open_store
from torchmuster.workflow.data.store import Entry, FileChangedError, Store

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
        last = self._last()
        known = last.files if last else {}
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
        self._point_to(number)
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
        created = datetime.now(UTC).isoformat(timespec="microseconds")

        def encode(number: int) -> bytes:
            return pointer.encode(Checkpoint(number=number, created=created, files=stored))

        return write_next_number(self._store, self._newest, pointer.manifest_name, encode)

    def _point_to(self, number: int) -> None:
        current = pointer.read_pointer(self._store)
        if current is None or current < number:
            data = pointer.encode_pointer(number)
            self._store.write(pointer.POINTER, data)

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        entries = self._store.entries()
        found = (pointer.number_of(entry.name) for entry in entries)
        return sorted(number for number in found if number is not None)

    def _last(self) -> Checkpoint | None:
        number = pointer.read_pointer(self._store)
        return None if number is None else pointer.read_checkpoint(self._store, number)

    def _prune(self, number: int) -> None:
        """Remove older checkpoints: first their manifests, then objects that no manifest names."""
        try:
            numbers = self._numbers()
            for old in [one for one in numbers if one <= number][:-NUM_KEPT]:
                self._store.delete(pointer.manifest_name(old))
            kept = [pointer.read_checkpoint(self._store, one) for one in self._numbers()]
            needed = {file.name for one in kept for file in one.files.values()}
            oldest = min(one.number for one in kept)
            for entry in self._store.entries():
                # Newer folders can belong to another writer's running upload.
                begun = pointer.folder_number(entry.name)
                if begun is not None and begun <= oldest and entry.name not in needed:
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
