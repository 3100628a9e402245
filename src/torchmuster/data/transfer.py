"""Downloads and uploads of whole folders."""

import hashlib
import os
import threading
from dataclasses import replace

from torchmuster.data import copying
from torchmuster.data.faults import DataError, retrying
from torchmuster.data.fetch import Item, fetch_all
from torchmuster.data.names import LocalFile, compile_regex, local_files
from torchmuster.data.place import Entry, FileChangedError, LocalPlace, Store
from torchmuster.data.pointer import checkpoint_items
from torchmuster.data.progress import Moved, NoteCallback, ProgressCallback, TransferMeter, run_all
from torchmuster.data.steady import SteadyPlace
from torchmuster.data.urls import open_place

_MAX_SENDS = 3


def download(
    url: str | Store,
    folder: str,
    *,
    regex: str | None = None,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
    num_parallel: int = 8,
) -> Moved:
    """Bring what is at a URL into a folder; a folder of checkpoints gives its last whole one.

    Args:
        url: A prefix, a folder or one file.
        folder: It is made when it is missing.
        regex: `re.match` on the relative path.
        progress: Called after every piece, from several threads, one at a time.
        note: Called with sentences that a user should see.
        num_parallel: Files at the same time.

    Raises:
        DataError: Nothing is there, access is denied, a name is unsafe, a file is damaged.
    """
    place = open_place(url) if isinstance(url, str) else url
    matches = compile_regex(regex)
    items = [item for item in list_items(place) if matches(item.name)]
    if not items:
        raise DataError(
            "there is nothing to download",
            where=place.url,
            why=f"no file's path matches `{regex}`" if regex else "no file is there",
        )
    return fetch_all(place, items, folder, progress=progress, note=note, num_parallel=num_parallel)


def list_items(place: Store) -> list[Item]:
    """Return the files that a download of this place brings.

    Raises:
        DataError: Access is denied or the store does not answer.
    """
    single = retrying(place.stat, place.url)
    if single is not None:
        return [replace(_item(single), name=os.path.basename(place.url), source="")]
    of_checkpoint = checkpoint_items(place)
    if of_checkpoint is not None:
        return of_checkpoint
    return [_item(entry) for entry in retrying(place.entries, place.url)]


def _item(entry: Entry) -> Item:
    return Item(
        name=entry.name,
        source=entry.name,
        size_bytes=entry.size_bytes,
        tag=entry.tag,
        md5=entry.md5,
        mode=entry.mode,
    )


def upload(
    folder: str,
    url: str | Store,
    *,
    regex: str | None = None,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
    num_parallel: int = 8,
) -> Moved:
    """Send a folder (or one file) to a URL; files that are there already are skipped.

    Raises:
        DataError: A symlink leads out of the folder, access is denied, a file keeps changing.
    """
    place = open_place(url) if isinstance(url, str) else url
    files, sentences = local_files(folder, regex)
    for sentence in sentences:
        if note is not None:
            note(sentence)
    if not files:
        why = f"no file's path matches `{regex}`" if regex else "the folder is empty"
        raise DataError("there is nothing to upload", where=folder, why=why)
    there = {entry.name: entry for entry in retrying(place.entries, place.url)}
    meter = TransferMeter(len(files), sum(file.size_bytes for file in files), progress)
    sender = _Sender(place, there, meter)
    digests = run_all(sender.send, files, num_parallel, sender.stop)
    _verify(place, {f.name: d for f, d in zip(files, digests, strict=True) if d is not None})
    return meter.result()


class _Sender:
    def __init__(self, place: Store, there: dict[str, Entry], meter: TransferMeter) -> None:
        self._place = place
        self._there = there
        self._meter = meter
        self.stop = threading.Event()

    def send(self, file: LocalFile) -> copying.Digests | None:
        """Send one file; return what was sent, None when it was there."""
        if self._is_there(file):
            self._meter.add(file.size_bytes, files=1, skipped=1)
            return None
        digests = retrying(lambda: self._send(file), file.path, stop=self.stop)
        self._meter.add(file.size_bytes, files=1)
        return digests

    def _is_there(self, file: LocalFile) -> bool:
        entry = self._there.get(file.name)
        if entry is None or entry.size_bytes != file.size_bytes:
            return False
        if isinstance(self._place, LocalPlace):
            ours, theirs = (
                copying.hash_file(path) for path in (file.path, self._place.local(file.name))
            )
            return ours == theirs
        return entry.md5 is not None and entry.md5 == copying.hash_file(file.path).md5

    def _send(self, file: LocalFile) -> copying.Digests:
        for _ in range(_MAX_SENDS):
            before = copying.stamp(file.path)
            digests = self._place.put(file.path, file.name)
            if copying.stamp(file.path) == before and digests.size_bytes == before.size_bytes:
                return digests
        why = f"it was written to during {_MAX_SENDS} attempts to read it"
        raise FileChangedError("the file keeps changing", where=file.path, why=why)


def _verify(place: Store, sent: dict[str, copying.Digests]) -> None:
    """Compare with the store's own listing what was sent."""
    if not sent:
        return
    there = {entry.name: entry for entry in retrying(place.entries, place.url)}
    for name, digests in sent.items():
        entry = there.get(name)
        if entry is None or entry.size_bytes != digests.size_bytes:
            found = "nothing" if entry is None else f"{entry.size_bytes} bytes"
            why = f"{digests.size_bytes} bytes were sent, {found} are there"
            raise DataError(
                "a file did not arrive", where=f"{place.url}/{name}", why=why, may_pass=True
            )
        if entry.md5 not in (None, digests.md5) and not _reads_back(place, name, digests):
            why = "its checksum in the store differs from what was sent"
            where = f"{place.url}/{name}"
            raise DataError("a file arrived damaged", where=where, why=why, may_pass=True)


def _reads_back(place: Store, name: str, digests: copying.Digests) -> bool:
    """Read it: the ETag of an encrypted object looks like an MD5 and is none."""
    steady, sha256 = SteadyPlace(place), hashlib.sha256()
    for begin in range(0, digests.size_bytes, copying.CHUNK_BYTES):
        end = min(begin + copying.CHUNK_BYTES, digests.size_bytes)
        sha256.update(steady.read(name, begin, end))
    return sha256.hexdigest() == digests.sha256
