"""A run's snapshots in memory: who holds what, when one is due, and what it needs on each node.

A writer does the same as on a disk (`snapshot/writer.py`): the same files, manifest and checksums.
Here a file is written where it is staged, in the memory of this node's agent, so there is no second
copy, and the bytes of sharded models also go to the agents of other nodes.
"""

import json
import mmap
import os
import re
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.core import proc
from torchmuster.core.model import codec, contract
from torchmuster.core.model.contract import NODE_VARIABLE
from torchmuster.core.model.text import show_size
from torchmuster.core.net import ipc
from torchmuster.core.net.ipc import AgentAnswer, AskMemory, CallFailed, MemoryHeld
from torchmuster.core.node.kernel import free_bytes
from torchmuster.errors import UsageError
from torchmuster.train.exchange import broadcast_buffer, broadcast_bytes, finish_all, gather_json
from torchmuster.train.objects import Objects
from torchmuster.train.snapshot import state, writer
from torchmuster.train.snapshot.folder import Folder
from torchmuster.train.snapshot.layout import MANIFEST, SnapshotManifest, decode_manifest
from torchmuster.train.snapshot.load import LoadedSnapshot
from torchmuster.train.snapshot.staging import Staging

# This node's side: files that the agent holds, each with a header page.
#
# A file has one part of one snapshot: the tensors of one rank, or the manifest. It is written in
# place:
#
#     byte 0      `torchmuster-held 1 crc32=<8 hex digits> bytes=<n>`, then n bytes of JSON: the part
#     byte 4096   the bytes of the part
#
# The header page is cleared before the part is written, and filled after it: a part is complete or
# absent. Two files take turns, so that the last part stays until the next one is complete on all
# nodes.


PAGE_BYTES = 4096
_HEADER = re.compile(rb"torchmuster-held 1 crc32=([0-9a-f]{8}) bytes=(\d{1,4})\n")
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a file holds; the checksum is in the snapshot's manifest.

    Attributes:
        name: The name of the file in a snapshot: `manifest.json` or `data-00003.bin`.
    """

    generation: int
    step: int
    name: str
    num_bytes: int

    @property
    def age(self) -> tuple[int, int]:
        """The order of parts: a later start's is newer, whatever its step."""
        return self.generation, self.step


class HeldFile:
    """One memory-mapped file of the agent."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._map: mmap.mmap | None = None
        self.part = self._read_part()

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return os.fstat(self._descriptor).st_size

    def begin(self, num_bytes: int) -> torch.Tensor:
        """Forget its part, and return the space for a new one, `(num_bytes,)` uint8.

        Raises:
            SnapshotError: The node lacks memory for it.
        """
        self.forget()
        whole = PAGE_BYTES + num_bytes
        if self._map is None or len(self._map) < whole:
            self._grow(whole)
        return self._bytes(num_bytes)

    def _grow(self, num_bytes: int) -> None:
        """Make room. Check free memory first: a write without memory gets a process killed."""
        more, free = num_bytes - self.size, free_bytes()
        why = f"{free / 1e6:.1f} MB are free" if free is not None and more > free else ""
        if not why:
            try:
                os.ftruncate(self._descriptor, num_bytes)
                self._map = mmap.mmap(self._descriptor, num_bytes)
            except (OSError, ValueError) as error:
                why = str(error)
        if why:
            raise state.NoRoomError(
                f"this node has no memory for {num_bytes / 1e6:.1f} MB of a snapshot", why=why
            )

    def forget(self) -> None:
        """Mark it as empty."""
        os.pwrite(self._descriptor, bytes(PAGE_BYTES), 0)
        self.part = None

    def commit(self, part: Part) -> None:
        """Record what it holds; from now on the part can be found."""
        plain = json.dumps(asdict(part)).encode()
        head = b"torchmuster-held 1 crc32=%08x bytes=%d\n" % (zlib.crc32(plain), len(plain))
        os.pwrite(self._descriptor, (head + plain).ljust(PAGE_BYTES, b"\0"), 0)
        self.part = part

    def read(self) -> torch.Tensor:
        """Return its part without a copy and unverified, `(num_bytes,)` uint8."""
        return self._bytes(self.part.num_bytes if self.part is not None else 0)

    def _bytes(self, num_bytes: int) -> torch.Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, 0)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=PAGE_BYTES)

    def _read_part(self) -> Part | None:
        page = os.pread(self._descriptor, PAGE_BYTES, 0)
        found = _HEADER.match(page)
        if found is None:
            return None
        plain = page[found.end() : found.end() + int(found[2])]
        if zlib.crc32(plain) != int(found[1], 16):
            return None
        try:
            part = Part(**json.loads(plain))
        except (ValueError, TypeError):
            return None
        return part if self.size >= PAGE_BYTES + part.num_bytes else None


class NodeMemory:
    """The memory that this node's agent holds; files are opened when first used."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._files: dict[str, HeldFile] = {}

    def open(self, *names: str) -> list[HeldFile]:
        """Return files by name; create missing ones.

        Raises:
            SnapshotError: The agent can't hold any.
        """
        missing = [name for name in names if name not in self._files]
        if missing:
            self._take(self._ask(AskMemory(names=tuple(missing))), missing)
        return [self._files[name] for name in names]

    def all(self) -> list[HeldFile]:
        """Return all files that the agent holds, of this attempt and of earlier ones."""
        held = self._ask(AskMemory())
        self._take(held, [name for name in held.descriptors if name not in self._files])
        return [self._files[name] for name in sorted(held.descriptors)]

    def drop(self, names: list[str]) -> None:
        """Make the agent free these files."""
        for name in names:
            self._files.pop(name, None)
        if names:
            self._ask(AskMemory(drop=tuple(names)))

    def _take(self, held: MemoryHeld, names: list[str]) -> None:
        for name in names:
            path = f"/proc/{held.pid}/fd/{held.descriptors[name]}"
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise _cant_hold(error.strerror or str(error)) from error
            self._files[name] = HeldFile(name, descriptor)

    def _ask(self, ask: AskMemory) -> MemoryHeld:
        try:
            answer = self._call(ask)
        except (OSError, EOFError, codec.CodecError) as error:
            raise _cant_hold(str(error) or "its agent hung up") from error
        if isinstance(answer, MemoryHeld):
            return answer
        why = answer.why or answer.what if isinstance(answer, CallFailed) else "it is another one"
        raise _cant_hold(why)

    def _call(self, ask: AskMemory) -> AgentAnswer:
        with ipc.connect(self._socket_path) as agent:
            agent.settimeout(_ANSWER_S)
            agent.sendall(ipc.pack(ask))
            return ipc.receive(agent, AgentAnswer)


def _cant_hold(why: str) -> state.SnapshotError:
    return state.SnapshotError(
        "the agent of this node can't hold snapshots in memory",
        where="World.resume(memory_every_steps=...)",
        why=why,
        fix="leave memory_every_steps out; or is an agent of an older torchmuster there?",
    )


# Memory as a destination of snapshots: this node's agent; for sharded models others' agents, too.


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
        files = self._memory.open(*(f"{name}.{turn}" for turn in _TURNS))
        # The empty one, or the one with the older part.
        file = min(files, key=lambda file: file.part.age if file.part is not None else (-1, -1))
        self._turns[name] = file
        return file.begin(num_bytes)

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
        part = Part(generation=generation, step=step, name=MANIFEST, num_bytes=len(data))
        self._turns[MANIFEST].commit(part)
        if not self._is_tidy:
            self._is_tidy = True
            names = [file.name for file in self._memory.all()]
            self._memory.drop([n for n in names if n.rpartition(".")[0] not in self._names])

    def abandon(self, step: int, generation: int) -> None:
        """Forget the parts of a snapshot that will not be complete."""
        for file in self._turns.values():
            if file.part is None or file.part.age == (generation, step):
                file.forget()

    def finish(self, part: Part) -> None:
        """Mark a staged file as complete, and send it to the neighbours."""
        self._turns[part.name].commit(part)
        if self._neighbours is not None:
            self._exchange(part, self._turns[part.name].read(), self._neighbours)

    # Between nodes.

    def _exchange(self, part: Part, mine: torch.Tensor, near: Neighbours) -> None:
        number = int(part.name.removeprefix("data-").removesuffix(".bin"))
        header = torch.tensor([part.step, number, part.num_bytes])
        theirs = {rank: torch.empty_like(header) for rank in near.take_from}
        works = [dist.isend(header, rank, group=near.group) for rank in near.send_to]
        works += [dist.irecv(one, rank, group=near.group) for rank, one in theirs.items()]
        finish_all(works)
        taken: dict[int, torch.Tensor] = {}
        parts: list[Part] = []
        for rank, their_header in theirs.items():
            step, number, num_bytes = their_header.tolist()
            name = f"data-{number:05d}.bin"
            taken[rank] = self.room(name, num_bytes)
            parts.append(replace(part, step=step, name=name, num_bytes=num_bytes))
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
            finish_all(works)
            if near.bytes_per_s is not None:
                ahead_s = sent / near.bytes_per_s - (time.monotonic() - began)
                if ahead_s > 0:
                    threading.Event().wait(ahead_s)
        for one in parts:
            self._turns[one.name].commit(one)


class _HeldSink:
    """The sink of a file that is staged in place: what it writes is there already."""

    def __init__(self, folder: HeldFolder, part: Part) -> None:
        self._folder, self._part = folder, part
        self._num_bytes = 0

    def write(self, data: Any) -> None:
        self._num_bytes += len(data)

    def finish(self) -> None:
        self._folder.finish(replace(self._part, num_bytes=self._num_bytes))


# Which nodes hold what: each node's part is also on other nodes, if possible on other machines and
# switches.


@dataclass(frozen=True, slots=True)
class NodeSite:
    """The location of a node.

    Attributes:
        machine: Equal for two nodes that are lost together.
        switch: The network switches above the node; empty if unknown.
    """

    machine: str
    switch: str = ""


def choose_shifts(nodes: Sequence[NodeSite], copies: int) -> list[int]:
    """Return the shifts for copies: node i's part is also on node i + shift, around the ring.

    All nodes use the same shifts, so that each holds equally much. Prefer shifts with the fewest
    pairs that share a machine, then a switch.
    """
    count = len(nodes)

    def rank_of(shift: int) -> tuple[int, int, int]:
        pairs = [(nodes[i], nodes[(i + shift) % count]) for i in range(count)]
        same_machine = sum(a.machine == b.machine for a, b in pairs)
        same_switch = sum(bool(a.switch) and a.switch == b.switch for a, b in pairs)
        return same_machine, same_switch, shift

    return sorted(range(1, count), key=rank_of)[:copies]


def describe_risk(nodes: Sequence[NodeSite], shifts: Sequence[int]) -> str | None:
    """Return a warning about the chosen nodes; None if each part is on another machine."""
    count = len(nodes)
    if count == 1:
        return "there is one node: snapshots in memory survive its workers, not its own loss"
    machines = {stand.machine for stand in nodes}
    alone = [
        i
        for i, stand in enumerate(nodes)
        if all(nodes[(i + s) % count].machine == stand.machine for s in shifts)
    ]
    if not alone:
        return None
    return (
        f"{count} nodes are on {len(machines)} machine{'s' if len(machines) > 1 else ''}: what memory holds of node"
        f" {alone[0]} is lost with its machine"
    )


# The newest snapshot that all nodes' memory still holds completely, verified on all ranks.
#
# one rank per node   reports which parts its agent holds
# all ranks           choose the newest snapshot with every part on some node
# one rank per node   verifies the chosen parts; a damaged one is dropped, and all choose again


Age = tuple[int, int]  # generation and step: a later start's snapshot is newer, whatever its step

# Of each part: generation, step, name, and for a manifest `{name: [bytes, checksum]}` of its files.
Row = list[Any]


def newest_whole(reports: Sequence[Sequence[Row]], newer_than: Age) -> Age | None:
    """Return the newest snapshot with every part on some rank's node.

    Args:
        reports: The parts of each rank's node.
        newer_than: The newest snapshot on disk.
    """
    held: dict[Age, set[str]] = {}
    for generation, step, name, _ in (row for rows in reports for row in rows):
        held.setdefault((generation, step), set()).add(name)
    whole = [age for age, files in _wanted(reports).items() if set(files) <= held[age]]
    return max((age for age in whole if age > newer_than), default=None)


def _wanted(reports: Sequence[Sequence[Row]]) -> dict[Age, dict[str, list[int]]]:
    """Return the files of each snapshot whose manifest is on some node."""
    rows = [row for rows in reports for row in rows if row[3] is not None]
    return {(generation, step): files for generation, step, _, files in rows}


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """The chosen snapshot.

    Attributes:
        holders: The rank that has each of its files.
        files: The files that this rank has, verified.
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
        """Return the snapshot; the bytes of a sharded one are fetched when they are read."""
        whole = self.manifest.kind == "whole"
        buffers = {name: self.open(name) for name in self.manifest.files} if whole else {}
        return LoadedSnapshot(manifest=self.manifest, buffers=buffers, parts=self)


def look(
    held: Sequence[HeldFile], newer_than: Age, report: Callable[[str], None]
) -> HeldSnapshot | None:
    """Return the newest good snapshot in memory that is newer than disk's; a collective.

    Args:
        held: What this node's agent holds, on one rank per node; empty on the others.
        newer_than: Generation and step of the newest good snapshot on disk; (-1, -1) for none.
        report: Called with a message for each damaged part.
    """
    while True:
        reports = gather_json([row for row in map(_row, held) if row is not None])
        age = newest_whole(reports, newer_than)
        if age is None:
            return None
        wanted = _wanted(reports)[age]
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
        # Rank 0 reports other nodes' damage, too, as its output is shown.
        for text in [text for row in rows for text in row[1]] if dist.get_rank() == 0 else damaged:
            report(text)
        # The lowest rank that has it.
        holders = {name: rank for rank in reversed(range(len(rows))) for name in rows[rank][0]}
        if {*wanted, MANIFEST} <= set(holders):
            raw = broadcast_bytes(manifest, holders.pop(MANIFEST))
            return HeldSnapshot(decode_manifest(raw), holders, files)


def _row(file: HeldFile) -> Row | None:
    """Return the description of a file's part; None if it is empty or a damaged manifest."""
    part = file.part
    if part is None:
        return None
    if part.name != MANIFEST:
        return [part.generation, part.step, part.name, None]
    try:
        manifest = decode_manifest(file.read().numpy().tobytes())
    except state.DamagedError:
        file.forget()  # without a manifest it is no snapshot
        return None
    files = {name: [entry.num_bytes, entry.crc32] for name, entry in manifest.files.items()}
    return [manifest.generation, manifest.step, part.name, files]


def _damage(file: HeldFile, num_bytes: int, crc32: int) -> str | None:
    """Return how a file differs from its manifest's entry; None if it does not."""
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


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Options of `World.resume`, which documents them."""

    every_steps: int
    copies: int = 1
    mb_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse a rate limit that lets nothing through.

        Raises:
            UsageError: It is not a number above zero.
        """
        limit = self.mb_per_s
        if limit is not None and (isinstance(limit, str) or not limit > 0):
            raise UsageError(
                f"memory_mb_per_s is {limit!r}, no number above zero", where="World.resume"
            )


_MOST_FAILURES = 3  # after so many failures in a row


class MemorySaves:
    """Makes snapshots in memory, one at a time in the background.

    Attributes:
        writers: The writers, like those on disk.
        staging: Copies the state into the agent's memory.
        stepped: The paths that only optimizers change, so they may be copied until the next step.
        step: The step of the newest snapshot that was started or loaded; -1 for none.
        is_owed: A snapshot is due at the next boundary: after a loss the replacement node holds
            nothing yet, and until it does, the loss of another node would cost everything.
    """

    def __init__(
        self,
        settings: MemorySettings,
        writers: writer.Writers[HeldFolder],
        memory: NodeMemory,
        nodes: Sequence[int],
    ) -> None:
        """Store the arguments; `nodes` is the node of each rank."""
        self.settings = settings
        self.writers = writers
        self.step = -1
        self.is_owed = False
        self._nodes = nodes
        self._memory = memory
        self._saver = writer.Saver(writers)
        self.staging = Staging(writers.folder.room)
        self._num_orders = 0
        self._num_failed = 0  # in a row
        self._is_submitted = False
        self._has_reported = False
        self.stepped: Container[str] = ()

    def follow(self, objects: Objects) -> None:
        """Copy what only these optimizers change during the next passes; they wait for it."""
        self.stepped = objects.stepped()
        for optimizer in objects.optimizers():
            optimizer.register_step_pre_hook(lambda *_: self._saver.wait_for_copy())

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot in memory is to be made after this step."""
        return self.is_owed or (step % self.settings.every_steps == 0 and step != self.step)

    def look(self, newer_than: Age, report: Callable[[str], None]) -> HeldSnapshot | None:
        """Return the newest good snapshot in memory if it is newer than disk's; drop all others.

        A collective.
        """
        leads = self.writers.rank == 0 or self.writers.copies
        found = look(self._memory.all() if leads else [], newer_than, report)
        if leads:
            age = (found.manifest.generation, found.manifest.step) if found is not None else None
            self.writers.folder.forget_all_but(age)
        return found

    def check_room(self, num_bytes: int, to_come_bytes: int) -> None:
        """Refuse, on all ranks, snapshots that do not fit into a node's memory; a collective.

        Args:
            num_bytes: The size of this rank's part, as far as it is known before the first step.
            to_come_bytes: What the first step allocates on the node for gradients and optimizers.

        Raises:
            MisfitError: Some node has too little memory for the copies.
        """
        others = self.settings.copies if self.writers.confirms else 0
        free = free_bytes() if self.writers.copies else None
        if free is not None:  # space held from the last attempt will be overwritten
            free += sum(file.size for file in self._memory.all())
        reports = gather_json([num_bytes * len(_TURNS) * (1 + others), to_come_bytes, free])
        for node in sorted(set(self._nodes)):
            rows = [row for row, of in zip(reports, self._nodes, strict=True) if of == node]
            needed, to_come = (sum(row[one] for row in rows) for one in (0, 1))
            free = next((row[2] for row in rows if row[2] is not None), None)
            if free is not None and needed + to_come > free:
                of = f", of this node and of {others} more" if others else ""
                raise state.MisfitError(
                    f"node {node} has too little memory for snapshots in memory",
                    where="World.resume(memory_every_steps=...)",
                    why=f"they take {show_size(needed)} there (the last whole one and the next{of}),"
                    f" the training itself takes {show_size(to_come)} from its first step on, and {show_size(free)} are free",
                    fix="ask for more memory for the job, or leave memory_every_steps out",
                )

    def wait(self) -> None:
        """Wait until the last snapshot is written, and if sharded complete on all nodes."""
        was_submitted, self._is_submitted = self._is_submitted, False
        try:
            self._saver.wait()
        except state.SnapshotError as error:
            if isinstance(error, state.ChangedError):
                self.stepped = ()  # from now on the loop waits for the whole copy
            self._tell(error)
        else:
            self._num_failed = 0 if was_submitted else self._num_failed

    def refuse(self, number: int, step: int, error: state.SnapshotError) -> None:
        """Tell the other ranks that this one has no part of a snapshot, so none waits for it."""
        writer.refuse(self.writers, number, step, error)
        self._tell(error)

    def _tell(self, error: state.SnapshotError) -> None:
        self._num_failed += 1
        text = f"{error.what}{f': {error.why}' if error.why else ''}"
        if self._num_failed == _MOST_FAILURES:
            text += f"; snapshots in memory have stopped: the last {_MOST_FAILURES} have failed"
        elif not self._has_reported:
            follows = "what lies on disk does not depend on it"
            if isinstance(error, state.ChangedError):
                follows = "from now on the loop waits for the whole copy"
            text += f"; this snapshot in memory is left out, and {follows}"
        else:
            return
        self._has_reported = True
        print(f"muster: rank {self.writers.rank}: {text}", file=sys.stderr, flush=True)

    def next_number(self) -> int:
        """Return the next snapshot's number, equal on all ranks."""
        self._num_orders += 1
        return self._num_orders - 1

    def submit(self, order: writer.WriteOrder) -> None:
        """Start a snapshot whose state is staged."""
        self.step, self.is_owed, self._is_submitted = order.step, False, True
        self._saver.submit(order)


def open_memory(
    settings: MemorySettings, disk: writer.Writers[Folder], world: Any, *, is_sharded: bool
) -> MemorySaves | None:
    """Agree on who holds what; without agents say so and return None. A collective.

    Args:
        settings: The script's options.
        disk: The writers of the snapshots on disk.
        world: The ranks.
        is_sharded: Each rank has a separate part.

    Raises:
        UsageError: There are too few nodes for the copies.
        SnapshotError: An agent can't hold any.
    """
    path = os.environ.get(contract.SOCKET_VARIABLE)
    leads = world.local_rank == 0
    machine = f"{proc.boot_id()}/{os.uname().nodename}"
    # Slurm names the switches above a node, from the top: `core.rack3.n17`. Source: sbatch(1).
    switches = os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    site = [machine, switches]
    reports = gather_json({"agent": bool(path), "node": world.node_rank, "site": site})
    if not path or not all(one["agent"] for one in reports):
        world.say(
            "memory_every_steps is without effect here: memory that outlives the workers belongs to the agents of"
            " `muster run`, and these were started by another launcher"
        )
        return None
    sites: dict[int, NodeSite] = {}
    for one in reports:
        sites.setdefault(one["node"], NodeSite(*one["site"]))
    nodes = [sites[node] for node in sorted(sites)]
    if settings.copies >= len(nodes) and settings.copies > 1:
        raise UsageError(
            f"memory_copies={settings.copies}: each node's part on as many other nodes,"
            f" but this run has {len(nodes)} node{'s' if len(nodes) > 1 else ''}",
            where="World.resume",
            fix=f"at most memory_copies={max(len(nodes) - 1, 1)}, or more nodes",
        )
    shifts = choose_shifts(nodes, settings.copies)
    is_first = os.environ.get(contract.ATTEMPT_VARIABLE, "0") == "0"
    if is_first and (risk := describe_risk(nodes, shifts)) is not None:
        world.say(f"note: {risk}")
    memory = NodeMemory(path)
    if leads:
        memory.all()  # now, while it can still be refused
    neighbours, names = None, {"data-00000.bin"}
    if is_sharded:
        targets = _targets(reports, sorted(sites), shifts)
        neighbours = Neighbours(
            group=dist.new_group(backend="gloo"),
            send_to=tuple(targets[world.rank]),
            take_from=tuple(rank for rank, goals in targets.items() if world.rank in goals),
            bytes_per_s=settings.mb_per_s * 1e6 if settings.mb_per_s is not None else None,
        )
        here = {rank for rank, one in enumerate(reports) if one["node"] == world.node_rank}
        ranks = {rank for rank, goals in targets.items() if here & {rank, *goals}}
        names = {f"data-{rank:05d}.bin" for rank in ranks}
    writers = writer.Writers(
        folder=HeldFolder(memory, names, neighbours),
        store=dist.PrefixStore("memory", world.connect()),
        rank=world.rank,
        world_size=world.world_size,
        generation=disk.generation,
        keep=1,
        timeout_s=disk.timeout_s,
        copies=leads,
        confirms=is_sharded,
    )
    return MemorySaves(settings, writers, memory, [one["node"] for one in reports])


def _targets(
    reports: Sequence[Any], nodes: Sequence[int], shifts: Sequence[int]
) -> dict[int, list[int]]:
    """Return the ranks that get each rank's part: those with the same position on other nodes."""
    ranks_of: dict[int, list[int]] = {}
    for other, one in enumerate(reports):
        ranks_of.setdefault(one["node"], []).append(other)
    targets: dict[int, list[int]] = {rank: [] for rank in range(len(reports))}
    for place, node in enumerate(nodes):
        for number, source in enumerate(ranks_of[node]):
            for shift in shifts:
                there = ranks_of[nodes[(place + shift) % len(nodes)]]
                targets[source].append(there[number % len(there)])
    return targets
