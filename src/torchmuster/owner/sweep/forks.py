"""The slots of a sweep whose members are single processes: one spawner with torch imported forks them all.

A member costs one fork, not a start of Python, of an agent and of a head: that is why it has none of its own. Its evidence is
collected as an agent collects it (`node/workers.py`), and its record is that of a run.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.model import contract
from torchmuster.model.failure import EndKind, WorkerEnd
from torchmuster.model.liveness.lease import PING_EVERY_S, OwnClock
from torchmuster.model.ranks import assign_ranks
from torchmuster.model.verdict import Report, explain_refused_start
from torchmuster.net import messages
from torchmuster.net.ipc import IpcCall, IpcServer
from torchmuster.net.ipc_messages import AskMemory, CallTaken, WorkerReport
from torchmuster.node.environment import THREADS
from torchmuster.node.leftovers import make_socket_folder, sweep_beside
from torchmuster.node.memory import HeldMemory
from torchmuster.node.spawner import messages as orders
from torchmuster.node.spawner.keeper import SpawnerKeeper
from torchmuster.node.voice import LogVoice, Voice
from torchmuster.node.workers import NodeAttempt, WorkerSettings
from torchmuster.owner.sweep.members import state_of_end
from torchmuster.owner.sweep.slots import MemberEnd, TakeEnd
from torchmuster.spec.sweep_plan import SweepPlan

_UNKNOWN_S = 1.0  # a member may call before the spawner has come to say that it has started
_LEFTOVERS_S = 5.0
_LOOK_EVERY_S = 0.005
_WATCH_AFTER_S = 2.0
_SOCKET = "agent.sock"


@dataclass(slots=True)
class _Slot:
    folder: str
    gpu: str | None
    server: IpcServer[WorkerReport] | None = None
    attempt: NodeAttempt | None = None
    memory: HeldMemory = field(default_factory=HeldMemory)  # what its member keeps there


class _MemberOrders:
    """Stands between a member's attempt and the spawner that all share: adds its number and its arguments."""

    def __init__(self, keeper: SpawnerKeeper, number: int, args: tuple[str, ...]) -> None:
        self._keeper, self._number, self._args = keeper, number, args

    def order(self, message: orders.SpawnerOrder, fds: Sequence[int] = ()) -> None:
        """Pass on the start of a worker."""
        if isinstance(message, orders.StartWorker):
            message = replace(message, rank=self._number, args=self._args)
        self._keeper.order(message, *fds)


class ForkSlots:
    """Starts members as forks of one spawner.

    Args:
        plan: The sweep.
        gpus: The GPU of each slot; None where the machine has none.
        log: Of what the spawner says.
        disk: Writes the members' logs.
        take_end: Called with a member and how its process ended.
        say: Tells the user a sentence.
    """

    def __init__(
        self,
        plan: SweepPlan,
        gpus: Sequence[str | None],
        log: str,
        disk: DiskWriter,
        take_end: TakeEnd,
        say: Callable[[str], None],
    ) -> None:
        self.voice: Voice = LogVoice(log, disk)
        self.refusal: Report | None = None
        self.is_busy = False  # nobody else's runs are among the forks
        self._plan, self._disk, self._take_end, self._say = plan, disk, take_end, say
        self._folder = make_socket_folder()
        self._slots = [
            _Slot(os.path.join(self._folder, f"slot-{number}"), gpu)
            for number, gpu in enumerate(gpus)
        ]
        self._attempts: dict[int, NodeAttempt] = {}
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._hung: dict[int, WorkerEnd] = {}
        self._is_settled = asyncio.Event()
        self._is_ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        environment = {**os.environ, **dict(plan.run.node_setup.environment)}
        share = max(1, len(os.sched_getaffinity(0)) // len(self._slots))
        environment.setdefault(THREADS, str(share))
        path = os.path.join(self._folder, _SOCKET)
        self._keeper = SpawnerKeeper(plan.run.program, environment, path, OwnClock(), self)

    # Its life.

    def home_of(self, run_dir: RunDir) -> frozenset[int] | None:
        """Return None: all slots see the same files."""
        del run_dir
        return None

    def host(self, slot_number: int) -> str:
        """Return the name of this machine."""
        del slot_number
        return os.uname().nodename

    async def open(self) -> None:
        """Start the spawner and wait until it can start members, or never will: then `refusal` says why.

        Raises:
            MusterError: The interpreter can't be executed.
        """
        sweep_beside(self._plan.run_id)  # what an owner has left that was killed
        self._keeper.start_with(self._keeper.program, self._keeper.environment)
        for slot in self._slots:
            os.mkdir(slot.folder, 0o700)
            slot.server = IpcServer(
                os.path.join(slot.folder, _SOCKET),
                partial(self._pids_of, slot),
                WorkerReport,
                partial(self._take_report, slot),
                unknown_s=_UNKNOWN_S,
            )
            await slot.server.open()
        self.spawn(self._keep_lease())
        await self._is_settled.wait()

    async def close(self) -> None:
        """End the spawner, and whatever is left below it."""
        self._is_ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._keeper.end()
        while proc.end_children():
            await asyncio.sleep(_LOOK_EVERY_S)
        for attempt in self._attempts.values():
            await attempt.finish()
        for slot in self._slots:
            slot.memory.close()
            if slot.server is not None:
                slot.server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(PING_EVERY_S / 2)
            self._keeper.look()

    # Members.

    def start(self, number: int, run_dir: RunDir, attempt: int, slot_number: int) -> None:
        """Start a member in a slot."""
        slot, plan = self._slots[slot_number], self._plan.member_plan(number)
        extra = {
            **dict(plan.node_setup.environment),
            contract.SOCKET_VARIABLE: os.path.join(slot.folder, _SOCKET),
            contract.RUN_DIR_VARIABLE: run_dir.path,
        }
        if slot.gpu is not None:
            extra["CUDA_VISIBLE_DEVICES"] = slot.gpu
        settings = WorkerSettings(
            run_id=plan.run_id,
            run_dir=run_dir,
            role=plan.role,
            extra_env=extra,
            base_env=self._keeper.environment,
            shown=lambda rank, local_rank: frozenset(),
            has_store=False,
        )
        order = messages.StartAttempt(
            attempt=attempt,
            ranks=assign_ranks({0: 1})[0],
            world_size=1,
            num_nodes=1,
            master_addr="127.0.0.1",
            master_port=0,  # the only rank listens itself, where the kernel likes
            restarts_spent=0,
            max_restarts=0,
            node=plan.node_name(0),
        )
        self._clean(slot)
        link = _MemberOrders(self._keeper, number, plan.program.args)
        slot.attempt = self._attempts[number] = NodeAttempt(
            order, settings, link, partial(self._end, number)
        )
        slot.attempt.start(self._disk, None)
        watch = asyncio.ensure_future(self._watch(number, slot.attempt, run_dir, slot.folder))
        self._keep(watch)
        self._watches[number] = watch

    async def _watch(self, number: int, attempt: NodeAttempt, run_dir: RunDir, folder: str) -> None:
        """End a member that stands; most have ended before anybody looks."""
        await asyncio.sleep(_WATCH_AFTER_S)
        from torchmuster.owner.sweep.watch import MemberWatch

        def say(text: str) -> None:
            self._say(f"member {number}: {text}; muster stacks {os.path.basename(run_dir.path)}")

        plan = self._plan.run
        watch = MemberWatch(
            attempt, run_dir, folder, plan.node_name(0), plan.limits, self._disk, say
        )
        self._hung[number] = await watch.until_it_hangs()
        for pid in attempt.running_pids:
            proc.kill_quietly(pid)

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to a member's process, if it runs."""
        attempt = self._attempts.get(number)
        if attempt is not None:
            attempt.asked = True
            for pid in attempt.running_pids:
                proc.kill_quietly(pid, signum)

    def _clean(self, slot: _Slot) -> None:
        """Remove what the last member in this slot has left for its agent: heartbeats, errors, stacks, memory."""
        slot.memory.close()
        for name in os.listdir(slot.folder):
            if name != _SOCKET:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(slot.folder, name))

    def _end(self, number: int, end: WorkerEnd) -> None:
        attempt, end = self._attempts.pop(number), self._hung.pop(number, end)
        self._watches.pop(number).cancel()
        self.spawn(attempt.finish())
        for pid in attempt.pids:
            self.spawn(self._end_leftovers(pid))
        is_lost = end.kind is EndKind.NODE_LOST
        self._take_end(number, MemberEnd(state=state_of_end(end), worker=end, is_lost=is_lost))

    async def _end_leftovers(self, leader: int) -> None:
        """Kill what a member has left in its session, in a job of PBS its group: it became the spawner's."""
        async with asyncio.timeout(_LEFTOVERS_S):
            while self._keeper.pid is not None:
                found = [proc.read_process(pid) for pid in proc.children_of(self._keeper.pid)]
                left = [f for f in found if f is not None and leader in (f.session, f.group)]
                for facts in left:
                    proc.kill_quietly(facts.pid)
                if not left:
                    return
                await asyncio.sleep(_LOOK_EVERY_S)

    def _pids_of(self, slot: _Slot) -> set[int]:
        return slot.attempt.running_pids if slot.attempt is not None else set()

    async def _take_report(self, slot: _Slot, call: IpcCall[WorkerReport]) -> None:
        if isinstance(call.request, AskMemory):
            await call.reply(slot.memory.answer(call.request))
            return
        if slot.attempt is not None:
            slot.attempt.note_report(call.root, call.request)
        await call.reply(CallTaken())

    # What the keeper of the spawner needs.

    @property
    def is_ending(self) -> bool:
        """Say whether the sweep ends."""
        return self._is_ending

    @property
    def setup_pids(self) -> frozenset[int]:
        """Return nothing: there is no set-up."""
        return frozenset()

    def tell(self, text: str) -> None:
        """Say a sentence to the user."""
        self._say(text)

    def send(self, message: messages.Message) -> None:
        """Take what an agent would tell its head of the spawner."""
        match message:
            case messages.SpawnerReady():
                if message.why:
                    self._say(message.why)
                self._is_settled.set()
            case messages.SpawnerRefused():
                self.refusal = explain_refused_start(
                    self._plan.run.node_name(0),
                    message.what,
                    message.where,
                    message.why,
                    message.hint,
                )
                self._is_settled.set()
            case messages.Notice(text=text):
                self._say(text)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside all else, until the sweep ends."""
        self._keep(asyncio.ensure_future(work))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), MusterError):
            self._say(error.what)

    def take_event(self, event: orders.SpawnerEvent) -> None:
        """Take that a member has a process, or has ended."""
        match event:
            case orders.ChildStarted(kind="worker") if event.rank in self._attempts:
                self._attempts[event.rank].note_started(0, event.pid)
            case orders.ChildEnded(kind="worker") if event.rank in self._attempts:
                self._attempts[event.rank].note_exit(0, event.status)

    async def take_spawner_loss(self, why: str, *, was_killed: bool) -> None:
        """Take that all members have died with their spawner."""
        for attempt in list(self._attempts.values()):
            evidence = await attempt.memory_evidence() if was_killed else None
            attempt.note_lost(why, evidence)
