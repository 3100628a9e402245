"""The newest snapshot that the memory of all nodes still holds whole, verified, on all ranks.

one rank per node   tells which parts its agent holds
all ranks           choose the newest snapshot of which every part is somewhere
one rank per node   verifies the chosen parts; one that is damaged is forgotten, and all choose again
"""

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.model.contract import NODE_VARIABLE
from torchmuster.train.exchange import broadcast_buffer, broadcast_bytes, gather_json
from torchmuster.train.memory.held import HeldFile, Part
from torchmuster.train.snapshot.layout import MANIFEST, SnapshotManifest, decode_manifest
from torchmuster.train.snapshot.load import LoadedSnapshot
from torchmuster.train.snapshot.state import DamagedError

Age = tuple[
    int, int
]  # generation and step: what a later start has saved is newer, whatever its step

# Of each part: generation, step, name, and of a manifest `{name: [bytes, checksum]}` of the files that it needs.
Row = list[Any]


def newest_whole(told: Sequence[Sequence[Row]], newer_than: Age) -> Age | None:
    """Return the newest snapshot of which every part is on some rank's node.

    Args:
        told: The parts of each rank's node.
        newer_than: What disk has.
    """
    held: dict[Age, set[str]] = {}
    for generation, step, name, _ in (row for rows in told for row in rows):
        held.setdefault((generation, step), set()).add(name)
    whole = [age for age, files in _wanted(told).items() if set(files) <= held[age]]
    return max((age for age in whole if age > newer_than), default=None)


def _wanted(told: Sequence[Sequence[Row]]) -> dict[Age, dict[str, list[int]]]:
    """Return the files of each snapshot whose manifest is somewhere."""
    rows = [row for rows in told for row in rows if row[3] is not None]
    return {(generation, step): files for generation, step, _, files in rows}


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """The chosen snapshot.

    Attributes:
        holders: Of each of its files, the rank that has it.
        files: Those that this rank has, verified.
    """

    manifest: SnapshotManifest
    holders: Mapping[str, int]
    files: Mapping[str, torch.Tensor]

    def open(self, name: str) -> torch.Tensor:
        """Return the bytes of a file on every rank; a collective."""
        size = self.manifest.files[name].num_bytes
        mine = self.files.get(name)
        buffer = torch.empty(size, dtype=torch.uint8)
        if mine is not None:
            buffer.copy_(mine)
        return broadcast_buffer(buffer, self.holders[name])

    def loaded(self) -> LoadedSnapshot:
        """Return it with its bytes, if it is whole; those of a sharded one come when they are read."""
        whole = self.manifest.kind == "whole"
        buffers = {name: self.open(name) for name in self.manifest.files} if whole else {}
        return LoadedSnapshot(manifest=self.manifest, buffers=buffers, parts=self)


def look(
    held: Sequence[HeldFile], newer_than: Age, report: Callable[[str], None]
) -> HeldSnapshot | None:
    """Return the newest good snapshot in memory that is newer than disk's; a collective.

    Args:
        held: What the agent of this node holds, on one rank per node; nothing on the others.
        newer_than: Generation and step of the newest good snapshot on disk; (-1, -1) for none.
        report: Called with a message for each damaged part.
    """
    while True:
        told = gather_json([row for row in map(_row, held) if row is not None])
        age = newest_whole(told, newer_than)
        if age is None:
            return None
        wanted = _wanted(told)[age]
        files: dict[str, torch.Tensor] = {}
        manifest: bytes | None = None
        damaged: list[str] = []
        for file in held:
            part = file.part
            if part is None or part.age != age:
                continue
            if part.name == MANIFEST:
                manifest = file.read().numpy().tobytes()
            elif part.name in wanted:
                why = _damage(file, *wanted[part.name])
                if why is None:
                    files[part.name] = file.read()
                else:
                    file.forget()
                    damaged.append(_in_words(part, why))
        names = [*files, *([MANIFEST] if manifest is not None else [])]
        rows = gather_json([names, damaged])
        good = [row[0] for row in rows]
        # Those of other nodes, too: rank 0 is who is heard.
        for text in [text for row in rows for text in row[1]] if dist.get_rank() == 0 else damaged:
            report(text)
        holders = {
            name: rank for rank in reversed(range(len(good))) for name in good[rank]
        }  # the first one of each
        if {*wanted, MANIFEST} <= set(holders):
            raw = broadcast_bytes(manifest, holders.pop(MANIFEST))
            return HeldSnapshot(decode_manifest(raw), holders, files)


def _row(file: HeldFile) -> Row | None:
    """Return what a file has to tell; None of one that holds nothing, or a manifest that is damaged."""
    part = file.part
    if part is None:
        return None
    if part.name != MANIFEST:
        return [part.generation, part.step, part.name, None]
    try:
        manifest = decode_manifest(file.read().numpy().tobytes())
    except DamagedError:
        file.forget()  # a snapshot without a manifest is none
        return None
    files = {name: [entry.num_bytes, entry.crc32] for name, entry in manifest.files.items()}
    return [manifest.generation, manifest.step, part.name, files]


def _damage(file: HeldFile, num_bytes: int, crc32: int) -> str | None:
    """Return how a file differs from what its manifest says."""
    data = file.read()
    if data.numel() != num_bytes:
        return f"it has {data.numel()} of {num_bytes} bytes"
    crc = zlib.crc32(memoryview(data.numpy()))
    return None if crc == crc32 else f"its checksum is {crc:08x}, {crc32:08x} is recorded"


def _in_words(part: Part, why: str) -> str:
    return (
        f"error: a part of the snapshot of step {part.step} in memory is damaged\n"
        f"  at: {part.name}, held by the agent of {os.environ.get(NODE_VARIABLE, 'this node')}\n"
        f"  because: {why}\n"
        "hint: it was forgotten; another copy is loaded, or an older snapshot"
    )
