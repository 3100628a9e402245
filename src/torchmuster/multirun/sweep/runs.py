"""The slots for members with several workers: each member is a run with owner, head and agents."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.failure import WorkerEnd
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import AT_ONCE, Report
from torchmuster.core.owner.create import write_owner
from torchmuster.core.owner.record import read_result
from torchmuster.errors import SessionBusyError
from torchmuster.multirun.views.sessions import find_session, view_session


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnd:
    """How a member has ended.

    Attributes:
        state: Its state by its own end, not counting requests to stop.
        worker: How its only process ended, still to be recorded; None: its head has recorded it.
        is_lost: It ended through no fault of its own: what it ran in has died.
        has_lost_slot: Nothing can run in its slot any more.
        has_begun: False: it was refused through no fault of its own, and waits again.
    """

    state: RunState
    worker: WorkerEnd | None = None
    is_lost: bool = False
    has_lost_slot: bool = False
    has_begun: bool = True


TakeEnd = Callable[[int, MemberEnd], None]


def gpus_of_slots(
    gpus: Sequence[str], num_slots: int, num_workers: int
) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs that each slot's members see: one per worker, round-robin, for an even load.

    Args:
        gpus: The GPUs of the machine, if any.
        num_slots: The number of slots.
        num_workers: The workers of each member; if there are fewer GPUs, a member sees all.
    """
    if not gpus:
        return ((),) * num_slots
    count = min(num_workers, len(gpus))
    firsts = (slot * num_workers for slot in range(num_slots))
    return tuple(tuple(gpus[(f + w) % len(gpus)] for w in range(count)) for f in firsts)


class Slots(Protocol):
    """What the owner of a sweep needs of its slots."""

    @property
    def refusal(self) -> Report | None:
        """Return why no member can ever be started; None if members can be."""

    @property
    def is_busy(self) -> bool:
        """Return whether members must wait for another run."""

    def home_of(self, run_dir: RunDir) -> frozenset[int] | None:
        """Return the slots that see a member's snapshots; None if all do, or there are none."""

    def host(self, slot_number: int) -> str:
        """Return the name of the machine, or of the pod, that a slot is on."""

    async def open(self) -> None:
        """Prepare the slots for members."""

    async def close(self) -> None:
        """End everything that still runs."""

    def start(self, number: int, run_dir: RunDir, attempt: int, slot_number: int) -> None:
        """Start a member in a slot."""

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to a member, if it runs."""


_POLL_S = 0.02
_LOOK_S = 1.0  # between checks whether a session is free


class RunSlots:
    """Starts each member as a separate run, owned by a process that dies with us.

    Args:
        gpus: The GPUs of each slot; empty if the machine has none.
        take_end: Called with a member and how it ended.

    Attributes:
        refusal: Always None: each run reports itself why it can't start.
        is_busy: Whether another run occupies the slot.
    """

    def __init__(self, gpus: Sequence[Sequence[str]], take_end: TakeEnd) -> None:
        self.refusal: Report | None = None
        self.is_busy = False
        self._gpus, self._take_end = gpus, take_end
        self._running: dict[int, tuple[proc.Child, RunDir]] = {}
        self._watching: asyncio.Task[None] | None = None

    def home_of(self, run_dir: RunDir) -> frozenset[int] | None:
        """Return None: all slots see the same files."""
        del run_dir
        return None

    def host(self, slot_number: int) -> str:
        """Return the name of this machine."""
        del slot_number
        return os.uname().nodename

    async def open(self) -> None:
        """Start watching for members that end."""
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Kill the members that still run."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for child, _ in self._running.values():
            child.send_signal(signal.SIGKILL)
        while proc.end_children():
            await asyncio.sleep(_POLL_S)

    def start(self, number: int, run_dir: RunDir, attempt: int, slot_number: int) -> None:
        """Start the owner of a member."""
        del attempt  # it reads the record itself
        environment = proc.own_package_environment()
        if self._gpus[slot_number]:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[slot_number])
        log = os.open(run_dir.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            command = [sys.executable, "-m", "torchmuster.core.owner.detach", run_dir.path]
            child = proc.start(
                proc.node_program("dies_with_parent", *command),
                env=environment,
                stdout=log,
                stderr=log,
            )
        finally:
            os.close(log)
        write_owner(run_dir, child.pid)
        self._running[number] = (child, run_dir)

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to the owner of a member, which stops its workers, or kills them."""
        if number in self._running:
            child = self._running[number][0]
            child.send_signal(AT_ONCE if signum == signal.SIGKILL else signum)

    def end_of(self, number: int, run_dir: RunDir) -> MemberEnd:
        """Return how a member has ended, from the result that its owner has written."""
        del number
        result = read_result(run_dir)
        state = result.state if result is not None else RunState.LOST
        return MemberEnd(state=state, is_lost=result is None)

    async def _watch(self) -> None:
        while True:
            for number, (child, run_dir) in list(self._running.items()):
                if child.poll() is not None:
                    del self._running[number]
                    self._take_end(number, self.end_of(number, run_dir))
            await asyncio.sleep(_POLL_S)


class SessionSlots(RunSlots):
    """Runs members one after the other in a session of the user; other runs may come in between.

    Args:
        name: The name of the session.
        take_end: Called with a member and how it ended.
        say: Tells the user a sentence.
    """

    def __init__(self, name: str, take_end: TakeEnd, say: Callable[[str], None]) -> None:
        super().__init__([()], take_end)
        self._name, self._say = name, say
        self._waiting: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Find the session.

        Raises:
            NotFoundError: There is no such session, or it has ended.
        """
        self._held = await asyncio.to_thread(find_session, self._name)
        await super().open()

    async def close(self) -> None:
        """Kill the member that still runs."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
        await super().close()

    def end_of(self, number: int, run_dir: RunDir) -> MemberEnd:
        """Return how a member has ended; one that the session has refused has not begun."""
        end, result = super().end_of(number, run_dir), read_result(run_dir)
        has_begun = result is None or result.attempts > 0
        if not self._held.lives():
            self._say(f"the session {self._name} has ended")
            return replace(end, has_begun=has_begun, has_lost_slot=True)
        report = result.report if result is not None and not has_begun else None
        if report is None or report.error != SessionBusyError(self._name, "").what:
            return end
        self.is_busy = True
        why = "; ".join(report.because)
        self._say(f"{report.error}: {why}; the sweep goes on when that has ended")
        self._waiting = asyncio.create_task(self._wait_until_free())
        return replace(end, has_begun=False)

    async def _wait_until_free(self) -> None:
        while self._held.lives():
            view = await asyncio.to_thread(view_session, self._held.run_dir)
            if view.state is None or not view.state.run_id:
                break
            await asyncio.sleep(_LOOK_S)
        self.is_busy = False
