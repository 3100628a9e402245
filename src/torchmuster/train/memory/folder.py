"""Memory as a destination of snapshots: this node's agent; for sharded models others' agents, too.

A writer does the same as on a disk (`snapshot/writer.py`): the same files, manifest and checksums.
Here a file is written where it is staged, so there is no second copy, and its bytes also go to the
neighbours.
"""

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.train.memory.held import HeldFile, NodeMemory, Part
from torchmuster.train.snapshot.layout import MANIFEST

_BLOCK_BYTES = 8 << 20
_TURNS = ("a", "b")
WHERE = "the memory of the nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The ranks to which this one's part goes, and those whose parts come here.

    Attributes:
        group: A separate CPU group: its traffic never gets between the collectives of the loop.
        bytes_per_s: The most that this rank sends; None for as fast as the network allows.
    """

    group: Any
    send_to: tuple[int, ...] = ()
    take_from: tuple[int, ...] = ()
    bytes_per_s: float | None = None


class HeldFolder:
    """The parts of snapshots that this rank puts into memory.

    Args:
        memory: The memory of this node.
        names: The data files that any rank of this node writes or receives; others belong to
            another world.
        neighbours: For a sharded model.

    Attributes:
        url: For messages.
    """

    url = WHERE

    def __init__(
        self,
        memory: NodeMemory,
        names: Collection[str] = ("data-00000.bin",),
        neighbours: Neighbours | None = None,
    ) -> None:
        self._memory = memory
        self._names = {*names, MANIFEST}
        self._neighbours = neighbours
        self._turns: dict[str, HeldFile] = {}  # the file that each name is being written to
        self._is_tidy = False

    def room(self, name: str, num_bytes: int) -> torch.Tensor:
        """Return the space for a file's next version; the last complete one stays there."""
        return self._turn(name).begin(num_bytes)

    def forget_all_but(self, age: tuple[int, int] | None) -> None:
        """Forget what was not loaded: it is damaged, older, or from a past that was left."""
        for file in self._memory.all():
            if file.part is not None and file.part.age != age:
                file.forget()

    # Methods for a writer.

    def steps(self) -> list[int]:
        """Return nothing: a new snapshot replaces the one before the last by itself."""
        return []

    def delete(self, step: int) -> None:
        """Do nothing: see `steps`."""

    def begin(self, step: int, generation: int) -> None:
        """Do nothing."""

    def create(self, step: int, generation: int, name: str) -> "_HeldSink":
        """Return the sink of a file that was staged here."""
        return _HeldSink(self, Part(generation=generation, step=step, name=name, num_bytes=0))

    def commit(self, step: int, generation: int, manifest: bytes) -> None:
        """Put the manifest next to the parts, and free what no part of this attempt needs."""
        data = torch.frombuffer(bytearray(manifest), dtype=torch.uint8)
        self.room(MANIFEST, len(manifest)).copy_(data)
        self._say_whole(Part(generation=generation, step=step, name=MANIFEST, num_bytes=len(data)))
        if not self._is_tidy:
            self._is_tidy = True
            old = [
                file.name
                for file in self._memory.all()
                if file.name.rpartition(".")[0] not in self._names
            ]
            self._memory.drop(old)

    def abandon(self, step: int, generation: int) -> None:
        """Forget the parts of a snapshot that will not be complete."""
        for file in self._turns.values():
            if file.part is None or file.part.age == (generation, step):
                file.forget()

    def finish(self, part: Part) -> None:
        """Mark a staged file as complete, and send it to the neighbours."""
        self._say_whole(part)
        if self._neighbours is not None:
            self._exchange(part, self._turns[part.name].read(), self._neighbours)

    def _say_whole(self, part: Part) -> None:
        self._turns[part.name].commit(part)

    def _turn(self, name: str) -> HeldFile:
        """Return, of a name's two files, the empty one or the one with the older part."""
        files = self._memory.open(*(f"{name}.{turn}" for turn in _TURNS))
        file = min(files, key=lambda file: file.part.age if file.part is not None else (-1, -1))
        self._turns[name] = file
        return file

    # Between nodes.

    def _exchange(self, part: Part, mine: torch.Tensor, near: Neighbours) -> None:
        header = torch.tensor([part.step, _number_of(part.name), part.num_bytes])
        theirs = {rank: torch.empty_like(header) for rank in near.take_from}
        works = [dist.isend(header, rank, group=near.group) for rank in near.send_to]
        works += [
            dist.irecv(their_header, rank, group=near.group)
            for rank, their_header in theirs.items()
        ]
        _wait(works)
        taken: dict[int, torch.Tensor] = {}
        parts: list[Part] = []
        for rank, their_header in theirs.items():
            step, number, num_bytes = their_header.tolist()
            name = f"data-{number:05d}.bin"
            taken[rank] = self.room(name, num_bytes)
            parts.append(
                Part(generation=part.generation, step=step, name=name, num_bytes=num_bytes)
            )
        began, sent = time.monotonic(), 0
        longest = max([part.num_bytes, *(buffer.numel() for buffer in taken.values())])
        for begin in range(0, longest, _BLOCK_BYTES):
            end = begin + _BLOCK_BYTES
            works = []
            if begin < part.num_bytes:
                works += [dist.isend(mine[begin:end], to, group=near.group) for to in near.send_to]
                sent += min(_BLOCK_BYTES, part.num_bytes - begin) * len(near.send_to)
            for rank, buffer in taken.items():
                if begin < buffer.numel():
                    works.append(dist.irecv(buffer[begin:end], rank, group=near.group))
            _wait(works)
            if near.bytes_per_s is not None:
                ahead_s = sent / near.bytes_per_s - (time.monotonic() - began)
                if ahead_s > 0:
                    threading.Event().wait(ahead_s)
        for one in parts:
            self._say_whole(one)


class _HeldSink:
    """The sink of a file that is staged in place: what it writes is there already."""

    def __init__(self, folder: HeldFolder, part: Part) -> None:
        self._folder, self._part = folder, part
        self._num_bytes = 0

    def write(self, data: Any) -> None:
        self._num_bytes += len(data)

    def finish(self) -> None:
        part = self._part
        self._folder.finish(
            Part(
                generation=part.generation,
                step=part.step,
                name=part.name,
                num_bytes=self._num_bytes,
            )
        )


def _number_of(name: str) -> int:
    return int(name.removeprefix("data-").removesuffix(".bin"))


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
