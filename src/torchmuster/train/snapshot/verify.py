"""Reads a snapshot and determines whether it is good, damaged or unreadable at the moment.

Damage has to be proved: by a checksum, a size, or a file of the manifest that is missing in the folder.
A read error proves nothing: the read is tried again for a while, and then the attempt ends, with all
files unchanged.
"""

import errno
import threading
import time
import zlib
from collections.abc import Callable

import torch

from torchmuster.train.snapshot.folder import Folder, name_of
from torchmuster.train.snapshot.layout import (
    MANIFEST,
    MAX_HEADER_BYTES,
    SnapshotManifest,
    check_first_line,
    decode_manifest,
)
from torchmuster.train.snapshot.state import DamagedError, UnreadableError

_MAX_MANIFEST_BYTES = 1 << 30
_BLOCK_BYTES = 32 << 20
_PATIENCE_S = 60.0
_LONGEST_PAUSE_S = 5.0


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


class Patience:
    """The limit for retrying read errors, over all files of a load."""

    def __init__(
        self,
        report: Callable[[str], None],
        *,
        limit_s: float = _PATIENCE_S,
        wait: Callable[[float], None] = _wait,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._limit_s = limit_s
        self._wait = wait
        self._clock = clock
        self._ends_at: float | None = None
        self._pause_s = 0.5

    def allows(self, error: OSError, path: str) -> bool:
        """Wait before the next try; raise the error when the limit has passed."""
        if isinstance(error, PermissionError):
            return False
        now = self._clock()
        if self._ends_at is None:
            self._ends_at = now + self._limit_s
            self._report(
                f"muster: {path} can't be read ({_words(error)}):"
                f" trying again for up to {self._limit_s:g} s"
            )
        if now >= self._ends_at:
            return False
        self._wait(min(self._pause_s, self._ends_at - now))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


def read_verified(
    folder: Folder, step: int, patience: Patience
) -> tuple[SnapshotManifest, dict[str, torch.Tensor]]:
    """Return a snapshot's manifest and the bytes of its files; no bytes for a sharded one.

    Raises:
        DamagedError: Its contents are proved to have changed.
        UnreadableError: A file could not be read.
    """
    while True:
        try:
            return _read_verified(folder, step)
        except OSError as error:
            path = f"{folder.url}/{name_of(step)}"
            if not patience.allows(error, path):
                raise UnreadableError(
                    f"snapshot {name_of(step)} can't be read",
                    where=path,
                    why=_words(error),
                    fix="nothing was changed: the same files are read again by the next attempt",
                ) from error


def _read_verified(folder: Folder, step: int) -> tuple[SnapshotManifest, dict[str, torch.Tensor]]:
    manifest = read_manifest(folder, step)
    keep = manifest.kind == "whole"
    buffers = {name: read_file(folder, manifest, name, keep=keep) for name in manifest.files}
    return manifest, buffers if keep else {}


def read_manifest(folder: Folder, step: int) -> SnapshotManifest:
    """Return a snapshot's manifest.

    Raises:
        DamagedError: It isn't whole.
        OSError: It can't be read, which proves nothing.
    """
    size = _size(folder, step, MANIFEST)
    if size > _MAX_MANIFEST_BYTES:
        raise DamagedError(f"the manifest has {size} bytes", where=MANIFEST)
    head = bytearray(min(size, MAX_HEADER_BYTES))
    _fill(folder, step, MANIFEST, memoryview(head), 0)
    check_first_line(bytes(head), size)
    raw = bytearray(size)
    _fill(folder, step, MANIFEST, memoryview(raw), 0)
    manifest = decode_manifest(bytes(raw))
    if manifest.step != step:
        raise DamagedError(f"the manifest is that of step {manifest.step}", where=MANIFEST)
    return manifest


def read_file(folder: Folder, manifest: SnapshotManifest, name: str, *, keep: bool) -> torch.Tensor:
    """Return a data file's bytes (`(num_bytes,)` uint8, empty without `keep`), verified.

    Raises:
        DamagedError: Size or checksum differ from the manifest's.
        OSError: It can't be read, which proves nothing.
    """
    entry = manifest.files[name]
    size = _size(folder, manifest.step, name)
    if size != entry.num_bytes:
        raise DamagedError(f"{name} has {size} of {entry.num_bytes} bytes", where=name)
    buffer = torch.empty(entry.num_bytes if keep else 0, dtype=torch.uint8)
    crc = 0
    for begin in range(0, entry.num_bytes, _BLOCK_BYTES):
        length = min(_BLOCK_BYTES, entry.num_bytes - begin)
        block = buffer[begin : begin + length] if keep else torch.empty(length, dtype=torch.uint8)
        view = memoryview(block.numpy())
        _fill(folder, manifest.step, name, view, begin)
        crc = zlib.crc32(view, crc)
    if crc != entry.crc32:
        raise DamagedError(
            f"{name} was changed after it was written",
            where=name,
            why=f"its checksum is {crc:08x}, {entry.crc32:08x} is recorded",
        )
    return buffer


def _size(folder: Folder, step: int, name: str) -> int:
    try:
        return folder.size(step, name)
    except OSError as error:
        if not _proves_damage(error) or step not in folder.steps():  # gone with the whole folder
            raise
        raise DamagedError(f"{name} is missing", where=name, why=_words(error)) from error


def _fill(folder: Folder, step: int, name: str, view: memoryview, begin: int) -> None:
    count = folder.read_into(step, name, view, begin)
    if count != len(view):  # its size was right a moment ago
        raise OSError(errno.EIO, f"{name} ended early")


def _proves_damage(error: OSError) -> bool:
    return isinstance(error, (FileNotFoundError, NotADirectoryError)) or error.errno == errno.ELOOP


def _words(error: OSError) -> str:
    return error.strerror or str(error)
