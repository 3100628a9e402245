"""Snapshots in memory as a run makes them: who holds what, when one is made, and what it needs of each node."""

import os
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torchmuster.diagnose.facts.memory import free_bytes
from torchmuster.errors import UsageError
from torchmuster.model import contract
from torchmuster.model.display.text import show_size
from torchmuster.train.exchange import gather_json
from torchmuster.train.memory.folder import HeldFolder, Neighbours
from torchmuster.train.memory.held import NodeMemory, agent_socket
from torchmuster.train.memory.look import Age, HeldSnapshot, look
from torchmuster.train.memory.neighbours import (
    NodeStand,
    choose_shifts,
    own_stand,
    risk_in_words,
)
from torchmuster.train.objects import Objects
from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.folder import Folder
from torchmuster.train.snapshot.staging import Staging
from torchmuster.train.snapshot.state import ChangedError, MisfitError, SnapshotError

_TURNS = 2  # each part is there twice: the last whole one, and the next


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Options of `World.resume`, which documents them."""

    every_steps: int
    copies: int = 1
    mb_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse a limit that lets nothing through.

        Raises:
            UsageError: It is no number above zero.
        """
        limit = self.mb_per_s
        if limit is not None and (isinstance(limit, str) or not limit > 0):
            raise UsageError(
                f"memory_mb_per_s is {limit!r}, no number above zero", where="World.resume"
            )


_HAVE_STOPPED = 3  # so many that failed one after the other


class MemorySaves:
    """Makes snapshots in memory, one at a time in the background.

    Attributes:
        crew: Of the writers, as of those on disk.
        staging: Copies the state to where it stays.
        stepped: What only optimizers change, so that it may be copied until the next one steps.
        step: The step of the newest one that was started or loaded; -1 for none.
        is_owed: One is to be made at the next boundary: after a loss the node that has come holds nothing yet, and until it
            does the loss of another one would cost all of it.
    """

    def __init__(
        self,
        settings: MemorySettings,
        crew: writer.Writers[HeldFolder],
        memory: NodeMemory,
        nodes: Sequence[int],
    ) -> None:
        """Store the arguments; `nodes` is the node of each rank."""
        self.settings = settings
        self.crew = crew
        self.step = -1
        self.is_owed = False
        self._nodes = nodes
        self._memory = memory
        self._saver = writer.Saver(crew)
        self.staging = Staging(crew.folder.room)
        self._num_orders = 0
        self._num_failed = 0  # one after the other
        self._is_submitted = False
        self._has_told = False
        self.stepped: Container[str] = ()

    def follow(self, objects: Objects) -> None:
        """Copy what only these optimizers change beside the forward and backward that follow; they wait for it."""
        self.stepped = objects.stepped()
        for optimizer in objects.optimizers():
            optimizer.register_step_pre_hook(lambda *_: self._saver.wait_for_copy())

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot in memory is to be made after this step."""
        return self.is_owed or (step % self.settings.every_steps == 0 and step != self.step)

    def look(self, newer_than: Age, report: Callable[[str], None]) -> HeldSnapshot | None:
        """Return the newest good snapshot in memory, if it is newer than disk's; forget all others. A collective."""
        leads = self.crew.rank == 0 or self.crew.copies
        found = look(self._memory.all() if leads else [], newer_than, report)
        if leads:
            age = (found.manifest.generation, found.manifest.step) if found is not None else None
            self.crew.folder.forget_all_but(age)
        return found

    def check_room(self, num_bytes: int, to_come_bytes: int) -> None:
        """Refuse, on all ranks, what the memory of a node has no room for; a collective.

        Args:
            num_bytes: Of this rank's part, as far as it is known before the first step.
            to_come_bytes: What the first step itself takes of the node's memory, for gradients and optimizers.

        Raises:
            MisfitError: Some node has too little memory for the copies.
        """
        others = self.settings.copies if self.crew.confirms else 0
        free = free_bytes() if self.crew.copies else None
        if free is not None:  # what is held of the last attempt is written over
            free += sum(file.size for file in self._memory.all())
        told = gather_json([num_bytes * _TURNS * (1 + others), to_come_bytes, free])
        for node in sorted(set(self._nodes)):
            rows = [row for row, of in zip(told, self._nodes, strict=True) if of == node]
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
        """Wait until the last one is written, and complete on all nodes if its parts differ: its place is needed."""
        was_submitted, self._is_submitted = self._is_submitted, False
        try:
            self._saver.wait()
        except SnapshotError as error:
            if isinstance(error, ChangedError):
                self.stepped = ()  # from now on the loop waits for the copy of all
            self._tell(error)
        else:
            self._num_failed = 0 if was_submitted else self._num_failed

    def refuse(self, number: int, step: int, error: SnapshotError) -> None:
        """Tell the other ranks that this one has no part of a snapshot, so that none waits for it."""
        writer.refuse(self.crew, number, step, error)
        self._tell(error)

    def _tell(self, error: SnapshotError) -> None:
        self._num_failed += 1
        text = f"{error.what}{f': {error.why}' if error.why else ''}"
        if self._num_failed == _HAVE_STOPPED:
            text += f"; snapshots in memory have stopped: the last {_HAVE_STOPPED} have failed"
        elif not self._has_told:
            follows = "what lies on disk does not depend on it"
            if isinstance(error, ChangedError):
                follows = "from now on the loop waits for the whole copy"
            text += f"; this snapshot in memory is left out, and {follows}"
        else:
            return
        self._has_told = True
        print(f"muster: rank {self.crew.rank}: {text}", file=sys.stderr, flush=True)

    def next_number(self) -> int:
        """Return the number of the next one, the same on all ranks."""
        self._num_orders += 1
        return self._num_orders - 1

    def submit(self, order: writer.WriteOrder) -> None:
        """Start a snapshot whose state is staged."""
        self.step, self.is_owed, self._is_submitted = order.step, False, True
        self._saver.submit(order)


def open_memory(
    settings: MemorySettings, disk: writer.Writers[Folder], world: Any, *, is_sharded: bool
) -> MemorySaves | None:
    """Agree on who holds what; None, said, where no agent can hold it. A collective.

    Args:
        settings: From the script.
        disk: The writers of the snapshots on disk.
        world: The ranks.
        is_sharded: Each rank has a part of its own.

    Raises:
        UsageError: There are fewer nodes than copies.
        SnapshotError: An agent can't hold any.
    """
    path = agent_socket()
    leads = world.local_rank == 0
    stand = own_stand()
    mine = {
        "agent": path is not None,
        "node": world.node_rank,
        "stand": [stand.machine, stand.switch],
    }
    told = gather_json(mine)
    if path is None or not all(one["agent"] for one in told):
        world.say(
            "memory_every_steps is without effect here: memory that outlives the workers belongs to the agents of"
            " `muster run`, and these were started by another launcher"
        )
        return None
    stands: dict[int, NodeStand] = {}
    for one in told:
        stands.setdefault(one["node"], NodeStand(*one["stand"]))
    nodes = [stands[node] for node in sorted(stands)]
    if settings.copies >= len(nodes) and settings.copies > 1:
        raise UsageError(
            f"memory_copies={settings.copies}: each node's part on as many other nodes,"
            f" but this run has {len(nodes)} node{'s' if len(nodes) > 1 else ''}",
            where="World.resume",
            fix=f"at most memory_copies={max(len(nodes) - 1, 1)}, or more nodes",
        )
    shifts = choose_shifts(nodes, settings.copies)
    is_first = os.environ.get(contract.ATTEMPT_VARIABLE, "0") == "0"
    if is_first and (risk := risk_in_words(nodes, shifts)) is not None:
        world.say(f"note: {risk}")
    memory = NodeMemory(path)
    if leads:
        memory.all()  # now, when it can still be refused
    neighbours, names = None, {"data-00000.bin"}
    if is_sharded:
        targets = _targets(told, sorted(stands), shifts)
        limit = settings.mb_per_s * 1e6 if settings.mb_per_s is not None else None
        neighbours = Neighbours(
            group=dist.new_group(backend="gloo"),
            send_to=tuple(targets[world.rank]),
            take_from=tuple(rank for rank, goals in targets.items() if world.rank in goals),
            bytes_per_s=limit,
        )
        here = {rank for rank, one in enumerate(told) if one["node"] == world.node_rank}
        ranks = {rank for rank, goals in targets.items() if here & {rank, *goals}}
        names = {f"data-{rank:05d}.bin" for rank in ranks}
    folder = HeldFolder(memory, names, neighbours)
    crew = writer.Writers(
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
    return MemorySaves(settings, crew, memory, [one["node"] for one in told])


def _targets(
    told: Sequence[Any], nodes: Sequence[int], shifts: Sequence[int]
) -> dict[int, list[int]]:
    """Return the ranks that get each rank's part: those of the same number on other nodes."""
    ranks_of: dict[int, list[int]] = {}
    for other, one in enumerate(told):
        ranks_of.setdefault(one["node"], []).append(other)
    targets: dict[int, list[int]] = {rank: [] for rank in range(len(told))}
    for place, node in enumerate(nodes):
        for number, source in enumerate(ranks_of[node]):
            for shift in shifts:
                there = ranks_of[nodes[(place + shift) % len(nodes)]]
                targets[source].append(there[number % len(there)])
    return targets
