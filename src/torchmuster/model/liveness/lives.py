"""What an owner does when what it owns has ended, or is lost: pure, and one rule for all owners.

A head of a run or of a group, a member of a sweep, a start in pods: each has lives, which losses spend.
"""

from dataclasses import dataclass
from enum import Enum


class WhatFollows(Enum):
    """What follows the end of a life."""

    OVER = "it has its result"
    STOPPED = "somebody has asked to stop"
    SPENT = "no life is left"
    AGAIN = "another one begins"


@dataclass(slots=True)
class Lives:
    """The lives of what an owner owns.

    Attributes:
        most: How many losses are made up for.
        spent: How many were.
        lost: How many there have been, those included that cost nothing.
    """

    most: int
    spent: int = 0
    lost: int = 0

    @property
    def left(self) -> int:
        """Return how many losses may still be made up for."""
        return max(0, self.most - self.spent)

    def after_loss(
        self, *, has_result: bool = False, is_stopped: bool = False, is_free: bool = False
    ) -> WhatFollows:
        """Count a loss, and return what follows.

        Args:
            has_result: It had ended well, and its last words were lost: the record has them.
            is_stopped: Somebody has asked to stop: nothing is started any more.
            is_free: It costs nothing: nothing had begun.
        """
        if has_result:
            return WhatFollows.OVER
        if is_stopped:
            return WhatFollows.STOPPED
        if not is_free and not self.left:
            return WhatFollows.SPENT
        self.spent += not is_free
        self.lost += 1
        return WhatFollows.AGAIN
