"""Read a snapshot: every byte verified, the newest good one taken, the same one on all ranks.

one rank a folder     lists, verifies, sets damaged ones aside
all ranks             learn who has the newest; its owner sends it to all (a whole snapshot)
                      or each reads what it needs (a sharded one, on a shared folder)
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchmuster.train.exchange import broadcast_buffer, broadcast_bytes, gather_ints
from torchmuster.train.snapshot.folder import Folder, name_of
from torchmuster.train.snapshot.layout import (
    MANIFEST,
    Manifest,
    decode_manifest,
    encode_manifest,
    view_of,
)
from torchmuster.train.snapshot.state import DamagedError, SnapshotError, dtype_named

_MAX_MANIFEST_BYTES = 1 << 30
_BLOCK_BYTES = 32 << 20
_NONE, _FAILED = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A verified snapshot.

    Attributes:
        buffers: The bytes of each data file, `(num_bytes,)` uint8; empty for a sharded snapshot.
    """

    manifest: Manifest
    buffers: dict[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the whole tensors by path; they share memory with the buffers."""
        found = {}
        for path, entry in self.manifest.tensors.items():
            (chunk,) = entry.chunks
            found[path] = view_of(self.buffers[chunk.file], chunk, dtype_named(entry.dtype))
        return found


def read_manifest(folder: Folder, step: int) -> Manifest:
    """Return a snapshot's manifest.

    Raises:
        DamagedError: It isn't whole.
    """
    try:
        size = folder.size(step, MANIFEST)
        if size > _MAX_MANIFEST_BYTES:
            raise DamagedError(f"the manifest has {size} bytes", where=MANIFEST)
        raw = bytearray(size)
        count = folder.read_into(step, MANIFEST, memoryview(raw))
    except OSError as error:
        raise DamagedError(
            "the manifest can't be read", where=MANIFEST, why=error.strerror or str(error)
        ) from error
    manifest = decode_manifest(bytes(raw[:count]))
    if manifest.step != step:
        raise DamagedError(f"the manifest is that of step {manifest.step}", where=MANIFEST)
    return manifest


def read_file(folder: Folder, manifest: Manifest, name: str, *, keep: bool) -> torch.Tensor:
    """Return a data file's bytes (`(num_bytes,)` uint8, empty without `keep`), verified.

    Raises:
        DamagedError: Size or checksum differ from the manifest's.
    """
    entry = manifest.files[name]
    try:
        size = folder.size(manifest.step, name)
        if size != entry.num_bytes:
            raise DamagedError(f"{name} has {size} of {entry.num_bytes} bytes", where=name)
        buffer = torch.empty(entry.num_bytes if keep else 0, dtype=torch.uint8)
        crc = 0
        for begin in range(0, entry.num_bytes, _BLOCK_BYTES):
            length = min(_BLOCK_BYTES, entry.num_bytes - begin)
            block = (
                buffer[begin : begin + length] if keep else torch.empty(length, dtype=torch.uint8)
            )
            view = memoryview(block.numpy())
            if folder.read_into(manifest.step, name, view, begin) != length:
                raise DamagedError(f"{name} ended early", where=name)
            crc = zlib.crc32(view, crc)
    except OSError as error:
        raise DamagedError(
            f"{name} can't be read", where=name, why=error.strerror or str(error)
        ) from error
    if crc != entry.crc32:
        raise DamagedError(
            f"{name} was changed after it was written",
            where=name,
            why=f"its checksum is {crc:08x}, {entry.crc32:08x} was written down",
        )
    return buffer


def read_newest(folder: Folder, report: Callable[[str], None]) -> Loaded | None:
    """Return the newest good snapshot of a folder; damaged ones are set aside and reported.

    Sharded snapshots are verified here too, but not kept in memory.

    Raises:
        SnapshotError: There are snapshots, and none is good.
    """
    damaged = []
    for step in folder.steps():
        try:
            manifest = read_manifest(folder, step)
            keep = manifest.kind == "whole"
            buffers = {
                name: read_file(folder, manifest, name, keep=keep) for name in manifest.files
            }
            return Loaded(manifest=manifest, buffers=buffers if keep else {})
        except DamagedError as error:
            name = _set_aside(folder, step)
            damaged.append(f"{name_of(step)}/{error.where}: {error.what}")
            report(
                f"error: snapshot {name_of(step)} is damaged\n"
                f"  at: {folder.url}/{name_of(step)}/{error.where}\n"
                f"  because: {error.what}{f' ({error.why})' if error.why else ''}\n"
                f"hint: it was set aside as {name}; the next older one is tried"
            )
    if damaged:
        raise SnapshotError(
            "there is no good snapshot to resume from",
            where=folder.url,
            why="; ".join(damaged),
            fix="restore a copy, or begin anew by choosing another folder",
        )
    return None


def _set_aside(folder: Folder, step: int) -> str:
    try:
        return folder.set_aside(step)
    except OSError as error:
        raise SnapshotError(
            f"the damaged snapshot {name_of(step)} can't be set aside",
            where=folder.url,
            why=error.strerror or str(error),
            fix="see that the folder is writable",
        ) from error


def load_agreed(
    folder: Folder, *, rank: int, reads: bool, report: Callable[[str], None]
) -> Loaded | None:
    """Return the same newest good snapshot on all ranks; None when there is none.

    Args:
        folder: This rank's view of the snapshots.
        rank: Of this process.
        reads: Whether this rank looks into the folder: one rank in all on a shared file system,
            one a node otherwise.
        report: Gets a message for each snapshot that was set aside.

    Raises:
        SnapshotError: On all ranks, when one of them found no good snapshot among several.
    """
    found: Loaded | None = None
    failure: SnapshotError | None = None
    if reads:
        try:
            found = read_newest(folder, report)
        except SnapshotError as error:
            failure = error
    mine = _FAILED if failure else (_NONE if found is None else found.manifest.step)
    steps = [row[0] for row in gather_ints([mine])]
    best = max(steps)
    if best < 0:
        _raise_together(failure, steps)
        return None
    return _send(found, steps.index(best))


def _raise_together(failure: SnapshotError | None, steps: list[int]) -> None:
    if _FAILED not in steps:
        return
    source = steps.index(_FAILED)
    words = "\n".join([failure.what, failure.where or "", failure.why or ""]) if failure else ""
    what, where, *why = broadcast_bytes(words.encode(), source).decode().split("\n")
    raise SnapshotError(
        what,
        where=where,
        why="; ".join(why),
        fix="restore a copy, or begin anew by choosing another folder",
    )


def _send(found: Loaded | None, owner: int) -> Loaded:
    raw = broadcast_bytes(encode_manifest(found.manifest) if found else None, owner)
    manifest = decode_manifest(raw)
    if manifest.kind != "whole":
        return Loaded(manifest=manifest, buffers={})
    buffers = {}
    for name, entry in manifest.files.items():
        mine = found.buffers.get(name) if found else None
        same = mine is not None and found is not None and found.manifest == manifest
        buffer = (
            mine if same and mine is not None else torch.empty(entry.num_bytes, dtype=torch.uint8)
        )
        buffers[name] = broadcast_buffer(buffer, owner)
    return Loaded(manifest=manifest, buffers=buffers)


def check_tensors(
    manifest: Manifest, wanted: dict[str, tuple[int, ...]], only: tuple[str, ...] = ("",)
) -> None:
    """Raise when the snapshot is that of another model, naming what differs.

    Args:
        manifest: Of the snapshot.
        wanted: Shapes by path.
        only: Compare the snapshot's tensors whose path begins so.

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
        raise SnapshotError(
            f"the snapshot of step {manifest.step} is that of another model:"
            f" {len(problems)} tensors differ",
            why="; ".join(problems[:8]) + more,
            fix="restore the model that it was made with, or begin anew with another folder",
        )
