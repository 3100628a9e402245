"""Download and upload folders, and list, delete or check the files at a URL."""

import os
import secrets
import threading
from dataclasses import replace

from torchmuster.workflow.data import copying
from torchmuster.workflow.data.faults import DataError, explain
from torchmuster.workflow.data.fetch import fetch_all
from torchmuster.workflow.data.files import (
    NoteCallback,
    ProgressCallback,
    TransferMeter,
    TransferResult,
    compile_regex,
    local_files,
    run_all,
)
from torchmuster.workflow.data.remote import open_store
from torchmuster.workflow.data.store import Entry, FileChangedError, LocalStore, Store
from torchmuster.workflow.data.tree import LocalFile

_MAX_SENDS = 3
_NUM_PARALLEL = 8


def download(
    url: str | Store,
    folder: str,
    *,
    regex: str | None = None,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
    num_parallel: int = 8,
) -> TransferResult:
    """Download a URL into a folder; from a folder of checkpoints, the last complete one.

    Args:
        url: A prefix, a folder or one file.
        folder: The target, created if it is missing.
        regex: Applied with `re.match` to the relative path.
        progress: Called after every piece; from several threads, but one call at a time.
        note: Receives messages for the user.
        num_parallel: The number of simultaneous downloads.

    Raises:
        DataError: There is no file, access is denied, a name is unsafe, or a file is damaged.
    """
    store = open_store(url) if isinstance(url, str) else url
    matches = compile_regex(regex)
    files = {name: file for name, file in list_files(store).items() if matches(name)}
    if not files:
        why = f"no file's path matches `{regex}`" if regex else "no file is there"
        raise DataError("there is nothing to download", where=store.url, why=why)
    return fetch_all(store, files, folder, progress=progress, note=note, num_parallel=num_parallel)


def list_files(store: Store) -> dict[str, Entry]:
    """Return the files that a download of this store fetches, by their local name.

    Raises:
        DataError: Access is denied or the store does not answer.
    """
    single = store.stat()
    if single is not None:
        return {os.path.basename(store.url): replace(single, name="")}
    from torchmuster.workflow.data.checkpoint import read_checkpoint, read_pointer

    number = read_pointer(store)
    if number is not None:
        return read_checkpoint(store, number).files
    return {entry.name: entry for entry in store.entries()}


def upload(
    folder: str,
    url: str | Store,
    *,
    regex: str | None = None,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
    num_parallel: int = 8,
) -> TransferResult:
    """Upload a folder (or one file) to a URL; skip equal files that exist there.

    Raises:
        DataError: A symlink points outside the folder, access is denied, or a file keeps changing.
    """
    store = open_store(url) if isinstance(url, str) else url
    files, sentences = local_files(folder, regex)
    for sentence in sentences:
        if note is not None:
            note(sentence)
    if not files:
        why = f"no file's path matches `{regex}`" if regex else "the folder is empty"
        raise DataError("there is nothing to upload", where=folder, why=why)
    there = {entry.name: entry for entry in store.entries()}
    meter = TransferMeter(len(files), sum(file.size_bytes for file in files), progress)
    stop = threading.Event()
    steady = store.trying(stop=stop)

    def send(file: LocalFile) -> copying.Digests | None:
        """Send one file; return its digests, None if it existed."""
        try:
            is_there = _is_complete(store, there.get(file.name), file)
            digests = None if is_there else _send(steady, file)
        except OSError as error:
            raise explain(error, file.path) from error
        meter.add(file.size_bytes, files=1, skipped=int(digests is None))
        return digests

    digests = run_all(send, files, num_parallel, stop)
    _verify(store, {f.name: d for f, d in zip(files, digests, strict=True) if d is not None})
    return meter.result()


def _is_complete(store: Store, entry: Entry | None, file: LocalFile) -> bool:
    if entry is None or entry.size_bytes != file.size_bytes:
        return False
    if isinstance(store, LocalStore):
        return copying.hash_file(file.path) == copying.hash_file(store.local(file.name))
    return entry.md5 is not None and entry.md5 == copying.hash_file(file.path).md5


def _send(store: Store, file: LocalFile) -> copying.Digests:
    for _ in range(_MAX_SENDS):
        before = copying.stamp(file.path)
        digests = store.put(file.path, file.name)
        if copying.stamp(file.path) == before and digests.size_bytes == before.size_bytes:
            return digests
    why = f"it was changed during {_MAX_SENDS} attempts to read it"
    raise FileChangedError("the file keeps changing", where=file.path, why=why)


def _verify(store: Store, sent: dict[str, copying.Digests]) -> None:
    """Compare the sent files with the store's listing."""
    if not sent:
        return
    there = {entry.name: entry for entry in store.entries()}
    for name, digests in sent.items():
        entry, where = there.get(name), store.where(name)
        if entry is None or entry.size_bytes != digests.size_bytes:
            found = "nothing" if entry is None else f"{entry.size_bytes} bytes"
            why = f"{digests.size_bytes} bytes were sent, {found} are there"
            raise DataError("a file did not arrive", where=where, why=why, may_pass=True)
        # Read it, because the ETag of an encrypted object looks like an MD5 but is not one.
        may_differ = entry.md5 not in (None, digests.md5)
        if may_differ and store.sha256_of(name, entry.size_bytes) != digests.sha256:
            why = "its checksum in the store differs from what was sent"
            raise DataError("a file arrived damaged", where=where, why=why, may_pass=True)


def find_files(url: str, regex: str | None = None) -> list[str]:
    """Return the names of the matching files at a URL; an empty name if the URL is a file itself.

    Raises:
        DataError: The URL can't be read.
    """
    store = open_store(url)
    matches = compile_regex(regex)
    if store.stat() is not None:
        return [""]
    return [entry.name for entry in store.entries() if matches(entry.name)]


def delete_files(url: str, names: list[str]) -> None:
    """Remove files; missing ones are no error.

    Raises:
        DataError: Access is denied or the store does not answer.
    """
    run_all(open_store(url).delete, names, _NUM_PARALLEL, threading.Event())


def check_access(url: str, access: str = "READ") -> None:
    """Try an access: READ, WRITE or DELETE; the last two write a small probe file.

    Raises:
        DataError: The access failed, with the reason.
    """
    store = open_store(url).trying(2)  # a user waits for the answer
    if access == "READ":
        store.check()
        return
    probe = f".muster-check-{secrets.token_hex(8)}"
    store.write(probe, b"muster")
    try:
        store.delete(probe)
    except DataError:
        # Users who may write may not be allowed to delete; then the probe stays.
        if access == "DELETE":
            raise
