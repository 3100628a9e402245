"""Sharded tensors (FSDP2, HSDP): torch.distributed.checkpoint's planners over our own files.

The planners decide which box of which tensor this rank writes, and which boxes it needs if the
world
has another size. Torch's own storage keeps its metadata as a pickle, so the storage is ours: the
boxes in the manifest, raw bytes in data files. Nothing here is a collective.
"""

import math
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.tensor import DTensor

from torchmuster.train.snapshot.folder import Folder
from torchmuster.train.snapshot.layout import Chunk, SnapshotManifest, TensorEntry, view_of
from torchmuster.train.snapshot.load import check_tensors
from torchmuster.train.snapshot.staging import Box
from torchmuster.train.snapshot.state import DamagedError, UnreadableError, dtype_named


def boxes_of(tensors: dict[str, torch.Tensor], rank: int) -> list[Box]:
    """Return the boxes that this rank writes: each shard once over all replicas.

    Rank 0 also writes the plain tensors.
    """
    mine = {path: tensor for path, tensor in tensors.items() if _is_mine(tensor, rank)}
    planner = DefaultSavePlanner()
    planner.set_up_planner(mine, is_coordinator=rank == 0)
    boxes: list[Box] = []
    for item in planner.create_local_plan().items:
        if item.tensor_data is None:
            continue
        chunk, size = item.tensor_data.chunk, item.tensor_data.size
        tensor = planner.resolve_data(item)
        if tensor.numel() or not math.prod(size):  # an empty tensor has to be recorded too
            boxes.append((item.index.fqn, tensor, tuple(chunk.offsets), tuple(size)))
    return boxes


def _is_mine(tensor: torch.Tensor, rank: int) -> bool:
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    replicated = [c for c, p in zip(coordinate, tensor.placements, strict=True) if p.is_replicate()]
    return not any(replicated)


class Parts(Protocol):
    """Where the files of a snapshot are, if not in a folder."""

    def open(self, name: str) -> torch.Tensor:
        """Return the bytes of a file on every rank; a collective."""


def read_into(
    folder: Folder,
    manifest: SnapshotManifest,
    targets: dict[str, torch.Tensor],
    parts: Parts | None = None,
) -> None:
    """Fill `targets` (this rank's shards, by path) from a snapshot of any world size.

    Raises:
        SnapshotError: A tensor is missing, or has another shape.
    """
    check_tensors(manifest, {path: tuple(t.shape) for path, t in targets.items()})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, _metadata(manifest), is_coordinator=False)
    items: dict[str, list[tuple[Any, Chunk]]] = {name: [] for name in sorted(manifest.files)}
    for item in planner.create_local_plan().items:
        if item.type != LoadItemType.TENSOR:
            raise DamagedError(f"{item.dest_index.fqn} isn't a tensor")
        chunk = _chunk_of(manifest, item.storage_index.fqn, item.storage_index.offset)
        items[chunk.file].append((item, chunk))
    for name, wanted in items.items():  # in the same order on all ranks
        file = parts.open(name) if parts is not None else None
        reader = _Reader(folder, manifest, file)
        for item, chunk in wanted:
            source = reader.box(item.storage_index.fqn, chunk)
            for dim, (begin, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                source = source.narrow(dim, begin, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)


def _chunk_of(manifest: SnapshotManifest, path: str, offset: Any) -> Chunk:
    entry = manifest.tensors[path]
    wanted = tuple(offset) if offset is not None else (0,) * len(entry.shape)
    return next(c for c in entry.chunks if c.offsets == wanted)


class _Reader:
    """Reads the boxes of one file, each once."""

    def __init__(
        self, folder: Folder, manifest: SnapshotManifest, file: torch.Tensor | None
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._file = file
        self._last: tuple[Chunk, torch.Tensor] | None = None

    def box(self, path: str, chunk: Chunk) -> torch.Tensor:
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        dtype = dtype_named(self._manifest.tensors[path].dtype)
        if self._file is not None:
            return view_of(self._file, chunk, dtype)
        raw = torch.empty(chunk.num_bytes(dtype.itemsize), dtype=torch.uint8)
        self._read(chunk, memoryview(raw.numpy()))
        at_zero = Chunk(offsets=chunk.offsets, sizes=chunk.sizes, file=chunk.file, begin=0)
        tensor = view_of(raw, at_zero, dtype)
        self._last = chunk, tensor
        return tensor

    def _read(self, chunk: Chunk, buffer: memoryview) -> None:
        """Fill `buffer`: rank 0 has verified the file, but this node may read something else."""
        step, url = self._manifest.step, self._folder.url
        try:
            count = self._folder.read_into(step, chunk.file, buffer, chunk.begin)
        except OSError as error:
            raise UnreadableError(
                f"{chunk.file} of the snapshot of step {step} can't be read here",
                where=url,
                why=error.strerror or str(error),
            ) from error
        if count != len(buffer):
            raise UnreadableError(f"{chunk.file} of step {step} ended early", where=url)


def _metadata(manifest: SnapshotManifest) -> Metadata:
    return Metadata(
        state_dict_metadata={path: _describe(entry) for path, entry in manifest.tensors.items()}
    )


def _describe(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.sizes))
        for c in entry.chunks
    ]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_named(entry.dtype)),
        size=torch.Size(entry.shape),
        chunks=chunks,
    )
