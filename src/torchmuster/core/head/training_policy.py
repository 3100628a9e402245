"""Decides what a training run does when nodes join or are lost, workers end or a stop comes.

It does no I/O. The head calls a method for each message, and `advance` when something may be due.
Then it takes the resulting actions and carries them out. Ends count in order of arrival
(`docs/design.md`, rule 3).

  GATHERING --all here--> RUNNING --failure, loss, growth, stop--> ENDING --all reaped--> GATHERING
                             |                                        |
                             +--all ended well--> OVER <--no more-----+
"""

import itertools
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchmuster.core.files.disk import log_limit_notice, too_old
from torchmuster.core.head.attempt import (
    Attempt,
    AttemptPhase,
    EndRun,
    TryAgain,
    after_failure,
    after_preemption,
)
from torchmuster.core.head.membership import MAX_LISTED, Member, Membership, StopRequest
from torchmuster.core.head.node_policy import (
    LOOK_EVERY_S,
    AskForNodes,
    NodePolicy,
    OpenStore,
    StartChecks,
)
from torchmuster.core.head.options import TrainingHeadOptions
from torchmuster.core.model import contract, events
from torchmuster.core.model.failure import EndKind, WorkerEnd, describe, first_cause
from torchmuster.core.model.ranks import assign_ranks, compress_ranks
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import (
    Result,
    StopCause,
    better_cause,
    cause_of_stop,
    end_by_stop,
    explain_refused_start,
    not_replaced,
    notes_on_success,
)
from torchmuster.core.net import messages

SAY_EVERY_S = 5.0
_LAST_SAY_EVERY_S = 60.0  # while the wait stays the same
FIRST_SAY_S = 4.0
EARLY_END_SAY_S = 3.0
PROOF_EVERY_S = 0.02
PREEMPTION_GRACE_S = 30.0
HEAD_IS_SILENT = "the head there does not answer any more"

# A debugger takes Ctrl-C for itself: when only such ranks are left they would stay for the whole
# grace.
_DEBUGGED_GRACE_S = 3.0


class Debuggers(set[int]):
    """The ranks of one attempt that are in a debugger or wait for one."""

    _is_failure_seen = False

    def clear(self) -> None:
        """Clear the set for the next attempt."""
        super().clear()
        self._is_failure_seen = False

    def take(self, debugger: messages.Debugger) -> bool:
        """Record a rank's state; return whether the client has to know it, to attach a debugger.

        Of an attempt's failed ranks, only the first counts: the others fail because of it, or wait
        until they are killed.
        """
        if not debugger.active:
            self.discard(debugger.rank)
            return False
        if debugger.waits == contract.PDB:
            if self or self._is_failure_seen:
                return False
            self._is_failure_seen = True
        self.add(debugger.rank)
        return bool(debugger.waits)


@dataclass(slots=True)
class _Known:
    """What agents and clients have reported, other than the ends of workers."""

    last_stop: str = ""  # why the training library stops to be resumed
    trained_step: int | None = None
    saved_step: int | None = None
    is_time_up: bool = False
    held_failure_said: bool = False
    debugging: Debuggers = field(default_factory=Debuggers)


class TrainingPolicy(NodePolicy):
    """The decisions of one training run; `NodePolicy` documents the arguments."""

    def __init__(
        self,
        options: TrainingHeadOptions,
        members: Membership,
        now: float,
        checks: Callable[[NodePolicy], StartChecks],
    ) -> None:
        super().__init__(options, members, now, checks)
        self.lost_s = 0.0  # time between failures and the next attempts' workers
        self._known = _Known()
        self._was_led = False  # by a head that was lost, in this job
        self._say_at = now + FIRST_SAY_S
        self._reported_wait: tuple[object, ...] = ()
        self._tell_wait_at, self._wait_pause_s = 0.0, SAY_EVERY_S
        self._failed_at: float | None = None
        self._ending_grace_s = 0.0  # for the survivors of a failure

    # For the head.

    @property
    def is_held(self) -> bool:
        """Return whether missing progress is no hang now: in a debugger, a stop or a preemption."""
        preempted = self.attempt is not None and self.attempt.preempted_at is not None
        return bool(self._known.debugging) or self._stop is not None or preempted

    def due(self, now: float) -> float:
        """Return when `advance` has to be called even if nothing happens."""
        due = now + LOOK_EVERY_S
        if self.phase is AttemptPhase.GATHERING and self._gathering.due is not None:
            due = min(due, self._gathering.due)
        if self.phase in (AttemptPhase.GATHERING, AttemptPhase.ENDING) and self.members.dangerous():
            due = min(due, now + PROOF_EVERY_S)
        if self._stop is not None and not self._stop.killed:
            due = min(due, self._stop.kill_at)
        checks = self._checks.due
        return due if checks is None else min(due, checks)

    # From agents.

    def said(self, now: float, member: Member, message: messages.Message) -> None:
        """Handle an agent's message."""
        self.now, attempt = now, self.attempt
        match message:
            case messages.SpawnerReady():
                self._take_ready(member, message)
            case messages.SpawnerRefused(why=why) if self._is_spare(member):
                self._release_spare(member, f"can't be used: {why}")
            case messages.SpawnerRefused(what=what, where=where, why=why, hint=hint):
                member.refused_why = why
                report = explain_refused_start(self.members.name(member), what, where, why, hint)
                self.finish(EndRun(RunState.FAILED, 1, report))
            case messages.WorkersStarted(attempt=number) if attempt and number == attempt.number:
                member.worker_pids, member.spawner_pid = message.pids, message.spawner_pid
                self._note_up(attempt, member)
            case messages.WorkerEnded(end=end) if attempt and end.attempt == attempt.number:
                self._take_end(attempt, end)
            case messages.StoreLost(attempt=number, detail=detail):
                if self.running is not None and number == self.running.number:
                    why = f"the store of the attempt ended ({detail})"
                    self.running.take_loss(member, self.members.name(member), why, now)
            case messages.AllReaped(attempt=number, left=left):
                if number == member.running_attempt:
                    member.running_attempt = None
                if left:
                    self.tell(
                        events.LeftRunningEvent(
                            node=self.members.name(member), processes=left[:MAX_LISTED]
                        )
                    )
                if attempt and number == attempt.number and member.place is not None:
                    attempt.reap(member.place)
            case messages.CheckAnswer():
                self._checks.take(member, message)
            case messages.Debugger():
                if self._known.debugging.take(message):
                    name, tool = self.members.name(member), message.waits[:16]
                    folder = message.folder[:4096]
                    self.tell(
                        events.DebuggerWaitsEvent(
                            node=name, rank=message.rank, tool=tool, folder=folder
                        )
                    )
            case messages.LastStop(reason=reason):
                self._known.last_stop = reason
            case messages.TrainingEnded(step=step, saved_step=saved_step):
                self._known.trained_step, self._known.saved_step = step, saved_step
            case messages.SignalReceived(signum=signum):
                self._take_signal(member, signum)

    def _note_up(self, attempt: Attempt, member: Member) -> None:
        if member.place is None or member.place in attempt.places_up:
            return
        attempt.places_up.add(member.place)
        if len(attempt.places_up) < len(attempt.members):
            return
        attempt.workers_up_at = self.now
        lost_s = 0.0
        if self._failed_at is not None:
            lost_s, self._failed_at = self.now - self._failed_at, None
            self._heard_last = math.inf
            self.lost_s += lost_s
        pids = (pid for place in attempt.ranks for pid in attempt.members[place].worker_pids)
        self.tell(
            events.WorkersStartedEvent(
                attempt=attempt.number,
                restart_s=round(lost_s, 3),
                pids=tuple(itertools.islice(pids, 64)),
            )
        )

    def _take_end(self, attempt: Attempt, end: WorkerEnd) -> None:
        end = self.book.take(end, wants_to_resume=bool(self._known.last_stop))
        if not attempt.take(end, self.now):
            return
        attempt.ended_after_stop |= self._stop is not None
        self._known.debugging.discard(end.rank)
        if (event := attempt.end_reports.take(end)) is not None:
            self.tell(event)

    def hung(self, now: float, end: WorkerEnd) -> None:
        """Record the end of a rank that the watch has found to hang."""
        self.now = now
        if self.attempt is not None:
            self.attempt.add(end)

    # From clients.

    def start_failed(self, place: int, why: str, *, is_gone: bool = False) -> None:
        """Record why no agent could start at a place; `is_gone`: the job has lost its node."""
        self._gathering.start_failed(place, why, is_gone=is_gone)

    def head_was_lost(self, place: int, node: str, *, is_gone: bool) -> None:
        """Record the previous head's node as lost; `is_gone`: the scheduler says so, too."""
        self._lost[node], self._was_led = HEAD_IS_SILENT, True
        if is_gone:
            why = "the scheduler says that it is lost"
            self._gathering.start_failed(place, why, is_gone=True)

    def forward(self, signum: int, last: str) -> None:
        """Forward a signal to the workers that catch it; `last` says why the run stops soon."""
        self._known.last_stop = last or self._known.last_stop
        self._send_all(messages.SignalWorkers(signum=signum, if_caught=True))

    def stop(
        self,
        now: float,
        signum: int,
        cause: StopCause,
        *,
        at_once: bool = False,
        time_is_up: bool = False,
    ) -> None:
        """Stop the run: send all workers the signal, and SIGKILL after their grace or at once."""
        self.now = now
        self._known.is_time_up |= time_is_up
        cause = better_cause(cause, cause_of_stop(signum, node_is_lost=bool(self._lost)))
        if self._stop is None:
            grace_s = self.plan.limits.grace_s
            self._stop = StopRequest(signum, cause, now if at_once else now + grace_s, now)
            by_torchrun = self.plan.engine == "torchrun"
            self.tell(self._stop.as_event(grace_s, by_torchrun=by_torchrun))
            return
        if self._stop.is_known_better(cause):  # an agent, which only saw a signal, was first
            who = self._stop.cause.value
            self.tell(events.StoppingEvent(who=who, text=f"{who} asked for this stop"))
        if at_once:
            self._stop.kill_at = now

    # What is due.

    def advance(self, now: float) -> None:
        """Do what is due."""
        self.now = now
        if self.result is not None:
            return
        self._lose_silent()
        if self.phase is AttemptPhase.GATHERING:
            self._advance_gathering()
        elif self.phase is AttemptPhase.RUNNING and self.attempt is not None:
            self._advance_running(self.attempt)
        elif self.phase is AttemptPhase.ENDING and self.attempt is not None:
            self._advance_ending(self.attempt)

    def _may_say(self) -> bool:
        if self.now < self._say_at:
            return False
        self._say_at = self.now + SAY_EVERY_S
        return True

    def _advance_gathering(self) -> None:
        if self._stop is not None:
            if self._stop.is_settled(self.now):
                self.finish(self._end_by_stop(self._stop))
            return
        left_s = self._gathering.left_s(self.now)
        too_few = len(self.members.members) < self.plan.min_nodes
        if too_few and self.now < self._say_at and left_s > 0:
            return  # thousands may be calling: don't count them all at each call
        here, dangerous = self.members.present(), self.members.dangerous()
        is_free, shrinking = self._is_free(here, dangerous), not self._is_first
        if is_free and self._gathering.is_complete(here, self.now, shrinking=shrinking):
            self._start_or_fail(here)
        elif left_s <= 0:
            self.finish(self._end_without_nodes(len(here)))
        elif self._may_say():
            self._say_wait(len(here), dangerous)

    def _say_wait(self, num_here: int, dangerous: Sequence[Member]) -> None:
        if dangerous:
            name = self.members.name(dangerous[0])
            text = f"waiting until the lease of {name} has expired, so that its workers are certainly gone"
            self.tell(events.WaitingForEndEvent(text=text))
        elif num_here < self.plan.min_nodes or not self.plan.is_elastic:
            waits = self._gathering.wait(num_here, self.now, self._options.hint)
            if waits and self._is_news(waits):
                self.tell(waits)
            self._actions.append(AskForNodes(tuple(self.members.missing_places()), again=True))

    def _is_news(self, waits: events.WaitingEvent) -> bool:
        """Return whether to report a wait now: a new one at once, the same one ever less often.

        In the end, that is once a minute.
        """
        fact: tuple[object, ...] = (waits.missing, waits.num_missing, waits.wanted, waits.hint)
        if fact != self._reported_wait:
            self._reported_wait, self._wait_pause_s = fact, SAY_EVERY_S
        elif self.now < self._tell_wait_at:
            return False
        else:
            self._wait_pause_s = min(2 * self._wait_pause_s, _LAST_SAY_EVERY_S)
        self._tell_wait_at = self.now + self._wait_pause_s
        return True

    # Starting.

    def _start_or_fail(self, here: Sequence[Member]) -> None:
        if self._checks.settle(self._to_check(here)):
            self._start_attempt(here)
        elif self._checks.end is not None:
            end = self._checks.end
            state = RunState.SUCCEEDED if end.exit_code == 0 else RunState.FAILED
            self.finish(EndRun(state, end.exit_code, end.report))

    def _start_attempt(self, here: Sequence[Member]) -> None:
        self._number_places()
        members = {m.place: m for m in here if m.place is not None}
        ranks = assign_ranks(
            {p: self._num_workers(p, m) for p, m in members.items()},
            {p: m.hello.role for p, m in members.items()},
        )
        number, self.next_attempt = self.next_attempt, self.next_attempt + 1
        self.attempt = Attempt(number, self.now, members, ranks)
        self.phase = AttemptPhase.RUNNING
        self._gathering.end()
        if too_old(number, self.attempt.world_size) == 1:
            self.tell(events.NoticeEvent(text=log_limit_notice(self.attempt.world_size)))
        # These are from an earlier attempt.
        self._known.trained_step = self._known.saved_step = None
        if self.plan.is_elastic and len(members) < self.plan.max_nodes and number:
            self.tell(events.ShrunkEvent(num_nodes=len(members), wanted=self.plan.max_nodes))
        for member in members.values():
            member.running_attempt, member.worker_pids = number, ()
        address = self._checks.master_address(here)
        self._actions.append(OpenStore(self.attempt, address))

    def store_is_open(self, attempt: Attempt, address: str, port: int) -> None:
        """Start the workers of an attempt whose store is now listening."""
        attempt.store = f"{address}:{port}"
        budget = (self.book.spent, self.plan.limits.max_restarts)
        interface_of, name_of = self._checks.interface_of, self.members.name
        for member, start in attempt.orders(budget, self.plan.stdin_rank, interface_of, name_of):
            self.send(member, start)
        self.tell(attempt.start_event(self._why_next, name_of, self._reported_spares()))

    # Running.

    def _advance_running(self, attempt: Attempt) -> None:
        if self._stop is not None:
            self._advance_stop(self._stop, attempt)
        failures = attempt.failures
        leaving = [self.members.name(member) for member in self._leavers.members]
        preempted, early = attempt.preempted_at, attempt.early_at
        if self._leavers.is_time(self.now, attempt.ends, leaving):
            self._begin_ending()
        elif failures and not self._is_held_by_debugger(failures):
            self._failed_at = min(self.now, self._heard_last)
            # A hung rank ignores the signal, and a session's servers end with their runs.
            in_vain = self.plan.is_session or any(end.kind is EndKind.HANG for end in failures)
            self._begin_ending(0.0 if in_vain else self.plan.limits.grace_s)
        elif attempt.has_ended or (preempted and self.now - preempted > PREEMPTION_GRACE_S):
            self._begin_ending()  # the others did not follow the preempted one
        elif early and self.now - early > EARLY_END_SAY_S:
            self._say_early_end(attempt)

    def _is_held_by_debugger(self, failures: Sequence[WorkerEnd]) -> bool:
        """Return whether a rank is in a debugger session that a restart would end."""
        if not self._known.debugging or self._stop is not None:
            return False
        if not self._known.held_failure_said:
            self._known.held_failure_said = True
            text = (
                f"rank {failures[0].rank} failed ({describe(failures[0])}) while rank"
                f" {min(self._known.debugging)} is in the debugger; the restart waits for it"
            )
            self.tell(events.NoticeEvent(node=failures[0].node, text=text))
        return True

    def _say_early_end(self, attempt: Attempt) -> None:
        if attempt.tells_early_ends(self.now):
            num_running = attempt.world_size - attempt.num_ended
            ranks = compress_ranks(attempt.early_ranks)
            self.tell(events.EarlyEndEvent(ranks=ranks, num_running=num_running))

    def _advance_stop(self, stop: StopRequest, attempt: Attempt) -> None:
        if not stop.sent and attempt.workers_up_at is None:
            # A signal would not reach workers that are just starting, and nothing is trained yet.
            stop.kill_at = self.now
        elif not stop.sent:
            stop.sent = True
            self._send_all(messages.SignalWorkers(signum=stop.signum, asks_to_stop=True))
        num_left = attempt.world_size - attempt.num_ended
        if stop.signum == signal.SIGINT and 0 < num_left <= len(self._known.debugging):
            stop.kill_at = min(stop.kill_at, stop.asked_at + _DEBUGGED_GRACE_S)
        if self.now >= stop.kill_at and not stop.killed:
            stop.killed = True
            self._begin_ending()

    # Ending.

    def _begin_ending(self, grace_s: float = 0.0) -> None:
        attempt = self.running
        if attempt is None:
            return
        self._ending_grace_s = grace_s
        self.phase = AttemptPhase.ENDING
        self._say_at = self.now + FIRST_SAY_S
        ended_well = self._stop is None and attempt.is_done
        self._send_all(
            messages.KillAttempt(attempt=attempt.number, ended_well=ended_well, grace_s=grace_s)
        )

    def _advance_ending(self, attempt: Attempt) -> None:
        if self._ending_grace_s and self._stop is not None:  # no attempt will follow
            self._ending_grace_s = 0.0
            self._send_all(messages.KillAttempt(attempt=attempt.number))
        unreaped = attempt.first_unreaped()
        if unreaped is not None:
            if self._may_say():
                name = self.members.name(unreaped)
                text = f"waiting until the killed workers of {name} are gone"
                if self._ending_grace_s:
                    text = (
                        f"waiting for workers of {name} that handle SIGTERM: they have"
                        f" {self._ending_grace_s:g} s, and end when they enter a collective"
                    )
                self.tell(events.WaitingForEndEvent(text=text))
            return
        dangerous = self.members.dangerous()
        could_finish = not attempt.failures and self._stop is None
        if dangerous and not (self.plan.is_elastic and could_finish):
            if self._may_say():
                self._say_wait(0, dangerous)
            return
        self._conclude(attempt)

    def _conclude(self, attempt: Attempt) -> None:
        """Decide what follows an attempt of which nothing is left."""
        self._known.held_failure_said = False
        self._known.debugging.clear()
        for event in attempt.end_reports.rest():
            self.tell(event)
        follows = self._what_follows(attempt)
        if isinstance(follows, EndRun):
            self.finish(follows)
        else:
            self._gather_again(follows.why)

    def _what_follows(self, attempt: Attempt) -> TryAgain | EndRun:
        if attempt.is_done:
            notes = notes_on_success(attempt.ends, attempt.world_size, self.plan.verify_every)
            for note in notes:
                self.tell(events.NoticeEvent(text=note))
            return EndRun(RunState.SUCCEEDED, 0, notes=notes)
        if self._stop is not None:
            return self._end_by_stop(self._stop)
        left = self._dismiss_leavers()
        if left:
            return TryAgain(f"{left[0]} has left")
        cause = first_cause(attempt.ends)
        preempted = [end for end in attempt.ends if end.kind is EndKind.PREEMPTED]
        if cause is not None and not (preempted and cause.looks_like_echo):
            log_path, dead_end = self._options.run_dir.rank_log, self._leave_out(attempt, cause)
            failed, follows = after_failure(
                attempt, cause, self.book, self.plan, log_path, dead_end=dead_end
            )
            self.tell(failed)
            return follows
        if preempted:
            end, last_stop = preempted[0], self._known.last_stop
            follows = after_preemption(attempt, end, self.book, self.plan.again, last_stop)
            if isinstance(follows, TryAgain):
                text = f"rank {end.rank} was preempted (exit code 75): the run continues, no restart spent"
                self.tell(events.NoticeEvent(node=end.node, text=text))
            return follows
        return TryAgain(self._why_next)  # growth

    def _gather_again(self, why: str) -> None:
        self._why_next = why
        self.phase = AttemptPhase.GATHERING
        self._gathering.begin(self.now)
        self._say_at = self.now + FIRST_SAY_S
        lacks = self._gathering.lacks(is_last=self.book.is_spent)
        if lacks:
            self._ask_for(lacks)
        self._advance_gathering()

    # The end of the run.

    def _end_without_nodes(self, num_here: int) -> EndRun:
        """Return the end of a run that lacks nodes.

        If it has trained and then lost them, it is preempted, to continue on other nodes.
        """
        report = self._gathering.report(num_here)
        has_trained = self._was_led or self.next_attempt > self._options.first_attempt
        if not self._lost or not has_trained or num_here >= self.plan.min_nodes:
            return EndRun(RunState.FAILED, 6, report)
        return EndRun(
            RunState.PREEMPTED,
            contract.EX_TEMPFAIL,
            not_replaced(report, self.plan.again, self._lost),
        )

    def _end_by_stop(self, stop: StopRequest) -> EndRun:
        ends = self.attempt.ends if self.attempt is not None else []
        if self.plan.is_session and ends and all(e.kind is EndKind.SUCCESS for e in ends):
            return EndRun(RunState.SUCCEEDED, 0)  # a session can't end successfully otherwise
        saved = any(end.exit_code == contract.EX_TEMPFAIL for end in ends)
        state, code, report = end_by_stop(
            stop.cause,
            stop.signum,
            self.plan.again,
            saved=saved or self._known.is_time_up,
            lost=self._lost,
        )
        return EndRun(state, code, report)

    def finish(self, end: EndRun) -> None:
        """End the run, unless it has ended already."""
        if self.result is not None:
            return
        self.phase = AttemptPhase.OVER
        self.result = Result(
            run_id=self.plan.run_id,
            state=end.state,
            exit_code=end.exit_code,
            attempts=self.next_attempt,
            restarts_spent=self.book.spent,
            elapsed_s=0.0,
            report=end.report,
            cause=end.cause,
            lost_s=round(self.lost_s, 3),
            notes=(*end.notes, *self._notes_on_losses()),
            node_was_lost=bool(self._lost)
            and (self._stop is not None or end.state is RunState.PREEMPTED),
            trained_step=self._known.trained_step,
            saved_step=self._known.saved_step,
        )

    @property
    def more_may_come(self) -> bool:
        """Return whether nodes may still call, which would wait in vain if the head were gone."""
        before_all = self.next_attempt == self._options.first_attempt
        missing = len(self.members.members) < self.plan.num_places
        failed = self.result is not None and self.result.state is RunState.FAILED
        return failed and before_all and missing
