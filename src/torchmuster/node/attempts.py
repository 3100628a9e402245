"""Keeps the attempts of a node: starts each when the node is ready for it, follows its processes, reports its end."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from torchmuster import proc
from torchmuster.files.disk import DiskWriter
from torchmuster.files.old_logs import remove_old, too_old
from torchmuster.model import heartbeat
from torchmuster.model.failure import LeftProcess, WorkerEnd
from torchmuster.net import messages
from torchmuster.node.showing import Showing
from torchmuster.node.spawner import messages as orders
from torchmuster.node.spawner.keeper import SpawnerKeeper, describe_status
from torchmuster.node.workers import NodeAttempt, WorkerSettings

_LOOK_EVERY_S = 0.25
_STACKS_S = 0.5


class AttemptUser(Protocol):
    """What a keeper needs of its agent."""

    def settings_of(self, order: messages.StartAttempt) -> WorkerSettings | None:
        """Return what the workers of an attempt get; None while the node is not set up for them."""

    def tell(self, text: str) -> None:
        """Say a sentence to the user."""

    def send(self, message: messages.Message) -> None:
        """Send to the head, if it is connected."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside all else."""


class AttemptKeeper:
    """The attempts of one agent, one after the other.

    Args:
        spawners: They start the workers.
        showing: Where the workers' output is shown.
        disk: Writes their logs.
        user: The agent.
        take_store: Returns the listening socket of an attempt's store; on the head's node only.

    Attributes:
        last: The newest attempt that was started here.
    """

    def __init__(
        self,
        spawners: SpawnerKeeper,
        showing: Showing,
        disk: DiskWriter,
        user: AttemptUser,
        take_store: Callable[[int], Any] | None = None,
    ) -> None:
        self.last: NodeAttempt | None = None
        self._order: messages.StartAttempt | None = None  # waits for the node
        self._settling: int | None = None  # the attempt of which nothing but output is left
        self._spawners, self._showing = spawners, showing
        self._disk, self._user = disk, user
        self._take_store = take_store

    def living(self) -> NodeAttempt | None:
        """Return the attempt of which something may be left on this node."""
        attempt = self.last
        return attempt if attempt is not None and not attempt.reaped else None

    # The start.

    def take_order(self, order: messages.StartAttempt) -> None:
        """Start an attempt now, or as soon as the node is ready for it."""
        self._order = order
        self.start_if_ready()

    def start_if_ready(self) -> None:
        """Start the attempt that waits, unless the spawner or the setup is missing or the last one is not gone."""
        order, spawner = self._order, self._spawners.link
        if order is None or spawner is None or self._spawners.ready is None:
            return
        settings = self._user.settings_of(order) if self.living() is None else None
        if settings is None:
            return
        self._order = None
        attempt = NodeAttempt(order, settings, spawner, self._report_end)
        self.last = attempt
        self._showing.prefix_lines(order.ranks, self._spawners.environment)
        self._start_store(order)
        show = partial(self._showing.show, order.attempt)
        attempt.start(self._disk, show, self._showing.is_congested)
        for problem in attempt.problems:
            self._user.tell(problem)
        if (old := too_old(order.attempt, order.world_size)) is not None:
            first = order.ranks.first_rank
            ranks = range(first, first + order.ranks.num_workers)
            self._user.spawn(asyncio.to_thread(remove_old, settings.run_dir, old, ranks))

    def _start_store(self, order: messages.StartAttempt) -> None:
        store = self._take_store(order.attempt) if self._take_store is not None else None
        if store is None:
            return
        if self._spawners.has_torch:
            start = orders.StartStore(host=order.master_addr, port=order.master_port)
            self._spawners.order(start, os.dup(store.fileno()))
        store.close()

    # Its processes.

    def take_child(self, event: orders.ChildStarted | orders.ChildEnded) -> None:
        """Take that a worker or the store has started or ended."""
        attempt = self.last
        if attempt is None:
            return
        match event:
            case orders.ChildStarted(kind="worker"):
                attempt.note_started(event.rank, event.pid)
                self._announce_start(attempt)
            case orders.ChildEnded(kind="worker"):
                attempt.note_exit(event.rank, event.status)
            case orders.ChildEnded() if not attempt.killed:
                detail = describe_status(event.status)
                self._user.send(messages.StoreLost(attempt=attempt.attempt, detail=detail))

    def _announce_start(self, attempt: NodeAttempt) -> None:
        if attempt.all_started:
            self._user.send(
                messages.WorkersStarted(
                    attempt=attempt.attempt,
                    pids=attempt.pids,
                    spawner_pid=self._spawners.pid,
                )
            )

    def _report_end(self, end: WorkerEnd) -> None:
        self._user.send(messages.WorkerEnded(end=end))

    # The end.

    def take_kill(self, order: messages.KillAttempt) -> None:
        """Kill the workers of an attempt; of one that is not here nothing is left."""
        self._order = None
        living = self.living()
        if order.attempt == self._settling:
            return  # it is told in a moment
        if living is None or living.attempt != order.attempt:
            self._user.send(messages.AllReaped(attempt=order.attempt))
        elif order.grace_s and not living.asked:
            self._user.spawn(self._let_save(living, order.grace_s))
        else:
            self.kill(ended_well=order.ended_well)

    async def _let_save(self, attempt: NodeAttempt, grace_s: float) -> None:
        await let_save(attempt, grace_s)
        if self.living() is attempt:
            self.kill()

    def kill(self, *, ended_well: bool = False) -> None:
        """Kill the workers that live; an attempt that waits is that of a head that is gone, or of one that takes it back."""
        self._order = None
        attempt = self.living()
        if attempt is not None:
            attempt.killed = True
            self._spawners.kill_children(lambda: attempt.reaped, ended_well=ended_well)

    async def lose(self, why: str, *, was_killed: bool) -> None:
        """Take that all workers have died with their spawner, which the kernel may have killed for its memory."""
        if (living := self.living()) is not None:
            evidence = await living.memory_evidence() if was_killed else None
            living.note_lost(why, evidence)
            await self.finish()

    async def finish(self, left: tuple[LeftProcess, ...] = ()) -> None:
        """Take that all processes of the living attempt are gone, except those that may stay; start what waits."""
        attempt = self.living()
        if attempt is None:
            return
        await attempt.finish()
        self._settling = attempt.attempt
        await self._showing.settle()
        self._settling = None
        self._user.send(messages.AllReaped(attempt=attempt.attempt, left=left))
        self.start_if_ready()


# The survivors of a failure.


async def let_save(attempt: NodeAttempt, grace_s: float) -> None:
    """End the ranks of this node that survive a failure, those that can use it with SIGTERM first; return when all may be killed.

    A rank that waits in a collective runs no handler until its peers answer, and one of them is gone. So only a rank with a
    handler of its own gets the signal, while its stack shows it outside of collectives; it is looked at again and again, and
    ended when it enters one. A rank of `torchmuster.train` saves what it needs in time: it is ended at once.

    Args:
        attempt: Theirs.
        grace_s: From SIGTERM to the end.
    """
    attempt.asked = True
    saving = [(rank, pid) for rank, pid in attempt.running if _can_save(attempt, rank, pid)]
    for rank, pid in attempt.running:
        if (rank, pid) not in saving:
            proc.kill_quietly(pid)
    deadline, told = time.monotonic() + grace_s, set[int]()
    while saving and time.monotonic() < deadline:
        waiting = await asyncio.to_thread(_in_collectives, attempt.folder, attempt.attempt, saving)
        for rank, pid in saving:
            if rank in waiting:
                proc.kill_quietly(pid)
            elif rank not in told:
                told.add(rank)
                proc.kill_quietly(pid, signal.SIGTERM)
        await asyncio.sleep(_LOOK_EVERY_S)
        saving = [one for one in attempt.running if one in saving]


def _can_save(attempt: NodeAttempt, rank: int, pid: int) -> bool:
    has_library = os.path.exists(heartbeat.heartbeat_path(attempt.folder, attempt.attempt, rank))
    return not has_library and proc.catches_signal(pid, signal.SIGTERM)


def _in_collectives(folder: str, attempt: int, workers: list[tuple[int, int]]) -> set[int]:
    """Return the ranks whose stacks show that they wait for others; who can't answer is taken for one that works."""
    from torchmuster.diagnose.facts.stacks import Doing, judge
    from torchmuster.node.stacks import take_stacks

    found = take_stacks(folder, attempt, workers, _STACKS_S)
    return {
        one.rank
        for one in found
        if judge(one.text, state=one.state, source=one.source).doing is Doing.WAITS
    }
