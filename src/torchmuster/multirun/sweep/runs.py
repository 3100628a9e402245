"""The slots of a sweep whose members have several workers: each is a whole run with an owner, a head and agents."""

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

# What the owner of a sweep needs of its slots, whatever fills them.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnd:
    """How a member has ended.

    Attributes:
        state: By its own end, whoever asked for it.
        worker: How its only process ended, whose record is still to be written; None: it has a head that wrote it.
        is_lost: It ended by no fault of its own: what it ran in has died.
        has_lost_slot: Nothing can run in its slot any more.
        has_begun: False: it was refused by what is no fault of its own, and waits as before.
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
    """Return the GPUs that each slot's members see: one for each worker, in turn, so that all GPUs get the same number.

    Args:
        gpus: Of the machine; none where it has none.
        num_slots: How many there are.
        num_workers: Of each member. Where that is more than there are GPUs, a member sees all of them.
    """
    if not gpus:
        return ((),) * num_slots
    count = min(num_workers, len(gpus))
    firsts = (slot * num_workers for slot in range(num_slots))
    return tuple(tuple(gpus[(f + w) % len(gpus)] for w in range(count)) for f in firsts)


class Slots(Protocol):
    """Where members run."""

    @property
    def refusal(self) -> Report | None:
        """Return why no member can ever be started; None while that is not so."""

    @property
    def is_busy(self) -> bool:
        """Say whether members have to wait for what somebody else does there."""

    def home_of(self, run_dir: RunDir) -> frozenset[int] | None:
        """Return the slots that see what a member has saved; None: all do, or it has saved nothing."""

    def host(self, slot_number: int) -> str:
        """Return the name of the machine, or of the pod, that a slot is on."""

    async def open(self) -> None:
        """Get ready for members."""

    async def close(self) -> None:
        """End everything that is left."""

    def start(self, number: int, run_dir: RunDir, attempt: int, slot_number: int) -> None:
        """Start a member in a slot."""

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to a member, if it runs."""


_POLL_S = 0.02
_LOOK_S = 1.0  # whether a session is free


class RunSlots:
    """Starts each member as a run of its own, owned by a process that dies with us.

    Args:
        gpus: The GPUs of each slot; none where the machine has none.
        take_end: Called with a member and how it ended.

    Attributes:
        refusal: Nothing: each run says itself why it can't start.
        is_busy: Whether somebody else's run is where members would start.
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
        """Begin to watch."""
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End what runs."""
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
                proc.node_program("leashed", *command), env=environment, stdout=log, stderr=log
            )
        finally:
            os.close(log)
        write_owner(run_dir, child.pid)
        self._running[number] = (child, run_dir)

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to the owner of a member: it asks its workers, or ends them."""
        if number in self._running:
            child = self._running[number][0]
            child.send_signal(AT_ONCE if signum == signal.SIGKILL else signum)

    def end_of(self, number: int, run_dir: RunDir) -> MemberEnd:
        """Return how a member has ended, from what its owner has left."""
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
    """Runs members one after the other in a session that the user holds, and that others may use between two of them.

    Args:
        name: Of the session.
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
            NotFoundError: There is none, or it has ended.
        """
        self._held = await asyncio.to_thread(find_session, self._name)
        await super().open()

    async def close(self) -> None:
        """End what runs."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
        await super().close()

    def end_of(self, number: int, run_dir: RunDir) -> MemberEnd:
        """Return how a member has ended; one that the session has refused is as before."""
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
