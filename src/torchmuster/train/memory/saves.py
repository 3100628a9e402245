"""A run's snapshots in memory: who holds what, when one is due, and what it needs on each node."""

import os
import sys
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.core import proc
from torchmuster.core.model import contract
from torchmuster.core.model.contract import NODE_VARIABLE
from torchmuster.core.model.text import show_size
from torchmuster.core.node.kernel import free_bytes
from torchmuster.errors import UsageError
from torchmuster.train.exchange import broadcast_buffer, broadcast_bytes, gather_json
from torchmuster.train.memory.folder import HeldFolder, Neighbours
from torchmuster.train.memory.held import HeldFile, NodeMemory, Part, agent_socket
from torchmuster.train.objects import Objects
from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.folder import Folder
from torchmuster.train.snapshot.layout import MANIFEST, SnapshotManifest, decode_manifest
from torchmuster.train.snapshot.load import LoadedSnapshot
from torchmuster.train.snapshot.staging import Staging
from torchmuster.train.snapshot.state import ChangedError, DamagedError, MisfitError, SnapshotError

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


def own_location(environ: Mapping[str, str] = os.environ) -> NodeSite:
    """Return the location of this node.

    Slurm names the switches above a node, from the top: `core.rack3.n17` (sbatch(1),
    SLURM_TOPOLOGY_ADDR).
    """
    switches = environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    return NodeSite(machine=f"{proc.boot_id()}/{os.uname().nodename}", switch=switches)


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
    if len(machines) == count:
        return None
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
        good = [row[0] for row in rows]
        # Rank 0 reports other nodes' damage, too, as its output is shown.
        for text in [text for row in rows for text in row[1]] if dist.get_rank() == 0 else damaged:
            report(text)
        holders = {
            name: rank for rank in reversed(range(len(good))) for name in good[rank]
        }  # the lowest rank that has it
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
    except DamagedError:
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


_TURNS = 2  # each part needs space twice: for the last complete one and the next


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
        reports = gather_json([num_bytes * _TURNS * (1 + others), to_come_bytes, free])
        for node in sorted(set(self._nodes)):
            rows = [row for row, of in zip(reports, self._nodes, strict=True) if of == node]
            needed, to_come = (sum(row[one] for row in rows) for one in (0, 1))
            free = next((row[2] for row in rows if row[2] is not None), None)
            if free is not None and needed + to_come > free:
                of = f", of this node and of {others} more" if others else ""
                raise MisfitError(
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
        except SnapshotError as error:
            if isinstance(error, ChangedError):
                self.stepped = ()  # from now on the loop waits for the whole copy
            self._tell(error)
        else:
            self._num_failed = 0 if was_submitted else self._num_failed

    def refuse(self, number: int, step: int, error: SnapshotError) -> None:
        """Tell the other ranks that this one has no part of a snapshot, so none waits for it."""
        writer.refuse(self.writers, number, step, error)
        self._tell(error)

    def _tell(self, error: SnapshotError) -> None:
        self._num_failed += 1
        text = f"{error.what}{f': {error.why}' if error.why else ''}"
        if self._num_failed == _MOST_FAILURES:
            text += f"; snapshots in memory have stopped: the last {_MOST_FAILURES} have failed"
        elif not self._has_reported:
            follows = "what lies on disk does not depend on it"
            if isinstance(error, ChangedError):
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
    path = agent_socket()
    leads = world.local_rank == 0
    stand = own_location()
    mine = {
        "agent": path is not None,
        "node": world.node_rank,
        "stand": [stand.machine, stand.switch],
    }
    reports = gather_json(mine)
    if path is None or not all(one["agent"] for one in reports):
        world.say(
            "memory_every_steps is without effect here: memory that outlives the workers belongs to the agents of"
            " `muster run`, and these were started by another launcher"
        )
        return None
    sites: dict[int, NodeSite] = {}
    for one in reports:
        sites.setdefault(one["node"], NodeSite(*one["stand"]))
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
        limit = settings.mb_per_s * 1e6 if settings.mb_per_s is not None else None
        neighbours = Neighbours(
            group=dist.new_group(backend="gloo"),
            send_to=tuple(targets[world.rank]),
            take_from=tuple(rank for rank, goals in targets.items() if world.rank in goals),
            bytes_per_s=limit,
        )
        here = {rank for rank, one in enumerate(reports) if one["node"] == world.node_rank}
        ranks = {rank for rank, goals in targets.items() if here & {rank, *goals}}
        names = {f"data-{rank:05d}.bin" for rank in ranks}
    folder = HeldFolder(memory, names, neighbours)
    writers = writer.Writers(
        folder=folder,
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
