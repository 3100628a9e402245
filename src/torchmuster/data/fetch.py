"""Bringing single files from a place to a folder: in ranges, resumed, verified, whole or not there."""

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.data import copying
from torchmuster.data.faults import DataError, explain, retrying
from torchmuster.data.names import check_names, target_path
from torchmuster.data.place import LocalPlace, Store
from torchmuster.data.progress import Moved, NoteCallback, ProgressCallback, TransferMeter, run_all
from torchmuster.data.record import DownloadRecord, Finished

_MAX_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file to be fetched.

    Attributes:
        name: What it is called in the folder.
        source: Its name in the place.
        size_bytes: Its size.
        tag: What changes with its content.
        sha256: Its checksum, where a manifest tells it.
        md5: Its MD5, where the store tells it.
        mode: Permission bits, where they are known.
    """

    name: str
    source: str
    size_bytes: int
    tag: str
    sha256: str | None = None
    md5: str | None = None
    mode: int | None = None


def fetch_all(
    place: Store,
    items: Sequence[Item],
    folder: str,
    *,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
    num_parallel: int = 8,
) -> Moved:
    """Bring files into a folder; those that are there and whole are skipped.

    Raises:
        DataError: A name is unsafe, a file can't be read or written, or is damaged in the store.
    """
    check_names([item.name for item in items], place.url)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise explain(error, folder) from error
    record = DownloadRecord(folder)
    record.open()
    if record.problem and note:
        note(f"{record.problem}: a download that is cut short starts from its last whole file")
    meter = TransferMeter(len(items), sum(item.size_bytes for item in items), progress)
    fetcher = _Fetcher(place, folder, record, meter, note)
    try:
        run_all(fetcher.fetch, items, num_parallel, fetcher.stop)
    finally:
        record.close()
    return meter.result()


class _Fetcher:
    def __init__(
        self,
        place: Store,
        folder: str,
        record: DownloadRecord,
        meter: TransferMeter,
        note: NoteCallback | None,
    ) -> None:
        self._place = place
        self._folder = folder
        self._record = record
        self._meter = meter
        self._note = note
        self.stop = threading.Event()

    def fetch(self, item: Item) -> None:
        """Bring one file, unless it is there."""
        url = f"{self._place.url}/{item.source}".rstrip("/")
        try:
            path = target_path(self._folder, item.name)
            if self._is_there(item, path):
                self._meter.add(item.size_bytes, files=1, skipped=1)
                return
            folder, base = os.path.split(path)
            part = os.path.join(folder, f".{base[:200]}.muster.part")
            sha256 = self._bring(item, part, url)
            if item.mode is not None:
                os.chmod(part, item.mode & 0o777)
            os.replace(part, path)
        except OSError as error:
            raise explain(error, url) from error
        stamp = copying.stamp(path)
        done = Finished(source=url, tag=item.tag, sha256=sha256, stamp=stamp)
        self._record.finish(item.name, done)
        self._meter.add(files=1)

    def _is_there(self, item: Item, path: str) -> bool:
        if not os.path.isfile(path) or os.path.getsize(path) != item.size_bytes:
            return False
        done = self._record.finished.get(item.name)
        if done is not None and done.stamp == copying.stamp(path) and done.tag == item.tag:
            return True
        if item.sha256 is None and item.md5 is None:
            return False
        digests = copying.hash_file(path)
        return digests.sha256 == item.sha256 or digests.md5 == item.md5

    def _bring(self, item: Item, part: str, url: str) -> str | None:
        """Fill the `.part` file; return the SHA-256 of what it holds, None for a plain local copy."""
        if isinstance(self._place, LocalPlace):
            return self._copy(self._place, item, part)
        before: str | None = None
        for round_number in range(_MAX_ROUNDS):
            self._read_ranges(item, part, url, from_start=round_number > 0)
            digests = copying.hash_file(part)
            if digests.size_bytes != item.size_bytes or self._has_changed(item, url):
                _unlink(part)
                what = "the file was changed in the store while it was read"
                raise DataError(what, where=url, may_pass=True)
            if _fits(item, digests):
                return digests.sha256
            if item.sha256 is None and digests.sha256 == before:
                # Encrypted objects have an ETag that looks like an MD5 and is none.
                if self._note:
                    self._note(f"{item.name}: the store's ETag is no MD5; two reads were equal")
                return digests.sha256
            before = digests.sha256
            self._meter.add(-item.size_bytes)
        _unlink(part)
        why = f"its checksum should be {item.sha256 or item.md5}"
        raise DataError("the file is damaged in the store", where=url, why=why)

    def _copy(self, place: LocalPlace, item: Item, part: str) -> str | None:
        source = place.local(item.source)
        for _ in range(_MAX_ROUNDS):
            before = copying.stamp(source)
            copying.copy_in_kernel(source, part)
            if copying.stamp(source) == before and os.path.getsize(part) == before.size_bytes:
                break
        else:
            _unlink(part)
            raise DataError("the file keeps changing", where=source, may_pass=True)
        self._meter.add(item.size_bytes)
        if item.sha256 is None:
            return None
        digests = copying.hash_file(part)
        if digests.size_bytes != item.size_bytes:
            why = f"it has {digests.size_bytes} bytes, and its manifest says {item.size_bytes}"
        elif digests.sha256 != item.sha256:
            why = f"its checksum should be {item.sha256}"
        else:
            return item.sha256
        _unlink(part)
        raise DataError("the file is damaged in the store", where=source, why=why)

    def _read_ranges(self, item: Item, part: str, url: str, *, from_start: bool) -> None:
        known = self._record.parts.get(item.name) == (url, item.tag)
        keep = known and not from_start and os.path.isfile(part)
        begin = os.path.getsize(part) if keep else 0
        if begin > item.size_bytes:
            begin = 0
        self._record.begin(item.name, url, item.tag)
        self._record.parts[item.name] = (url, item.tag)
        self._meter.add(begin)
        with open(part, "ab" if begin else "wb", buffering=0) as file:
            while begin < item.size_bytes:
                if self.stop.is_set():
                    raise DataError("the transfer was ended", where=url, may_pass=True)
                end = min(begin + copying.CHUNK_BYTES, item.size_bytes)
                data = self._range(item.source, begin, end, url)
                file.write(data)
                begin += len(data)
                self._meter.add(len(data))

    def _range(self, source: str, begin: int, end: int, url: str) -> bytes:
        def work() -> bytes:
            data = self._place.read(source, begin, end)
            if not 0 < len(data) <= end - begin:
                raise ConnectionError(f"{len(data)} bytes came of {end - begin}")
            return data

        return retrying(work, url, stop=self.stop)

    def _has_changed(self, item: Item, url: str) -> bool:
        """Look again, where ranges of two versions could have been put together."""
        if item.sha256 is not None or item.size_bytes <= copying.CHUNK_BYTES:
            return False
        entry = retrying(lambda: self._place.stat(item.source), url, stop=self.stop)
        return entry is None or entry.tag != item.tag


def _fits(item: Item, digests: copying.Digests) -> bool:
    if item.sha256 is not None:
        return digests.sha256 == item.sha256
    return item.md5 is None or digests.md5 == item.md5


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
