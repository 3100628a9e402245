"""Memory as a place that snapshots are written to: the agent of this node, and for sharded ones agents of neighbours.

What a writer does is the same as on a disk (`snapshot/writer.py`): the same files, the same manifest, the same checksums. Here
a file is written where it is staged, so there is no second copy, and its bytes go on to the neighbours.
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
    """The ranks that this one's part goes to, and those whose parts come here.

    Attributes:
        group: A group of its own, on the CPU: what it moves never gets between the collectives of the loop.
        bytes_per_s: What this rank sends at most; None: as fast as the network takes it.
    """

    group: Any
    send_to: tuple[int, ...] = ()
    take_from: tuple[int, ...] = ()
    bytes_per_s: float | None = None


class HeldFolder:
    """The parts of snapshots that this rank puts into memory.

    Args:
        memory: Of this node.
        names: The data files that any rank of this node writes or takes: all others are of another world.
        neighbours: Of a sharded model.

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
        """Return the place of a file's next version; the last complete one is still there."""
        return self._turn(name).begin(num_bytes)

    def forget_all_but(self, age: tuple[int, int] | None) -> None:
        """Forget what was not loaded: it is damaged, older, or of a past that this start has left."""
        for file in self._memory.all():
            if file.part is not None and file.part.age != age:
                file.forget()

    # What a writer calls.

    def steps(self) -> list[int]:
        """Return nothing: a new snapshot takes the place of the last but one by itself."""
        return []

    def delete(self, step: int) -> None:
        """Nothing is deleted one by one."""

    def begin(self, step: int, generation: int) -> None:
        """Nothing has to be made."""

    def create(self, step: int, generation: int, name: str) -> "_HeldSink":
        """Return the sink of a file that was staged here."""
        return _HeldSink(self, Part(generation=generation, step=step, name=name, num_bytes=0))

    def commit(self, step: int, generation: int, manifest: bytes) -> None:
        """Put the manifest beside the parts, and free what no part of this attempt needs."""
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
        """Forget the parts of a snapshot that won't be whole."""
        for file in self._turns.values():
            if file.part is None or file.part.age == (generation, step):
                file.forget()

    def finish(self, part: Part) -> None:
        """Say that a staged file is whole, and give it to the neighbours."""
        self._say_whole(part)
        if self._neighbours is not None:
            self._exchange(part, self._turns[part.name].read(), self._neighbours)

    def _say_whole(self, part: Part) -> None:
        self._turns[part.name].commit(part)

    def _turn(self, name: str) -> HeldFile:
        """Return, of the two files of a name, the one that has nothing or the older part."""
        files = self._memory.open(*(f"{name}.{turn}" for turn in _TURNS))
        file = min(files, key=lambda file: file.part.age if file.part is not None else (-1, -1))
        self._turns[name] = file
        return file

    # Between nodes.

    def _exchange(self, part: Part, mine: torch.Tensor, near: Neighbours) -> None:
        header = torch.tensor([part.step, _number_of(part.name), part.num_bytes])
        theirs = {rank: torch.empty_like(header) for rank in near.take_from}
        works = [dist.isend(header, rank, group=near.group) for rank in near.send_to]
        works += [dist.irecv(told, rank, group=near.group) for rank, told in theirs.items()]
        _wait(works)
        taken: dict[int, torch.Tensor] = {}
        parts: list[Part] = []
        for rank, told in theirs.items():
            step, number, num_bytes = told.tolist()
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
    """The sink of a file that lies where it was staged: what is written is there already."""

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
