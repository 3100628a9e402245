"""The owner of a sweep on this machine: fills the slots, follows the metric, ends the worst, writes the record.

`muster sweep` is this process; with `--detach` one in the background takes its place. When it dies, the members die with it;
`muster restart` goes on with those that have not succeeded.
"""

import asyncio
import signal
import time
from dataclasses import dataclass, field, replace
from typing import Protocol

from torchmuster.diagnose.facts.gpus import visible_gpus
from torchmuster.errors import MusterError, RunDirectoryError
from torchmuster.files import atomic
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir, short_id
from torchmuster.model import codec
from torchmuster.model.contract import EX_TEMPFAIL
from torchmuster.model.display.text import report_of_error
from torchmuster.model.liveness.lives import Lives, WhatFollows
from torchmuster.model.record import events
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Report, Result
from torchmuster.owner.record_writer import RecordWriter
from torchmuster.owner.stops import EarlyStop, Stops
from torchmuster.owner.sweep.forks import ForkSlots
from torchmuster.owner.sweep.members import (
    MemberRecords,
    member_dir,
    prepare_member,
    result_of_end,
    stopped_by_rule,
    why_of,
)
from torchmuster.owner.sweep.metric import MetricReader
from torchmuster.owner.sweep.policy import MemberStart, SweepPolicy
from torchmuster.owner.sweep.runs import RunSlots, SessionSlots
from torchmuster.owner.sweep.slots import MemberEnd, Slots, gpus_of_slots
from torchmuster.owner.sweep.stop_rules import StopRule, load_rule
from torchmuster.owner.views.record import read_result
from torchmuster.owner.views.sweep_view import read_sweep, view_sweep
from torchmuster.spec.sweep_plan import SweepPlan

_TICK_S = 0.5
_MEASURE_EVERY_S = 0.5
_MAX_TOLD = 20  # failures that are worth a line each
_MAX_EVIDENCE = 5
_FLUSH_S = 5.0
_MAX_LOSSES = 1
NOT_AGAIN = (RunState.SUCCEEDED, RunState.STOPPED)


class SweepDisplay(Protocol):
    """What the owner shows."""

    def say(self, sentence: str) -> None:
        """Show a sentence of muster's own."""


def follow_sweep(run_dir: RunDir, display: SweepDisplay) -> Result:
    """Own a prepared sweep to its end, or go on with one whose owner has gone.

    Raises:
        MusterError: Its plan can't be read, its rule is not there, or its interpreter can't be started.
    """
    early = EarlyStop()
    plan = read_sweep(run_dir)
    if plan is None:
        raise RunDirectoryError("the plan of the sweep can't be read", where=run_dir.sweep)
    rule = load_rule(plan.stop, plan.metric) if plan.stop and plan.metric else None
    return asyncio.run(SweepOwner(plan, run_dir, display, rule, early).run())


@dataclass(slots=True)
class _Member:
    run_dir: RunDir
    attempt: int
    started_at: float = 0.0
    reader: MetricReader | None = None
    told: float | None = None


@dataclass(slots=True)
class SweepOwner:
    """Owns one sweep.

    Attributes:
        rule: What ends members early.
        early: Has listened for signals that ask to stop before this does.
    """

    plan: SweepPlan
    run_dir: RunDir
    display: SweepDisplay
    rule: StopRule | None = None
    early: EarlyStop | None = None
    _policy: SweepPolicy = field(init=False)
    _record: RecordWriter = field(init=False)
    _disk: DiskWriter = field(init=False)
    _slots: Slots = field(init=False)
    _records: MemberRecords = field(init=False)
    _stops: Stops = field(default_factory=Stops)
    _prepared: dict[int, tuple[RunDir, int]] = field(default_factory=dict)
    _members: dict[int, _Member] = field(default_factory=dict)
    _lives: dict[int, Lives] = field(default_factory=dict)
    _failures: list[tuple[int, str]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _refusal: Report | None = None
    _num_started: int = 0
    _started_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._policy = SweepPolicy(self.plan.slots, self.plan.metric)
        self._record = RecordWriter(self.run_dir, self.display.say)
        self._disk = DiskWriter(root=self.run_dir.path)
        self._records = MemberRecords(self.plan, self._disk)

    async def run(self) -> Result:
        """Conduct the sweep to its end and return its result."""
        self._disk.start()
        async with self._record:
            try:
                return await self._conduct()
            finally:
                await asyncio.to_thread(self._disk.flush, _FLUSH_S)

    def _make_slots(self) -> Slots:
        if self.plan.places:
            from torchmuster.owner.sweep.hosts import HostSlots

            return HostSlots(self.plan, self.run_dir, self.take_end, self.display.say)
        if self.plan.run.session is not None:
            return SessionSlots(self.plan.run.session, self.take_end, self.display.say)
        gpus = visible_gpus() if self.plan.run.engine == "local" else []
        num_workers = self.plan.run.num_workers(0)
        of_slot = gpus_of_slots(gpus, self.plan.slots, num_workers)
        most = -(-self.plan.slots * num_workers // len(gpus)) if gpus else 0
        if most > self.plan.per_gpu:
            self.display.say(
                f"{self.plan.slots} slots are more than --per-gpu {self.plan.per_gpu} makes: up to {most} workers share a GPU"
            )
        if not self.plan.is_forked:
            return RunSlots(of_slot, self.take_end)
        ids = [found[0] if found else None for found in of_slot]
        log = self.run_dir.agent_log("slots")
        return ForkSlots(self.plan, ids, log, self._disk, self.take_end, self.display.say)

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
        """Open the slots, unless somebody ends the sweep meanwhile."""
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
        """Return the members that need not run again, and let policy and rule know what they have reached."""
        view = view_sweep(self.run_dir, is_alive=False)
        settled: dict[int, RunState] = {}
        for member in view.members if view is not None else ():
            if member.state not in NOT_AGAIN:
                continue
            settled[member.number] = member.state
            if member.value is not None:
                self._policy.measured(member.number, member.value)
            if self.rule is not None and self.plan.metric is not None:
                run_dir = member_dir(self.run_dir, self.plan, member.number)
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
        """Make the folders of the members that start next, while others run."""
        for number in self._policy.next_waiting(2 * self.plan.slots):
            await self._prepare(number)
        while (first := self._policy.next_start()) is not None and first not in self._prepared:
            await self._prepare(first)  # those before it wait for their hosts

    async def _prepare(self, number: int) -> None:
        if number not in self._prepared:
            prepared = await asyncio.to_thread(prepare_member, self.run_dir, self.plan, number)
            self._prepared[number] = prepared
            if (home := await asyncio.to_thread(self._slots.home_of, prepared[0])) is not None:
                self._policy.homes[number] = home
        self._start_prepared()

    def _start_prepared(self) -> None:
        """Start what has its folder, as long as a slot is free: at once, since a sweep must have no idle slot."""
        while self._policy.next_start() in self._prepared and not self._slots.is_busy:
            self._start(self._policy.start())

    def _start(self, start: MemberStart) -> None:
        number = start.member
        run_dir, attempt = self._prepared.pop(number)
        metric = self.plan.metric
        reader = MetricReader(run_dir, metric.name) if metric is not None else None
        self._members[number] = _Member(run_dir, attempt, time.monotonic(), reader)
        self._num_started += 1
        self._record.event(
            events.MemberStartedEvent(member=number, slot=start.slot, attempt=attempt)
        )
        if self.plan.is_forked:
            self._records.begin(number, run_dir, attempt, self._slots.host(start.slot))
        self._slots.start(number, run_dir, attempt, start.slot)

    def take_end(self, number: int, end: MemberEnd) -> None:
        """Take that a member has ended; its slot gets the next one in the same turn of the loop."""
        member = self._members.pop(number)
        follows = self._lives.setdefault(number, Lives(_MAX_LOSSES)).after_loss(
            has_result=end.has_begun and not end.is_lost,
            is_stopped=self._stops.count > 0,
            is_free=not end.has_begun,
        )
        if follows is WhatFollows.AGAIN:
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

    async def _settle(self, number: int, member: _Member, end: MemberEnd, state: RunState) -> None:
        """Write how a member has ended, with its last value, while the next one runs."""
        log = member.run_dir.rank_log(member.attempt, 0)
        result = await asyncio.to_thread(read_result, member.run_dir) if not end.worker else None
        if end.worker is not None:
            result = result_of_end(self.plan, number, end.worker, state, log)
            self._records.end(member.run_dir, end.worker, result)
        elif result is not None and state is RunState.STOPPED:  # its head knows only of a signal
            result = replace(result, state=state, report=stopped_by_rule(self.plan))
            plain = codec.to_plain(result)
            await asyncio.to_thread(atomic.write_json, member.run_dir.result, plain)
        if member.reader is not None:
            await asyncio.to_thread(self._disk.flush, _FLUSH_S)
            await self._measure(number, member, is_last=True)
        if self.rule is not None:
            self.rule.ended(number, state is RunState.SUCCEEDED)
        newest = member.reader.newest if member.reader is not None else None
        why = why_of(result) if result is not None else "it left no result"
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
            self._tell_failure(number, why)

    def _tell_failure(self, number: int, why: str | None) -> None:
        self._failures.append((number, why or "no reason is known"))
        if len(self._failures) <= _MAX_TOLD:
            self.display.say(f"member {number} ({self._words(number)}) failed: {why}")
        elif len(self._failures) == _MAX_TOLD + 1:
            self.display.say("more members fail; `muster status` shows them all")

    def _words(self, number: int) -> str:
        return " ".join(f"{name}={value}" for name, value in self.plan.values_of(number).items())

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
        points += member.reader.last_half() if is_last else []
        for point in points:
            if self.rule is not None and self.rule.report(number, point.step, point.value):
                self._end_early(number, point.step)
        if not points:
            return
        before = self._policy.best
        self._policy.measured(number, points[-1].value)
        if not is_last:
            newest = points[-1]
            self._record.event(
                events.MemberMeasuredEvent(member=number, value=newest.value, step=newest.step)
            )
        if self._policy.best == number and before != number and is_last and self.plan.metric:
            text = f"{self.plan.metric.name} {points[-1].value:.6g}"
            self.display.say(f"best so far: {text}, member {number} ({self._words(number)})")

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
                self.display.say(f"stopping {len(running)} members, SIGKILL in {grace}")
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
            f"{short_id(self.plan.member_id(number))} ({self._words(number)}): {why}"
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
