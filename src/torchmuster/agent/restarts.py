"""What follows a failed attempt: again, or the end. Pure values, no clock, no I/O."""

import enum
from dataclasses import dataclass

from torchmuster.model.failure import Fingerprint, WorkerEnd, fingerprint


class Next(enum.Enum):
    """What to do after an attempt."""

    AGAIN = "again"
    FAIL_SPENT = "spent"
    FAIL_SAME_BUG = "same_bug"
    FAIL_FINAL = "final"  # the worker's exception said that it would come again


@dataclass(slots=True)
class RestartBook:
    """Keeps the count of restarts and the last bug."""

    max_restarts: int
    spent: int = 0
    last: Fingerprint | None = None

    def after_failure(self, cause: WorkerEnd) -> Next:
        """Judge a failure; spends a restart when the answer is `AGAIN`."""
        mark = fingerprint(cause)
        same = mark is not None and mark == self.last
        self.last = mark
        if cause.is_final:
            return Next.FAIL_FINAL
        if same:
            return Next.FAIL_SAME_BUG
        if self.spent >= self.max_restarts:
            return Next.FAIL_SPENT
        self.spent += 1
        return Next.AGAIN

    def after_preemption(self, end: WorkerEnd) -> Next:
        """Judge an unasked exit with code 75: again for free, unless it does nothing else."""
        mark = fingerprint(end)
        same = mark is not None and mark == self.last
        self.last = mark
        return Next.FAIL_SAME_BUG if same else Next.AGAIN
