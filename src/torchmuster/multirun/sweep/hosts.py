"""The slots of a sweep on ssh hosts: each is a session on its host, held for the whole sweep.

A slot runs one member after the other, forked by the session's server. So muster logs in to a host
once per slot, and torch is imported there once.
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
from torchmuster.core.model.plan import RunPlan
from torchmuster.errors import MusterError
from torchmuster.launcher.model.run import record_of
from torchmuster.launcher.views.account import find_saved
from torchmuster.multirun.engine import HeldSession
from torchmuster.multirun.sweep.plan import SweepPlace, SweepPlan
from torchmuster.multirun.sweep.runs import MemberEnd, RunSlots, TakeEnd
from torchmuster.multirun.views.sessions import find_session, lives

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
                raise error_of_start(said.splitlines(), path)
        finally:
            os.close(log)


def error_of_start(lines: Sequence[str], where: str) -> MusterError:
    """Return the first error that the start of a session has printed.

    The lines may also contain errors of other slots.
    """
    begins = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    if not begins:
        return MusterError("a session for the slots can't be started", where=where)
    first, after = begins[0], begins[1] if len(begins) > 1 else len(lines)
    reasons, hint = list[str](), None
    for line in lines[first + 1 : after]:
        if line.startswith("  because: "):
            reasons = [line.removeprefix("  because: ")]
        elif line.startswith("    ") and reasons:
            reasons.append(line.removeprefix("    "))
        elif line.startswith("hint: "):
            hint = line.removeprefix("hint: ")
            break
    error = lines[first].removeprefix("error: ")
    return MusterError(error, where=where, why="\n".join(reasons) or None, fix=hint)
