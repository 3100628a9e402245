"""The owner of a sweep on this machine: fills slots, follows the metric, stops the worst, records.

`muster sweep` is this process; with `--detach` it is a background process. When it dies, the
members die with it; `muster restart` continues with those that have not succeeded.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec, contract
from torchmuster.core.model.contract import EX_TEMPFAIL
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.lease import PING_EVERY_S, OwnClock
from torchmuster.core.model.owner_policy import AfterLoss, OwnerPolicy, RestartBudget
from torchmuster.core.model.ranks import assign_ranks
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import report_of_error
from torchmuster.core.model.verdict import Report, Result, explain_refused_start
from torchmuster.core.net import messages
from torchmuster.core.net.ipc import AskMemory, CallTaken, IpcCall, IpcServer, WorkerReport
from torchmuster.core.node.kernel import visible_gpus
from torchmuster.core.node.options import THREADS
from torchmuster.core.node.output import LogVoice, Voice
from torchmuster.core.node.setup import make_socket_folder, start_removing_leftovers
from torchmuster.core.node.spawner import messages as orders
from torchmuster.core.node.spawner.keeper import SpawnerKeeper
from torchmuster.core.node.workers import HeldMemory, NodeAttempt, WorkerSettings
from torchmuster.core.owner.parts import RecordWriter, Stops
from torchmuster.core.owner.record import read_result
from torchmuster.core.owner.session import EarlyStop
from torchmuster.errors import MusterError, RunDirectoryError
from torchmuster.multirun.sweep import events, members, runs
from torchmuster.multirun.sweep.metric import MetricReader, StopRule, load_rule
from torchmuster.multirun.sweep.plan import SweepPlan, read_sweep
from torchmuster.multirun.sweep.policy import SweepPolicy
from torchmuster.multirun.views.sweep_view import view_sweep

# The slots for members that are single processes: one spawner with torch imported forks them all.
#
# A member has no agent and no head, so it costs one fork, not three starts of Python. Its evidence
# is collected as an agent does it (`core/node/workers.py`); its record is that of a run.


_UNKNOWN_S = 1.0  # a member may call before the spawner has reported that it has started
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
    memory: HeldMemory = field(default_factory=HeldMemory)  # shared memory that its member keeps


class _MemberSpawnerLink:
    """Passes orders of a member's attempt to the shared spawner; adds its number and arguments."""

    def __init__(self, keeper: SpawnerKeeper, number: int, args: tuple[str, ...]) -> None:
        self._keeper, self._number, self._args = keeper, number, args

    def order(self, message: orders.SpawnerOrder, fds: Sequence[int] = ()) -> None:
        """Pass on an order; to the start of a worker, add the member's number and arguments."""
        if isinstance(message, orders.StartWorker):
            message = replace(message, rank=self._number, args=self._args)
        self._keeper.order(message, *fds)


class ForkSlots(runs.Slots):
    """Starts members as forks of one spawner.

    Args:
        plan: The plan of the sweep.
        gpus: The GPU of each slot; None if the machine has none.
        log: The path for the spawner's output.
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
        take_end: runs.TakeEnd,
        say: Callable[[str], None],
    ) -> None:
        self.voice: Voice = LogVoice(log, disk)
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

    # Start and end.

    async def open(self) -> None:
        """Start the spawner; wait until it can start members, or has failed: then set `refusal`.

        Raises:
            MusterError: The interpreter can't be executed.
        """
        start_removing_leftovers(self._plan.run_id)  # leftovers of a killed owner
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
        """End the spawner and all its descendants."""
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
            master_port=0,  # the only rank listens itself, on a port that the kernel chooses
            restarts_spent=0,
            max_restarts=0,
            node=plan.node_name(0),
        )
        self._clean(slot)
        link = _MemberSpawnerLink(self._keeper, number, plan.program.args)
        slot.attempt = self._attempts[number] = NodeAttempt(
            order, settings, link, partial(self._end, number)
        )
        slot.attempt.start(self._disk, None)
        watch = asyncio.ensure_future(self._watch(number, slot.attempt, run_dir, slot.folder))
        self._keep(watch)
        self._watches[number] = watch

    async def _watch(self, number: int, attempt: NodeAttempt, run_dir: RunDir, folder: str) -> None:
        """Kill a member that hangs; most members end before the first check."""
        await asyncio.sleep(_WATCH_AFTER_S)
        from torchmuster.multirun.sweep.watch import MemberWatch

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
        """Send a signal to a member's processes, if it runs."""
        attempt = self._attempts.get(number)
        if attempt is not None:
            attempt.asked = True
            for pid in attempt.running_pids:
                proc.kill_quietly(pid, signum)

    def _clean(self, slot: _Slot) -> None:
        """Remove the last member's heartbeats, errors, stacks and memory from this slot."""
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
        self._take_end(
            number, runs.MemberEnd(state=members.state_of_end(end), worker=end, is_lost=is_lost)
        )

    async def _end_leftovers(self, leader: int) -> None:
        """Kill what a member has left in its session or group (PBS), now the spawner's children."""
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

    # The interface for `SpawnerKeeper`.

    @property
    def is_ending(self) -> bool:
        """Return whether the sweep is ending."""
        return self._is_ending

    @property
    def setup_pids(self) -> frozenset[int]:
        """Return no processes: there are no setup lines."""
        return frozenset()

    def tell(self, text: str) -> None:
        """Tell the user a sentence."""
        self._say(text)

    def send(self, message: messages.Message) -> None:
        """Handle the messages about the spawner that an agent would send to its head."""
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
        """Run a coroutine in the background, until the sweep ends."""
        self._keep(asyncio.ensure_future(work))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), MusterError):
            self._say(error.what)

    def take_event(self, event: orders.SpawnerEvent) -> None:
        """Handle the start or the exit of a member's process."""
        match event:
            case orders.ChildStarted(kind="worker") if event.rank in self._attempts:
                self._attempts[event.rank].note_started(0, event.pid)
            case orders.ChildEnded(kind="worker") if event.rank in self._attempts:
                self._attempts[event.rank].note_exit(0, event.status)

    async def take_spawner_loss(self, why: str, *, was_killed: bool) -> None:
        """Handle the loss of the spawner: all members have died with it."""
        for attempt in list(self._attempts.values()):
            evidence = await attempt.memory_evidence() if was_killed else None
            attempt.note_lost(why, evidence)


_TICK_S = 0.5
_MEASURE_EVERY_S = 0.5
_MAX_FAILURE_LINES = 20  # failures that get a line each
_MAX_EVIDENCE = 5
_FLUSH_S = 5.0
_MAX_LOSSES = 1
SETTLED_STATES = (RunState.SUCCEEDED, RunState.STOPPED)


def follow_sweep(run_dir: RunDir, say: Callable[[str], None]) -> Result:
    """Own a prepared sweep, or continue one whose owner has gone, until it ends.

    Args:
        run_dir: The run directory of the sweep.
        say: Shows the user a sentence.

    Raises:
        MusterError: The plan can't be read, or the rule can't be loaded.
    """
    early = EarlyStop()
    plan = read_sweep(run_dir)
    if plan is None:
        raise RunDirectoryError("the plan of the sweep can't be read", where=run_dir.sweep)
    rule = load_rule(plan.stop, plan.metric) if plan.stop and plan.metric else None
    return asyncio.run(SweepOwner(plan, run_dir, say, rule, early).run())


def own_sweep(run_dir: RunDir) -> int:
    """Own a sweep that has a run directory until it ends; return its exit code."""
    from torchmuster.core.files.terminal import TerminalVoice

    voice = TerminalVoice()
    voice.start()
    result = follow_sweep(run_dir, voice.say)
    voice.flush(5.0)
    return result.exit_code


@dataclass(slots=True)
class _Member:
    run_dir: RunDir
    attempt: int
    started_at: float = 0.0
    reader: MetricReader | None = None


@dataclass(slots=True)
class SweepOwner:
    """Owns one sweep.

    Attributes:
        say: Shows the user a sentence.
        rule: Decides which members to stop early.
        early: Has listened for stop signals before this object does.
    """

    plan: SweepPlan
    run_dir: RunDir
    say: Callable[[str], None]
    rule: StopRule | None = None
    early: EarlyStop | None = None
    _policy: SweepPolicy = field(init=False)
    _record: RecordWriter = field(init=False)
    _disk: DiskWriter = field(init=False)
    _slots: runs.Slots = field(init=False)
    _records: members.MemberRecords = field(init=False)
    _stops: Stops = field(default_factory=Stops)
    _prepared: dict[int, tuple[RunDir, int]] = field(default_factory=dict)
    _members: dict[int, _Member] = field(default_factory=dict)
    _owned: dict[int, OwnerPolicy] = field(default_factory=dict)
    _failures: list[tuple[int, str]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _refusal: Report | None = None
    _num_started: int = 0
    _started_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._policy = SweepPolicy(self.plan.slots, self.plan.metric)
        self._record = RecordWriter(self.run_dir, self.say)
        self._disk = DiskWriter(root=self.run_dir.path)
        self._records = members.MemberRecords(self.plan, self._disk)

    async def run(self) -> Result:
        """Run the sweep until it ends; return its result."""
        self._disk.start()
        async with self._record:
            try:
                return await self._conduct()
            finally:
                await asyncio.to_thread(self._disk.flush, _FLUSH_S)

    def _make_slots(self) -> runs.Slots:
        if self.plan.places:
            return runs.HostSlots(self.plan, self.run_dir, self.take_end, self.say)
        if self.plan.run.session is not None:
            return runs.SessionSlots(self.plan.run.session, self.take_end, self.say)
        gpus = visible_gpus() if self.plan.run.engine == "local" else []
        num_workers = self.plan.run.num_workers(0)
        of_slot = runs.gpus_of_slots(gpus, self.plan.slots, num_workers)
        most = -(-self.plan.slots * num_workers // len(gpus)) if gpus else 0
        if most > self.plan.per_gpu:
            self.say(
                f"{self.plan.slots} slots are more than --per-gpu {self.plan.per_gpu} makes: up to {most} workers share a GPU"
            )
        if not self.plan.is_forked:
            return runs.RunSlots(of_slot, self.take_end)
        ids = [found[0] if found else None for found in of_slot]
        log = self.run_dir.agent_log("slots")
        return ForkSlots(self.plan, ids, log, self._disk, self.take_end, self.say)

    async def _conduct(self) -> Result:
        self._stops.listen(self._take_stop, self.early)
        settled = await asyncio.to_thread(self._settle_earlier)
        self._slots = self._make_slots()
        self._policy.begin(range(len(self.plan.members)), settled)
        num = self._policy.num_waiting
        self._record.event(events.SweepStartedEvent(members=num, slots=self.plan.slots))
        measuring = asyncio.create_task(self._measure_always())
        try:
            await self._open_slots()
            await self._fill()
        except MusterError as error:
            self._refusal = report_of_error(error)
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)
            await self._slots.close()
            await asyncio.gather(*self._tasks)
        return self._conclude()

    async def _open_slots(self) -> None:
        """Open the slots; give up if the sweep is stopped meanwhile."""
        opening = asyncio.create_task(self._slots.open())
        while not opening.done() and not self._stops.count:
            self._changed.clear()
            changing = asyncio.create_task(self._changed.wait())
            await asyncio.wait({opening, changing}, return_when=asyncio.FIRST_COMPLETED)
            changing.cancel()
        if not opening.done():
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            return
        await opening

    def _settle_earlier(self) -> dict[int, RunState]:
        """Return the members that need not run again; give their values to the policy and rule."""
        view = view_sweep(self.run_dir, is_alive=False)
        settled: dict[int, RunState] = {}
        for member in view.members if view is not None else ():
            if member.state not in SETTLED_STATES:
                continue
            settled[member.number] = member.state
            if member.value is not None:
                self._policy.values[member.number] = member.value
            if self.rule is not None and self.plan.metric is not None:
                run_dir = members.member_dir(self.run_dir, self.plan, member.number)
                for point in MetricReader(run_dir, self.plan.metric.name).read():
                    self.rule.report(member.number, point.step, point.value)
                self.rule.ended(member.number, member.state is RunState.SUCCEEDED)
        return settled

    # Members.

    async def _fill(self) -> None:
        while not self._policy.is_over:
            if self._policy.is_stuck:
                self._policy.give_up()
            if (refusal := self._slots.refusal) is not None:
                self._refusal = refusal
                for number in self._policy.cancel():
                    self._slots.signal(number, signal.SIGKILL)
            await self._prepare_ahead()
            self._changed.clear()
            if self._policy.is_over or (self._policy.has_room and not self._slots.is_busy):
                continue
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _prepare_ahead(self) -> None:
        """Create the folders of the members that start next, while others run."""
        for number in self._policy.next_waiting(2 * self.plan.slots):
            await self._prepare(number)
        while (first := self._policy.next_start()) is not None and first not in self._prepared:
            await self._prepare(first)  # the members before it wait for their hosts

    async def _prepare(self, number: int) -> None:
        if number not in self._prepared:
            prepared = await asyncio.to_thread(
                members.prepare_member, self.run_dir, self.plan, number
            )
            self._prepared[number] = prepared
            if (home := await asyncio.to_thread(self._slots.home_of, prepared[0])) is not None:
                self._policy.homes[number] = home
        self._start_prepared()

    def _start_prepared(self) -> None:
        """Start members that have their folders while slots are free, so that no slot is idle."""
        while self._policy.next_start() in self._prepared and not self._slots.is_busy:
            self._start(*self._policy.start())

    def _start(self, number: int, slot: int) -> None:
        run_dir, attempt = self._prepared.pop(number)
        metric = self.plan.metric
        reader = MetricReader(run_dir, metric.name) if metric is not None else None
        self._members[number] = _Member(run_dir, attempt, time.monotonic(), reader)
        self._num_started += 1
        self._record.event(events.MemberStartedEvent(member=number, slot=slot, attempt=attempt))
        if self.plan.is_forked:
            self._records.begin(number, run_dir, attempt)
        self._slots.start(number, run_dir, attempt, slot)

    def take_end(self, number: int, end: runs.MemberEnd) -> None:
        """Handle the end of a member; its slot gets the next one in the same turn of the loop."""
        member = self._members.pop(number)
        fresh = OwnerPolicy(f"member {number}", RestartBudget(_MAX_LOSSES), self._stops.requests)
        follows = self._owned.setdefault(number, fresh).after_loss(
            has_result=end.has_begun and not end.is_lost, is_free=not end.has_begun
        )
        if follows is AfterLoss.AGAIN:
            self._policy.again(number, retire=end.has_lost_slot)
            self._record.event(events.MemberLostEvent(member=number, attempt=member.attempt))
        else:
            state = self._policy.ended(number, end.state, retire=end.has_lost_slot)
            task = asyncio.create_task(self._settle(number, member, end, state))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._slots.refusal is None:
            self._start_prepared()
        self._changed.set()

    async def _settle(
        self, number: int, member: _Member, end: runs.MemberEnd, state: RunState
    ) -> None:
        """Record how a member has ended, with its last value, while the next one runs."""
        log = member.run_dir.rank_log(member.attempt, 0)
        result = await asyncio.to_thread(read_result, member.run_dir) if not end.worker else None
        if end.worker is not None:
            result = members.result_of_end(self.plan, number, end.worker, state, log)
            self._records.end(member.run_dir, end.worker, result)
        elif result is not None and state is RunState.STOPPED:  # its head only knows of a signal
            result = replace(result, state=state, report=members.stopped_by_rule(self.plan))
            plain = codec.to_plain(result)
            await asyncio.to_thread(atomic.write_json, member.run_dir.result, plain)
        if member.reader is not None:
            await asyncio.to_thread(self._disk.flush, _FLUSH_S)
            await self._measure(number, member, is_last=True)
        if self.rule is not None:
            self.rule.ended(number, state is RunState.SUCCEEDED)
        newest = member.reader.newest if member.reader is not None else None
        why = members.why_of(result) if result is not None else "it left no result"
        elapsed_s = round(time.monotonic() - member.started_at, 3)
        self._record.event(
            events.MemberEndedEvent(
                member=number,
                attempt=member.attempt,
                state=state.value,
                exit_code=result.exit_code if result is not None else None,
                elapsed_s=end.worker.elapsed_s if end.worker is not None else elapsed_s,
                why=why,
                value=newest.value if newest is not None else None,
                step=newest.step if newest is not None else None,
            )
        )
        if state in (RunState.FAILED, RunState.LOST):
            self._report_failure(number, why)

    def _report_failure(self, number: int, why: str | None) -> None:
        self._failures.append((number, why or "no reason is known"))
        if len(self._failures) <= _MAX_FAILURE_LINES:
            self.say(f"member {number} ({self.plan.words_of(number)}) failed: {why}")
        elif len(self._failures) == _MAX_FAILURE_LINES + 1:
            self.say("more members fail; `muster status` shows them all")

    # The metric.

    async def _measure_always(self) -> None:
        while self.plan.metric is not None:
            await asyncio.sleep(_MEASURE_EVERY_S)
            for number, member in list(self._members.items()):
                await self._measure(number, member)

    async def _measure(self, number: int, member: _Member, *, is_last: bool = False) -> None:
        if member.reader is None:
            return
        points = await asyncio.to_thread(member.reader.read)
        points += member.reader.last_line() if is_last else []
        for point in points:
            if self.rule is not None and self.rule.report(number, point.step, point.value):
                self._end_early(number, point.step)
        if not points:
            return
        before = self._policy.best
        self._policy.values[number] = points[-1].value
        if not is_last:
            newest = points[-1]
            self._record.event(
                events.MemberMeasuredEvent(member=number, value=newest.value, step=newest.step)
            )
        if self._policy.best == number and before != number and is_last and self.plan.metric:
            text = f"{self.plan.metric.name} {points[-1].value:.6g}"
            self.say(f"best so far: {text}, member {number} ({self.plan.words_of(number)})")

    def _end_early(self, number: int, step: int) -> None:
        if self._policy.stop(number):
            self._record.event(
                events.MemberStoppedEvent(member=number, step=step, rule=self.plan.stop)
            )
            self._ask_to_end(number)

    def _ask_to_end(self, number: int) -> None:
        self._slots.signal(number, signal.SIGTERM)
        member = self._members.get(number)
        loop = asyncio.get_running_loop()
        loop.call_later(self.plan.run.limits.grace_s, self._kill_if_here, number, member)

    def _kill_if_here(self, number: int, member: _Member | None) -> None:
        if member is not None and self._members.get(number) is member:
            self._slots.signal(number, signal.SIGKILL)

    # The end.

    def _take_stop(self) -> None:
        running = self._policy.cancel()
        if self._stops.count == 1:
            grace = f"{self.plan.run.limits.grace_s:g} s"
            if running:
                self.say(f"stopping {len(running)} members, SIGKILL in {grace}")
            for number in running:
                self._ask_to_end(number)
        else:
            for number in running:
                self._slots.signal(number, signal.SIGKILL)
        self._changed.set()

    def _conclude(self) -> Result:
        state = RunState.FAILED if self._refusal is not None else self._policy.state
        code, report = 0, self._refusal
        match state:
            case RunState.FAILED:
                code = 1
                report = report or self._report_failures()
            case RunState.PREEMPTED:
                code = EX_TEMPFAIL
                report = self._report_rest() if self._policy.has_given_up else None
            case RunState.CANCELLED:
                code = 128 + (self._stops.signum or signal.SIGTERM)
        result = Result(
            run_id=self.plan.run_id,
            state=state,
            exit_code=code,
            attempts=min(self._num_started, 1),
            restarts_spent=0,
            elapsed_s=round(time.monotonic() - self._started_at, 3),
            report=report,
        )
        self._record.event(events.SweepEndedEvent(result=result))
        self._record.replace(self.run_dir.result, codec.to_plain(result))
        return result

    def _report_rest(self) -> Report:
        hint = f"muster restart {short_id(self.plan.run_id)} goes on with the members that are left"
        at_home = self._policy.num_at_home
        why = f"what {at_home} of the members have saved is on a host that has no slot now"
        because = (why,) * (at_home > 0)
        error = "no slot of the sweep is left"
        return Report(error=error, at=self.run_dir.path, because=because, hint=hint)

    def _report_failures(self) -> Report:
        because = [
            f"{short_id(self.plan.member_id(number))} ({self.plan.words_of(number)}): {why}"
            for number, why in self._failures[:_MAX_EVIDENCE]
        ]
        if len(self._failures) > _MAX_EVIDENCE:
            because.append(f"and {len(self._failures) - _MAX_EVIDENCE} more")
        total = len(self.plan.members)
        return Report(
            error=f"{len(self._failures)} of {total} members of the sweep failed",
            at=self.run_dir.path,
            because=tuple(because),
            hint=f"once that is mended, muster restart {short_id(self.plan.run_id)} runs those again",
        )
