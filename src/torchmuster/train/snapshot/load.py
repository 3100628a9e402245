"""Loads a snapshot: verifies every byte, takes the newest good one, and the same one on all ranks.

one rank per folder   lists and verifies, and changes nothing
all ranks             learn which rank has the newest; it sends it to all (a whole snapshot)
                      or each reads what it needs (a sharded one, on a shared folder)
one rank per folder   sets aside snapshots proved to be damaged, once a good one is known
"""

import errno
import json
import shlex
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from torchmuster.train.exchange import broadcast_buffer, broadcast_bytes, gather_ints
from torchmuster.train.snapshot.folder import Folder, name_of
from torchmuster.train.snapshot.layout import (
    MANIFEST,
    MAX_HEADER_BYTES,
    SnapshotManifest,
    check_first_line,
    decode_manifest,
    encode_manifest,
    view_of,
)
from torchmuster.train.snapshot.state import (
    DamagedError,
    MisfitError,
    NoGoodSnapshotError,
    SnapshotError,
    UnreadableError,
    dtype_named,
)

# Reads a snapshot and determines whether it is good, damaged or currently unreadable.
#
# Damage has to be proved: by a checksum, a size, or a file of the manifest that is missing in the
# folder. A read error proves nothing: the read is retried for a while, and then the attempt ends
# with all files unchanged.


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
        """Wait before the next try; return False if the error is final or the limit has passed."""
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
        DamagedError: It is incomplete or changed.
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


_NONE, _NONE_GOOD, _UNREADABLE = -1, -2, -3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSnapshot:
    """A verified snapshot.

    Attributes:
        buffers: The bytes of each data file, `(num_bytes,)` uint8; empty for a sharded snapshot.
        parts: Where a sharded one is read from, if not from the folder.
    """

    manifest: SnapshotManifest
    buffers: dict[str, torch.Tensor]
    parts: Any = None

    @property
    def held(self) -> bool:
        """Whether it was in memory."""
        return self.parts is not None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the whole tensors by path; they share memory with the buffers."""
        found = {}
        for path, entry in self.manifest.tensors.items():
            (chunk,) = entry.chunks
            found[path] = view_of(self.buffers[chunk.file], chunk, dtype_named(entry.dtype))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFindings:
    """The result of examining a folder, without changing it.

    Attributes:
        loaded: The newest good snapshot.
        damaged: Newer ones that are damaged, with the proof.
        bad: Names of snapshots that earlier starts have set aside.
    """

    loaded: LoadedSnapshot | None
    damaged: tuple[tuple[int, DamagedError], ...] = ()
    bad: tuple[str, ...] = ()

    @property
    def kind(self) -> int:
        """The step of the good snapshot, or the reason why there is none."""
        if self.loaded is not None:
            return self.loaded.manifest.step
        return _NONE_GOOD if self.damaged or self.bad else _NONE


def look(
    folder: Folder, report: Callable[[str], None], patience: Patience | None = None
) -> FolderFindings:
    """Return the newest good snapshot of a folder, and the newer ones that are damaged.

    Sharded snapshots are verified here too, but not kept in memory.

    Raises:
        UnreadableError: A file could not be read, so its state is unknown.
    """
    patience = patience or Patience(report)
    damaged = []
    for step in folder.steps():
        try:
            manifest, buffers = read_verified(folder, step, patience)
        except DamagedError as error:
            damaged.append((step, error))
            continue
        loaded = LoadedSnapshot(manifest=manifest, buffers=buffers)
        return FolderFindings(loaded=loaded, damaged=tuple(damaged))
    return FolderFindings(loaded=None, damaged=tuple(damaged), bad=tuple(folder.set_aside_names()))


def set_damaged_aside(folder: Folder, found: FolderFindings, report: Callable[[str], None]) -> None:
    """Rename and report snapshots that are proved to be damaged, if a good one is known.

    Raises:
        SnapshotError: The folder can't be written.
    """
    for step, error in found.damaged:
        aside = "" if folder.is_foreign else f"it was set aside as {_set_aside(folder, step)}; "
        report(
            f"error: snapshot {name_of(step)} is damaged\n"
            f"  at: {folder.url}/{name_of(step)}/{error.where}\n"
            f"  because: {error.what}{f' ({error.why})' if error.why else ''}\n"
            f"hint: {aside}the next older good one is loaded"
        )


def _set_aside(folder: Folder, step: int) -> str:
    try:
        return folder.set_aside(step)
    except OSError as error:
        raise SnapshotError(
            f"the damaged snapshot {name_of(step)} can't be set aside",
            where=folder.url,
            why=error.strerror or str(error),
            fix="check that the folder is writable",
        ) from error


def none_good(folder: Folder, found: FolderFindings) -> NoGoodSnapshotError:
    """Return the error on a folder whose snapshots are all damaged."""
    proofs = [f"{name_of(step)}/{error.where}: {error.what}" for step, error in found.damaged]
    proofs += [f"{name} was set aside as damaged before" for name in found.bad]
    return NoGoodSnapshotError(
        "there is no good snapshot to resume from",
        where=folder.url,
        why="; ".join(proofs),
        fix=f"restore a copy; or start over at step 0: {start_over_hint(folder.url)}",
    )


def start_over_hint(url: str) -> str:
    """Return the instruction with which the user can choose to start over."""
    if "://" in url:
        return "choose another folder=..., or move what lies in this one away"
    folder = shlex.quote(url)
    return f"`mv {folder} {folder}-damaged`, then start the run again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The newest good snapshot on disk, which all ranks agree on.

    Attributes:
        age: Its generation and step; (-1, -1) for none.
        owner: The rank that sends it to the others.
        mine: What this rank found.
    """

    age: tuple[int, int]
    owner: int
    mine: LoadedSnapshot | None

    def load(self) -> LoadedSnapshot | None:
        """Return the same snapshot on all ranks; a collective."""
        return _send(self.mine, self.owner) if self.age[1] >= 0 else None


def agree(
    folder: Folder,
    *,
    reads: bool,
    report: Callable[[str], None],
    elsewhere: Callable[[tuple[int, int]], bool] = lambda age: False,
) -> Agreement:
    """Agree on the newest good snapshot of a folder.

    Args:
        folder: This rank's view of the snapshots.
        reads: Whether this rank reads the folder: one rank in all on a shared file system,
            otherwise one per node.
        report: Called with a message for each snapshot that was set aside.
        elsewhere: Returns, equal on all ranks, whether another place has a newer one than this age.

    Raises:
        NoGoodSnapshotError: On all ranks, if there are snapshots and none is good, here or
            elsewhere.
        UnreadableError: On all ranks, if one of them could not read a file.
    """
    found, failure = FolderFindings(loaded=None), None
    if reads:
        try:
            found = look(folder, report)
        except UnreadableError as error:
            failure = error
    mine = _UNREADABLE if failure is not None else found.kind
    generation = found.loaded.manifest.generation if found.loaded is not None else -1
    rows = gather_ints([mine, generation])
    kinds = [row[0] for row in rows]
    best = max(kinds)
    if _UNREADABLE in kinds:
        _raise_together(failure, kinds.index(_UNREADABLE), UnreadableError)
    owner = kinds.index(best)
    age = (rows[owner][1], best) if best >= 0 else (-1, -1)
    is_elsewhere = elsewhere(age)
    if best >= 0:
        set_damaged_aside(folder, found, report)
    elif _NONE_GOOD in kinds and not is_elsewhere:
        hopeless = none_good(folder, found) if mine == _NONE_GOOD else None
        _raise_together(hopeless, kinds.index(_NONE_GOOD), NoGoodSnapshotError)
    return Agreement(age=age, owner=owner, mine=found.loaded)


def _raise_together(mine: SnapshotError | None, source: int, kind: type[SnapshotError]) -> NoReturn:
    """Raise one rank's error on all of them."""
    parts = mine.parts() if mine is not None else {}
    raise kind(**json.loads(broadcast_bytes(json.dumps(parts).encode(), source)))


def _send(found: LoadedSnapshot | None, owner: int) -> LoadedSnapshot:
    raw = broadcast_bytes(encode_manifest(found.manifest) if found else None, owner)
    manifest = decode_manifest(raw)
    if manifest.kind != "whole":
        return LoadedSnapshot(manifest=manifest, buffers={})
    buffers = {}
    for name, entry in manifest.files.items():
        mine = found.buffers.get(name) if found else None
        same = mine is not None and found is not None and found.manifest == manifest
        buffer = (
            mine if same and mine is not None else torch.empty(entry.num_bytes, dtype=torch.uint8)
        )
        buffers[name] = broadcast_buffer(buffer, owner)
    return LoadedSnapshot(manifest=manifest, buffers=buffers)


def check_tensors(
    manifest: SnapshotManifest, wanted: dict[str, tuple[int, ...]], only: tuple[str, ...] = ("",)
) -> None:
    """Refuse a snapshot of another model, naming the differences.

    Args:
        manifest: The manifest of the snapshot.
        wanted: Shapes by path.
        only: Compare only the snapshot's tensors whose path has one of these prefixes.

    Raises:
        SnapshotError: Tensors are missing, left over, or of another shape.
    """
    saved = {p: entry.shape for p, entry in manifest.tensors.items() if p.startswith(only)}
    problems = [
        f"{path}: {list(saved[path])} in the snapshot, {list(wanted[path])} in the script"
        for path in wanted
        if path in saved and saved[path] != wanted[path]
    ]
    problems += [f"{path}: not in the snapshot" for path in wanted if path not in saved]
    problems += [f"{path}: not in the script" for path in saved if path not in wanted]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise MisfitError(
            f"the snapshot of step {manifest.step} is that of another model:"
            f" {len(problems)} tensors differ",
            why="; ".join(problems[:8]) + more,
            fix="restore the model that it was made with, or start over with another folder",
        )
