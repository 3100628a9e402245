"""One attempt as its head sees it: its members, the ends of its workers, and what follows."""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torchmuster.core.head.membership import MAX_LISTED, Member
from torchmuster.core.model import contract, events, verdict
from torchmuster.core.model.failure import EndKind, WorkerEnd, describe, last_step
from torchmuster.core.model.plan import RestartPolicy, RunPlan
from torchmuster.core.model.ranks import NodeRanks, compress_counts, compress_ranks
from torchmuster.core.model.states import RunState
from torchmuster.core.net.messages import StartAttempt


class AttemptPhase(enum.Enum):
    """The state of a training run's current attempt."""

    GATHERING = "gathering"
    RUNNING = "running"
    ENDING = "ending"
    OVER = "over"


EARLY_END_AGAIN_S = 10.0
# Ends with their own event, by `asked`.
_MOST_SINGLE = {True: 8, False: 64}


@dataclass(slots=True)
class EndReports:
    """Bounds the events on an attempt's ends: the first ones singly, the rest grouped by kind."""

    _num: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    _rest: dict[tuple[str, bool], tuple[list[int], float]] = field(default_factory=dict)
    _attempt: int = 0

    def take(self, end: WorkerEnd) -> events.WorkerEndedEvent | None:
        """Record an end; return its event, or None if it is grouped with others."""
        self._num[end.asked] += 1
        if end.value or end.code or self._num[end.asked] <= _MOST_SINGLE[end.asked]:
            return events.event_of_end(end)
        self._attempt, key = end.attempt, (describe(end), end.asked)
        ranks, longest_s = self._rest.get(key, ([], 0.0))
        ranks.append(end.rank)
        self._rest[key] = ranks, max(longest_s, end.elapsed_s)
        return None

    def rest(self) -> list[events.WorkersEndedEvent]:
        """Return and clear the events on the grouped ends."""
        rest, self._rest = self._rest, {}
        return [
            events.WorkersEndedEvent(
                attempt=self._attempt,
                ranks=compress_ranks(ranks),
                num=len(ranks),
                asked=asked,
                what=what,
                elapsed_s=longest_s,
            )
            for (what, asked), (ranks, longest_s) in rest.items()
        ]


@dataclass(slots=True)
class Attempt:
    """One life of the process group.

    Tens of thousands of ranks may end one by one, so what the head needs at each turn is kept up to
    date and not counted again.

    Attributes:
        members: The members that take part, by place.
        world_size: The number of workers.
        places_up: The places whose workers have all started.
        ends: The ends in order of arrival; only `add` writes it.
        failures: Those ends that end the attempt.
        early_ranks: The ranks that ended successfully, while others may still run.
        store: Address and port of torch's store.
        early_said: How many early ends have been reported.
        ended_after_stop: A worker ended after a stop was requested.
    """

    number: int
    started_at: float
    members: dict[int, Member]
    ranks: dict[int, NodeRanks]
    workers_up_at: float | None = None
    world_size: int = field(init=False)
    places_up: set[int] = field(default_factory=set)
    ends: list[WorkerEnd] = field(default_factory=list)
    failures: list[WorkerEnd] = field(default_factory=list)
    early_ranks: list[int] = field(default_factory=list)
    store: str = ""
    early_said: int = 0
    early_again_at: float = float("-inf")
    early_at: float | None = None
    preempted_at: float | None = None
    ended_after_stop: bool = False
    end_reports: EndReports = field(default_factory=EndReports)
    _ended: set[int] = field(default_factory=set)
    _reported: set[int] = field(default_factory=set)  # ranks whose agents have reported their end
    _unreaped: dict[int, Member] = field(default_factory=dict)
    _num_well: int = 0
    _num_echoes: int = 0  # how many of the failures, from the first on, are known echoes

    def __post_init__(self) -> None:
        self.world_size = sum(ranks.num_workers for ranks in self.ranks.values())
        self._unreaped = dict(self.members)

    @property
    def present(self) -> list[Member]:
        """Return the members whose agents are connected."""
        return [member for member in self.members.values() if member.is_present]

    @property
    def has_ended(self) -> bool:
        """Return whether the end of every rank is known."""
        return self.num_ended >= self.world_size

    @property
    def num_ended(self) -> int:
        """Return the number of ranks whose end is known."""
        return len(self._ended)

    @property
    def is_done(self) -> bool:
        """Return whether all workers have ended successfully and unasked."""
        all_well = self.has_ended and self._num_well == len(self.ends)
        return all_well and not self.ended_after_stop

    @property
    def has_only_echoes(self) -> bool:
        """Return whether there are failures, but so far only echoes of another rank's death."""
        failures = self.failures
        while self._num_echoes < len(failures) and failures[self._num_echoes].looks_like_echo:
            self._num_echoes += 1
        return 0 < self._num_echoes == len(failures)

    def reap(self, place: int) -> None:
        """Record that no worker of a place is left."""
        self._unreaped.pop(place, None)

    def first_unreaped(self) -> Member | None:
        """Return a member that has yet to report its workers gone; None if there is none.

        Lost members don't count.
        """
        while self._unreaped:
            place = next(iter(self._unreaped))
            if self._unreaped[place].lost_why is None:
                return self._unreaped[place]
            del self._unreaped[place]
        return None

    def tells_early_ends(self, now: float) -> bool:
        """Return whether to report early ends now: some are new, and the last report is old."""
        count = len(self.early_ranks)
        if count <= self.early_said or now < self.early_again_at:
            return False
        self.early_said, self.early_again_at = count, now + EARLY_END_AGAIN_S
        return True

    def member_of(self, rank: int) -> Member | None:
        """Return the member that runs a rank; None if there is no such rank."""
        for place, ranks in self.ranks.items():
            if rank in _numbers(ranks):
                return self.members[place]
        return None

    def rank_nodes(self, names: dict[int, str]) -> dict[int, str]:
        """Return the node name of each rank; `names` are by place."""
        return {
            rank: names[place] for place, ranks in self.ranks.items() for rank in _numbers(ranks)
        }

    def orders(
        self,
        budget: tuple[int, int],
        stdin_rank: int | None,
        interface_of: Callable[[Member], str | None],
        name_of: Callable[[Member], str],
    ) -> Iterator[tuple[Member, StartAttempt]]:
        """Yield each agent's order to start its workers.

        Args:
            budget: The number of restarts spent, and the maximum.
            stdin_rank: The rank that reads the terminal; None: no rank does.
            interface_of: Returns the interface that a node's workers use.
            name_of: Returns a node's name.
        """
        address, _, port = self.store.rpartition(":")
        tasks_per_node = compress_counts(
            self.ranks[place].num_workers for place in sorted(self.ranks)
        )
        for place, member in self.members.items():
            yield (
                member,
                StartAttempt(
                    attempt=self.number,
                    ranks=self.ranks[place],
                    world_size=self.world_size,
                    num_nodes=len(self.members),
                    master_addr=address,
                    master_port=int(port),
                    restarts_spent=budget[0],
                    max_restarts=budget[1],
                    node=name_of(member),
                    stdin_rank=stdin_rank,
                    interface=interface_of(member),
                    tasks_per_node=tasks_per_node,
                ),
            )

    def start_event(
        self, why: str, name_of: Callable[[Member], str], spares: tuple[str, ...] | None
    ) -> events.AttemptStartedEvent:
        """Return the event on the attempt's start; `why` says what it follows."""
        nodes = tuple(
            events.AttemptNode(
                node=name_of(m),
                host=m.hello.host,
                ranks=compress_ranks(_numbers(self.ranks[place])),
            )
            for place, m in sorted(self.members.items())[:MAX_LISTED]
        )
        return events.AttemptStartedEvent(
            attempt=self.number,
            world_size=self.world_size,
            num_nodes=len(self.members),
            why=why,
            master=self.store,
            nodes=nodes,
            spares=spares,
        )

    def take(self, end: WorkerEnd, now: float) -> bool:
        """Record a worker's end; return whether it is new, not repeated after a lost connection."""
        if end.rank in self._reported:
            return False
        self.add(end)
        if end.kind is EndKind.SUCCESS and self.early_at is None:
            self.early_at = now
        if end.kind is EndKind.PREEMPTED and self.preempted_at is None:
            self.preempted_at = now
        return True

    def add(self, end: WorkerEnd) -> None:
        """Record an end of any kind."""
        self.ends.append(end)
        self._ended.add(end.rank)
        self._num_well += end.kind is EndKind.SUCCESS and not end.asked
        if end.kind is not EndKind.NODE_LOST:
            self._reported.add(end.rank)
        if end.kind is EndKind.SUCCESS:
            self.early_ranks.append(end.rank)
        if end.is_failure:
            self.failures.append(end)

    def take_loss(self, member: Member, name: str, why: str, now: float) -> None:
        """Record that a node, or something that the attempt needs from it, is lost."""
        ranks = self.ranks.get(-1 if member.place is None else member.place)
        self.add(
            WorkerEnd(
                attempt=self.number,
                rank=ranks.first_rank if ranks else -1,
                local_rank=0,
                node=name,
                kind=EndKind.NODE_LOST,
                asked=False,
                elapsed_s=round(now - self.started_at, 3),
                signum=9,
                detail=why,
            )
        )


def _numbers(ranks: NodeRanks) -> range:
    return range(ranks.first_rank, ranks.first_rank + ranks.num_workers)


# What follows a failed attempt: another one, or the end of the run. No clock, no I/O.


class Next(enum.Enum):
    """What follows an attempt."""

    AGAIN = "again"
    FAIL_SPENT = "spent"
    FAIL_SAME_BUG = "same_bug"
    FAIL_FINAL = "final"  # another attempt would end in the same way
    FAIL_DEAD_END = "dead_end"  # a node computes wrongly, and the run can't continue without it


@dataclass(slots=True)
class RestartBook:
    """Keeps the number of restarts, the last failure, and how far training has come.

    Attributes:
        last_attempt: The attempt that ended with the failure `last`.
        same_as: The attempt before, if it ended in the same way as the last one; otherwise None.
        furthest: The last step that any attempt has done; None while no script has reported one.
        is_over: No attempt followed a failure, so none will.
    """

    max_restarts: int
    spent: int = 0
    policy: RestartPolicy = RestartPolicy.EVIDENCE
    last: verdict.Mark | None = None
    last_attempt: int | None = None
    same_as: int | None = None
    furthest: int | None = None
    is_over: bool = False

    @property
    def is_spent(self) -> bool:
        """Return whether another failure would end the run."""
        return self.is_over or self.spent >= self.max_restarts

    def after_failure(
        self,
        cause: WorkerEnd,
        step: int | None = None,
        *,
        dead_end: str | None = None,
        after_early_end: bool = False,
    ) -> Next:
        """Decide what follows a failure; spend a restart if that is `AGAIN`.

        Args:
            cause: The failure that explains the others.
            step: The last step that a rank of this attempt has reported; None without any.
            dead_end: Why no attempt can follow, whatever the budget.
            after_early_end: Other ranks had ended successfully before.
        """
        recurs = self._recurs(
            verdict.mark(cause, after_early_end=after_early_end), cause.attempt, step
        )
        answer = Next.FAIL_DEAD_END if dead_end else self._judge(cause, recurs=recurs)
        self.is_over |= answer is not Next.AGAIN
        self.spent += answer is Next.AGAIN
        return answer

    def take(self, end: WorkerEnd, *, wants_to_resume: bool) -> WorkerEnd:
        """Return an end as the restart policy sees it.

        If the policy only counts failures, exit code 75 is a failure like any other, unless the
        worker said before why it stops to be resumed.
        """
        counts = self.policy is RestartPolicy.COUNT and not wants_to_resume and not end.asked
        if counts and end.kind is EndKind.PREEMPTED:
            return replace(end, kind=EndKind.EXIT_CODE)
        return end

    def _judge(self, cause: WorkerEnd, *, recurs: bool) -> Next:
        if self.policy is RestartPolicy.EVIDENCE:
            if verdict.prospect(cause) is verdict.Prospect.NONE:
                return Next.FAIL_FINAL
            if recurs:
                return Next.FAIL_SAME_BUG
        if self.is_spent:
            return Next.FAIL_SPENT
        return Next.AGAIN

    def after_preemption(self, end: WorkerEnd, step: int | None = None) -> Next:
        """Decide what follows a preemption: retry for free, unless it recurs without progress."""
        return (
            Next.FAIL_SAME_BUG if self._recurs(verdict.mark(end), end.attempt, step) else Next.AGAIN
        )

    def _recurs(self, found: verdict.Mark | None, attempt: int, step: int | None) -> bool:
        """Record a failure; return whether it repeats the last one with no new step in between."""
        moved = step is not None and (self.furthest is None or step > self.furthest)
        same = found is not None and found == self.last and not moved
        self.same_as = self.last_attempt if same else None
        self.last, self.last_attempt = found, attempt
        if step is not None:
            self.furthest = max(step, self.furthest or 0)
        return same


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Another attempt follows; `why` is the reason in `attempt 2: 4 workers on 2 nodes (...)`."""

    why: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run ends."""

    state: RunState
    exit_code: int
    report: verdict.Report | None = None
    cause: WorkerEnd | None = None
    notes: tuple[str, ...] = ()


def after_failure(
    attempt: Attempt,
    cause: WorkerEnd,
    book: RestartBook,
    plan: RunPlan,
    log_path: Callable[[int, int], str],
    *,
    dead_end: str | None = None,
) -> tuple[events.AttemptFailedEvent, TryAgain | EndRun]:
    """Return the event on a failed attempt, and what follows; another attempt spends a restart.

    Args:
        attempt: The attempt that has ended.
        cause: Its first failure that no other failure explains.
        book: The run's restart book.
        plan: The run's plan.
        log_path: Returns the path of a rank's log, by attempt and rank.
        dead_end: Why no attempt can follow, whatever the budget.
    """
    follows = book.after_failure(
        cause,
        last_step(attempt.ends),
        dead_end=dead_end,
        after_early_end=bool(attempt.early_ranks),
    )
    again = follows is Next.AGAIN
    failed = events.AttemptFailedEvent(
        attempt=attempt.number,
        what=_what_failed(cause),
        cause=cause,
        restarts_left=book.max_restarts - book.spent if again else None,
    )
    if again:
        lost = f"the loss of {cause.node}: " if cause.kind is EndKind.NODE_LOST else ""
        return failed, TryAgain(f"after {lost}{describe(cause)}")
    circumstances = verdict.Circumstances(
        world_size=attempt.world_size,
        attempt=attempt.number,
        restarts_spent=book.spent,
        max_restarts=book.max_restarts,
        same_as=book.same_as if follows is Next.FAIL_SAME_BUG else None,
        is_final=follows is Next.FAIL_FINAL,
        dead_end=dead_end,
        early_ranks=tuple(attempt.early_ranks),
        restart_hint=plan.restart_hint,
        log_path=log_path(attempt.number, cause.rank) if cause.rank >= 0 else None,
    )
    report = verdict.explain_failure(cause, attempt.ends, circumstances)
    code = verdict.final_exit_code(cause, first_cause_code=plan.first_cause_code)
    return failed, EndRun(RunState.FAILED, code, report, cause)


def _what_failed(cause: WorkerEnd) -> str:
    memory = " because memory ran out" if cause.memory_evidence else ""
    if cause.kind is EndKind.NODE_LOST:
        return f"{cause.node}: {describe(cause)}{memory}"
    if cause.kind is EndKind.HANG:
        return describe(cause)
    return f"{describe(cause)} in rank {cause.rank} on {cause.node}{memory}"


def after_preemption(
    attempt: Attempt, end: WorkerEnd, book: RestartBook, again: str, last_stop: str
) -> TryAgain | EndRun:
    """Return what follows an attempt that a worker left with exit code 75.

    Args:
        attempt: The attempt that has ended.
        end: That worker's end.
        book: The run's restart book.
        again: The command that starts the run again.
        last_stop: Why the training library stopped, to be resumed later; empty if unknown.
    """
    state, code = RunState.PREEMPTED, contract.EX_TEMPFAIL
    if last_stop:
        error = "the run has stopped and can be resumed"
        return EndRun(state, code, verdict.Report(error=error, because=(last_stop,), hint=again))
    if book.after_preemption(end, last_step(attempt.ends)) is Next.AGAIN:
        return TryAgain("after a preemption")
    report = verdict.explain_preemption(end, book.same_as or 0, attempt.world_size)
    return EndRun(state, code, report, end)
