"""What follows a failed attempt: again, or the end. Pure values, no clock, no I/O."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from torchmuster.head.attempt import Attempt
from torchmuster.model import contract
from torchmuster.model.failure import EndKind, WorkerEnd, describe, last_step
from torchmuster.model.plan import RestartPolicy, RunPlan
from torchmuster.model.record.events import AttemptFailedEvent
from torchmuster.model.states import RunState
from torchmuster.model.verdict import (
    Circumstances,
    Mark,
    Prospect,
    Report,
    explain_failure,
    explain_preemption,
    final_exit_code,
    mark,
    prospect,
)


class Next(enum.Enum):
    """What to do after an attempt."""

    AGAIN = "again"
    FAIL_SPENT = "spent"
    FAIL_SAME_BUG = "same_bug"
    FAIL_FINAL = "final"  # another attempt would end in the same way
    FAIL_DEAD_END = "dead_end"  # a node computes wrongly, and the run can't go on without it


@dataclass(slots=True)
class RestartBook:
    """Keeps the count of restarts, the last failure, and how far the training had come.

    Attributes:
        last_attempt: The attempt that ended so.
        same_as: The attempt before that had ended as the last one did; None when none had.
        furthest: The last step that any attempt has done; None while no script has said one.
        is_over: A failure was not followed by another attempt, so none will be.
    """

    max_restarts: int
    spent: int = 0
    policy: RestartPolicy = RestartPolicy.EVIDENCE
    last: Mark | None = None
    last_attempt: int | None = None
    same_as: int | None = None
    furthest: int | None = None
    is_over: bool = False

    @property
    def is_spent(self) -> bool:
        """Say whether no attempt follows another failure."""
        return self.is_over or self.spent >= self.max_restarts

    def after_failure(
        self,
        cause: WorkerEnd,
        step: int | None = None,
        *,
        dead_end: str | None = None,
        after_early_end: bool = False,
    ) -> Next:
        """Judge a failure; spends a restart when the answer is `AGAIN`.

        Args:
            cause: The failure that explains the others.
            step: The last step that a rank of this attempt has done; None where the script doesn't say.
            dead_end: Why no attempt can follow, whatever the budget.
            after_early_end: Other ranks had ended with 0 before.
        """
        recurs = self._recurs(mark(cause, after_early_end=after_early_end), cause.attempt, step)
        answer = Next.FAIL_DEAD_END if dead_end else self._judge(cause, recurs=recurs)
        self.is_over |= answer is not Next.AGAIN
        self.spent += answer is Next.AGAIN
        return answer

    def take(self, end: WorkerEnd, *, wants_to_resume: bool) -> WorkerEnd:
        """Return an end as this policy reads it: where failures are counted, code 75 is one like any other.

        A worker that said before why it stops, to be resumed, did not fail.
        """
        counts = self.policy is RestartPolicy.COUNT and not wants_to_resume and not end.asked
        if counts and end.kind is EndKind.PREEMPTED:
            return replace(end, kind=EndKind.EXIT_CODE)
        return end

    def _judge(self, cause: WorkerEnd, *, recurs: bool) -> Next:
        if self.policy is RestartPolicy.EVIDENCE:
            if prospect(cause) is Prospect.NONE:
                return Next.FAIL_FINAL
            if recurs:
                return Next.FAIL_SAME_BUG
        if self.is_spent:
            return Next.FAIL_SPENT
        return Next.AGAIN

    def after_preemption(self, end: WorkerEnd, step: int | None = None) -> Next:
        """Judge an unasked exit with code 75: again for free, unless it does nothing else."""
        return Next.FAIL_SAME_BUG if self._recurs(mark(end), end.attempt, step) else Next.AGAIN

    def _recurs(self, found: Mark | None, attempt: int, step: int | None) -> bool:
        """Say whether this is the last failure once more, with no step between; remembers it."""
        moved = step is not None and (self.furthest is None or step > self.furthest)
        same = found is not None and found == self.last and not moved
        self.same_as = self.last_attempt if same else None
        self.last, self.last_attempt = found, attempt
        if step is not None:
            self.furthest = max(step, self.furthest or 0)
        return same


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Another attempt follows; `why` ends the sentence `attempt 2 starts ...`."""

    why: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run ends so."""

    state: RunState
    exit_code: int
    report: Report | None = None
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
) -> tuple[AttemptFailedEvent, TryAgain | EndRun]:
    """Return the event on a failed attempt, and what follows; spends a restart if that is another attempt.

    Args:
        attempt: The attempt that has ended.
        cause: Its first failure that no other explains.
        book: The run's.
        plan: The run's.
        log_path: Returns where the output of a rank of an attempt is.
        dead_end: Why no attempt can follow, whatever the budget.
    """
    early = bool(attempt.early_ranks)
    follows = book.after_failure(
        cause, last_step(attempt.ends), dead_end=dead_end, after_early_end=early
    )
    again = follows is Next.AGAIN
    told = AttemptFailedEvent(
        attempt=attempt.number,
        what=_what_failed(cause),
        cause=cause,
        restarts_left=book.max_restarts - book.spent if again else None,
    )
    if again:
        lost = f"the loss of {cause.node}: " if cause.kind is EndKind.NODE_LOST else ""
        return told, TryAgain(f"after {lost}{describe(cause)}")
    circumstances = Circumstances(
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
    report = explain_failure(cause, attempt.ends, circumstances)
    code = final_exit_code(cause, first_cause_code=plan.first_cause_code)
    return told, EndRun(RunState.FAILED, code, report, cause)


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
        end: Of that worker.
        book: The run's.
        again: What starts the run again.
        last_stop: Why the training library has stopped to be resumed later; empty if it has not said so.
    """
    state, code = RunState.PREEMPTED, contract.EX_TEMPFAIL
    if last_stop:
        error = "the run has stopped and can be resumed"
        return EndRun(state, code, Report(error=error, because=(last_stop,), hint=again))
    if book.after_preemption(end, last_step(attempt.ends)) is Next.AGAIN:
        return TryAgain("after a preemption")
    report = explain_preemption(end, book.same_as or 0, attempt.world_size)
    return EndRun(state, code, report, end)
