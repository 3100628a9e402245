"""What follows a failed attempt: again, or the end. Pure values, no clock, no I/O."""

import enum
from dataclasses import dataclass, replace

from torchmuster.model.failure import EndKind, WorkerEnd
from torchmuster.model.plan import RestartPolicy
from torchmuster.model.recurrence import Mark, Prospect, mark, prospect


class Next(enum.Enum):
    """What to do after an attempt."""

    AGAIN = "again"
    FAIL_SPENT = "spent"
    FAIL_SAME_BUG = "same_bug"
    FAIL_FINAL = "final"  # another attempt would end in the same way


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

    def after_failure(self, cause: WorkerEnd, step: int | None = None) -> Next:
        """Judge a failure; spends a restart when the answer is `AGAIN`.

        Args:
            cause: The failure that explains the others.
            step: The last step that a rank of this attempt has done; None where the script doesn't say.
        """
        answer = self._judge(cause, step)
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

    def _judge(self, cause: WorkerEnd, step: int | None) -> Next:
        recurs = self._recurs(cause, step)
        if self.policy is RestartPolicy.EVIDENCE:
            if prospect(cause) is Prospect.NONE:
                return Next.FAIL_FINAL
            if recurs:
                return Next.FAIL_SAME_BUG
        if self.is_over or self.spent >= self.max_restarts:
            return Next.FAIL_SPENT
        return Next.AGAIN

    def after_preemption(self, end: WorkerEnd, step: int | None = None) -> Next:
        """Judge an unasked exit with code 75: again for free, unless it does nothing else."""
        return Next.FAIL_SAME_BUG if self._recurs(end, step) else Next.AGAIN

    def _recurs(self, end: WorkerEnd, step: int | None) -> bool:
        """Say whether this is the last failure once more, with no step between; remembers it."""
        found = mark(end)
        moved = step is not None and (self.furthest is None or step > self.furthest)
        same = found is not None and found == self.last and not moved
        self.same_as = self.last_attempt if same else None
        self.last, self.last_attempt = found, end.attempt
        if step is not None:
            self.furthest = max(step, self.furthest or 0)
        return same
