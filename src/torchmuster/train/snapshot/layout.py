"""The bytes of a snapshot: raw tensors in data files, everything else in a manifest with checksums.

step-000000120/
  data-00000.bin      tensors of one writer, each from a multiple of 64 bytes
  manifest.json       line 1: `torchmuster-snapshot 1 crc32=<8 hex digits> bytes=<n>`
                      then n bytes of JSON: files with sizes and checksums, tensors, state
"""

import json
import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from torchmuster.train.snapshot.state import DamagedError, dtype_named

ALIGNMENT = 64
MANIFEST = "manifest.json"
_FORMAT = 1
_HEADER = re.compile(rb"torchmuster-snapshot (\d{1,4}) crc32=([0-9a-f]{8}) bytes=(\d{1,15})\n")
MAX_HEADER_BYTES = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor, and the location of its bytes.

    Attributes:
        offsets: Index of the box's first element in each dim of the whole tensor.
        sizes: Length of the box in each dim.
        begin: First byte in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int

    def num_bytes(self, itemsize: int) -> int:
        """Return the number of bytes of the box in its file."""
        return math.prod(self.sizes) * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a snapshot."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One data file."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotManifest:
    """Everything in a snapshot except the tensors' bytes.

    Attributes:
        generation: Counts the starts of the run in this folder; an older one may not commit.
        kind: `whole` (one writer has all tensors) or `sharded`.
        state: Packed state of the user's objects.
        ranks: Packed state of each rank, by rank.
    """

    step: int
    epoch: int
    generation: int
    world_size: int
    kind: str
    created: str
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    state: Any
    ranks: dict[int, Any]


def plain_tensors(tensors: dict[str, TensorEntry]) -> dict[str, Any]:
    """Return the locations of tensors as JSON values.

    Each is `[dtype, shape, [[offsets, sizes, file, begin], ...]]`.
    """
    return {
        path: [
            entry.dtype,
            list(entry.shape),
            [[list(c.offsets), list(c.sizes), c.file, c.begin] for c in entry.chunks],
        ]
        for path, entry in tensors.items()
    }


def encode_manifest(manifest: SnapshotManifest) -> bytes:
    """Return the bytes of `manifest.json`."""
    plain = {field.name: getattr(manifest, field.name) for field in fields(manifest)}
    plain["files"] = {name: [f.num_bytes, f.crc32] for name, f in manifest.files.items()}
    plain["tensors"] = plain_tensors(manifest.tensors)
    plain["ranks"] = {str(rank): piece for rank, piece in manifest.ranks.items()}
    body = json.dumps(plain, allow_nan=False).encode()
    crc = zlib.crc32(body)
    return b"torchmuster-snapshot %d crc32=%08x bytes=%d\n" % (_FORMAT, crc, len(body)) + body


def check_first_line(head: bytes, size: int) -> None:
    """Check by its first bytes whether a file of `size` bytes can be a manifest.

    Raises:
        DamagedError: It can't.
    """
    _read_first_line(head, size)


def _read_first_line(head: bytes, size: int) -> tuple[int, int, int, int]:
    """Parse the first line; return format, checksum and length of the body, and its offset."""
    found = _HEADER.match(head)
    if found is None:
        raise DamagedError("the manifest has an invalid first line", where=MANIFEST)
    version, crc, length = int(found[1]), int(found[2], 16), int(found[3])
    if version != _FORMAT:
        raise DamagedError(
            f"the manifest has format {version}, this version reads {_FORMAT}", where=MANIFEST
        )
    if size - found.end() != length:
        raise DamagedError(
            f"the manifest has {size - found.end()} of {length} bytes", where=MANIFEST
        )
    return version, crc, length, found.end()


def decode_manifest(raw: bytes) -> SnapshotManifest:
    """Return the manifest in `raw`.

    Raises:
        DamagedError: It isn't what `encode_manifest` wrote, byte for byte.
    """
    version, crc, length, end = _read_first_line(raw[:MAX_HEADER_BYTES], len(raw))
    body = raw[end:]
    if zlib.crc32(body) != crc:
        raise DamagedError("the manifest's checksum is wrong", where=MANIFEST)
    # The canonical form has no second way to write the same header.
    if not raw.startswith(
        b"torchmuster-snapshot %d crc32=%08x bytes=%d\n" % (version, crc, length)
    ):
        raise DamagedError("the manifest's first line was changed", where=MANIFEST)
    try:
        return _from_plain(json.loads(body))
    except DamagedError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        why = repr(e)[:300]
        raise DamagedError("the manifest isn't that of a snapshot", where=MANIFEST, why=why) from e


def _from_plain(plain: dict[str, Any]) -> SnapshotManifest:
    files = {
        name: FileEntry(num_bytes=_count(size), crc32=_count(crc))
        for name, (size, crc) in plain["files"].items()
    }
    for name in files:
        if not re.fullmatch(r"data-\d{5}\.bin", name):
            raise ValueError(f"a file named {name!r}")
    tensors = {path: _entry(path, row, files) for path, row in plain["tensors"].items()}
    manifest = SnapshotManifest(
        step=_count(plain["step"]),
        epoch=_count(plain["epoch"]),
        generation=_count(plain["generation"]),
        world_size=_count(plain["world_size"]),
        kind=plain["kind"],
        created=str(plain["created"]),
        files=files,
        tensors=tensors,
        state=dict(plain["state"]),
        ranks={int(rank): dict(piece) for rank, piece in plain["ranks"].items()},
    )
    _check_whole(manifest)
    return manifest


def _check_whole(manifest: SnapshotManifest) -> None:
    if manifest.kind not in ("whole", "sharded"):
        raise ValueError(f"a snapshot of kind {manifest.kind!r}")
    # Don't build a set of all claimed ranks: the number is not verified yet.
    of_world = all(0 <= rank < manifest.world_size for rank in manifest.ranks)
    if len(manifest.ranks) != manifest.world_size or not of_world:
        raise ValueError(f"{len(manifest.ranks)} of {manifest.world_size} ranks")
    for path, entry in manifest.tensors.items():
        # A missing box would leave the target memory as it was.
        if sum(math.prod(c.sizes) for c in entry.chunks) != math.prod(entry.shape):
            raise ValueError(f"{path} lacks some of its elements")
        if not entry.chunks or (manifest.kind == "whole" and len(entry.chunks) > 1):
            raise ValueError(f"{path} has {len(entry.chunks)} boxes")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def _entry(path: str, row: Any, files: dict[str, FileEntry]) -> TensorEntry:
    dtype, shape, rows = row
    entry = TensorEntry(
        dtype=str(dtype),
        shape=tuple(map(_count, shape)),
        chunks=tuple(
            Chunk(
                offsets=tuple(map(_count, offsets)),
                sizes=tuple(map(_count, sizes)),
                file=str(file),
                begin=_count(begin),
            )
            for offsets, sizes, file, begin in rows
        ),
    )
    itemsize = dtype_named(entry.dtype).itemsize
    if math.prod(max(size, 1) for size in entry.shape) >= 1 << 62:
        raise ValueError(f"{path} has a shape that no tensor can have")
    for chunk in entry.chunks:
        end = chunk.begin + chunk.num_bytes(itemsize)
        fits = all(
            o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        )
        if not fits or chunk.begin % ALIGNMENT or end > files[chunk.file].num_bytes:
            raise ValueError(f"{path} lies outside its tensor or its file")
    return entry


def align(position: int) -> int:
    """Return the next multiple of 64."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def place(
    boxes: Iterable[tuple[str, torch.Tensor, tuple[int, ...], tuple[int, ...]]], file: str
) -> tuple[dict[str, TensorEntry], int]:
    """Lay out boxes `(path, local tensor, offsets, whole shape)` one after the other.

    Returns:
        The entries, and the size of the file in bytes.
    """
    entries: dict[str, TensorEntry] = {}
    position = 0
    for path, tensor, offsets, shape in boxes:
        chunk = Chunk(offsets=offsets, sizes=tuple(tensor.shape), file=file, begin=position)
        before = entries[path].chunks if path in entries else ()
        entries[path] = TensorEntry(
            dtype=str(tensor.dtype).removeprefix("torch."), shape=shape, chunks=(*before, chunk)
        )
        position = align(position + tensor.numel() * tensor.element_size())
    return entries, position


def view_of(buffer: torch.Tensor, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor whose bytes are at `chunk` in `buffer` (uint8), without a copy."""
    num_bytes = chunk.num_bytes(dtype.itemsize)
    flat = buffer[chunk.begin : chunk.begin + num_bytes]
    return (
        flat.view(dtype).view(chunk.sizes) if num_bytes else torch.empty(chunk.sizes, dtype=dtype)
    )
