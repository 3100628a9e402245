"""The slots for members that are runs, with owner, head and agents: here, in a session, or on ssh hosts.

A slot on a host runs one member after the other, forked by the session's server. So muster logs in
to a host once per slot, and torch is imported there once.
"""

import asyncio
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.failure import WorkerEnd
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import AT_ONCE, Report
from torchmuster.core.owner.create import write_owner
from torchmuster.core.owner.record import read_result
from torchmuster.errors import MusterError, SessionBusyError
from torchmuster.launcher.api.failures import read_errors
from torchmuster.launcher.model.run import record_of
from torchmuster.launcher.views.account import find_saved
from torchmuster.multirun.engine import HeldSession
from torchmuster.multirun.sweep.plan import SweepPlace, SweepPlan
from torchmuster.multirun.views.sessions import find_session, lives, view_session


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


class Slots:
    """What the owner of a sweep needs of its slots.

    Attributes:
        refusal: Why no member can ever be started; None if members can be.
        is_busy: Whether members must wait for another run.
    """

    refusal: Report | None = None
    is_busy = False

    def home_of(self, run_dir: RunDir) -> frozenset[int] | None:
        """Return the slots that see a member's snapshots; None if all do, or there are none."""
        return None

    async def open(self) -> None:
        """Prepare the slots for members."""
        raise NotImplementedError

    async def close(self) -> None:
        """End everything that still runs."""
        raise NotImplementedError

    def start(self, number: int, run_dir: RunDir, attempt: int, slot_number: int) -> None:
        """Start a member in a slot."""
        raise NotImplementedError

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to a member, if it runs."""
        raise NotImplementedError


_POLL_S = 0.02
_LOOK_FREE_S = 1.0  # between checks whether a session is free


class RunSlots(Slots):
    """Starts each member as a separate run, owned by a process that dies with us.

    Each run reports itself why it can't start.

    Args:
        gpus: The GPUs of each slot; empty if the machine has none.
        take_end: Called with a member and how it ended.
    """

    def __init__(self, gpus: Sequence[Sequence[str]], take_end: TakeEnd) -> None:
        self._gpus, self._take_end = gpus, take_end
        self._running: dict[int, tuple[proc.Child, RunDir]] = {}
        self._watching: asyncio.Task[None] | None = None

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
            await asyncio.sleep(_LOOK_FREE_S)
        self.is_busy = False


# Slots on ssh hosts: each is a session on its host, held for the whole sweep.


_IDLE = "5m"  # how long a session outlives an owner that was killed
_LOOK_S = 0.05


@dataclass(slots=True)
class _Slot:
    place: SweepPlace
    session: str
    held: HeldSession | None = None

    @property
    def is_there(self) -> bool:
        """Return whether members can run here."""
        return self.held is not None and lives(self.held.run_dir)


class HostSlots(RunSlots):
    """Holds a session for each slot, and runs members in them.

    Args:
        plan: The plan of the sweep.
        run_dir: The run directory of the sweep.
        take_end: Called with a member and how it ended.
        say: Tells the user a sentence.
    """

    def __init__(
        self, plan: SweepPlan, run_dir: RunDir, take_end: TakeEnd, say: Callable[[str], None]
    ) -> None:
        super().__init__([()] * len(plan.places), take_end)
        self._plan, self._run_dir, self._say = plan, run_dir, say
        word = secrets.token_hex(3)
        self._slots = [
            _Slot(place, f"sweep-{word}-{number}") for number, place in enumerate(plan.places)
        ]
        self._slot_of: dict[int, _Slot] = {}

    async def open(self) -> None:
        """Start all sessions at once, and wait until they are open.

        Raises:
            MusterError: A session can't be started; `close` ends the others.
        """
        hosts = ", ".join(dict.fromkeys(slot.place.host for slot in self._slots))
        self._say(f"opening {len(self._slots)} slots on {hosts}")
        opened = (self._open(slot) for slot in self._slots)
        # Wait for all of them, so that `close` finds every open session when another has failed.
        ends = await asyncio.gather(*opened, return_exceptions=True)
        if errors := [end for end in ends if end is not None]:
            raise errors[0]
        await super().open()

    def home_of(self, run_dir: RunDir) -> frozenset[int] | None:
        """Return the slots on the host that has a member's snapshots; None if any slot will do."""
        saved = find_saved(run_dir)
        if saved is None or saved.step is None or saved.is_seen:
            return None
        nodes = [node.node for one in record_of(run_dir).attempts for node in one.start.nodes]
        return frozenset(n for n, slot in enumerate(self._slots) if slot.place.host in nodes[-1:])

    async def close(self) -> None:
        """End the members that still run, then the sessions."""
        await super().close()
        held = [slot.session for slot in self._slots if slot.is_there]
        await asyncio.gather(*(self._command("end", name) for name in held))

    def start(self, number: int, run_dir: RunDir, attempt: int, slot_number: int) -> None:
        """Start the owner of a member, which runs in the session of a slot."""
        slot = self._slot_of[number] = self._slots[slot_number]
        plan = self._placed(self._plan.member_plan(number), slot)
        atomic.write_json(run_dir.plan, codec.to_plain(plan))
        super().start(number, run_dir, attempt, slot_number)

    def end_of(self, number: int, run_dir: RunDir) -> MemberEnd:
        """Return how a member has ended; if its session has ended too, the member is lost."""
        end, slot = super().end_of(number, run_dir), self._slot_of.pop(number)
        if slot.is_there:
            return end
        self._say(f"a slot on {slot.place.host} is lost: its session has ended")
        return replace(end, is_lost=True, has_lost_slot=True)

    def _placed(self, plan: RunPlan, slot: _Slot) -> RunPlan:
        setup = plan.node_setup
        if slot.place.gpus:
            shown = ("CUDA_VISIBLE_DEVICES", ",".join(slot.place.gpus))
            setup = replace(setup, environment=(*setup.environment, shown))
        return replace(
            plan,
            session=slot.session,
            engine=slot.place.site,
            node_names=(slot.place.host,),
            node_setup=setup,
            preflight="off",
        )

    # The sessions.

    async def _open(self, slot: _Slot) -> None:
        program, place = self._plan.run.program, slot.place
        words = ["--on", place.site, "--hosts", place.host, "--name", slot.session, "--idle", _IDLE]
        words += ["--nproc-per-node", str(self._plan.run.num_workers(0))]
        words += [word for name in program.preload for word in ("--preload", name)]
        words += ["--python", shlex.join(program.python)] if program.python else []
        await self._command("start", *words)
        slot.held = find_session(slot.session)

    async def _command(self, *words: str) -> None:
        """Run `muster session` without blocking the event loop.

        Raises:
            MusterError: `muster session start` has failed; its output is in the log of the slots.
        """
        path = self._run_dir.agent_log("slots")
        log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        begin = os.fstat(log).st_size
        try:
            argv = [sys.executable, "-m", "torchmuster", "session", *words]
            child = proc.start(argv, env=proc.own_package_environment(), stdout=log, stderr=log)
            try:
                while (status := child.poll()) is None:
                    await asyncio.sleep(_LOOK_S)
            except asyncio.CancelledError:
                child.send_signal(signal.SIGTERM)
                raise
            if status and words[0] == "start":
                said = os.pread(log, 1 << 16, begin).decode(errors="replace")
                raise error_of_start(said, path)
        finally:
            os.close(log)


def error_of_start(text: str, where: str) -> MusterError:
    """Return the first error that the start of a session has printed; others may be of other slots."""
    errors = read_errors(text)
    if not errors:
        return MusterError("a session for the slots can't be started", where=where)
    return MusterError(errors[0].what, where=where, why=errors[0].why, fix=errors[0].fix)
