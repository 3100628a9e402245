"""Do ranks wait at the start of training for one that does not come? A sentence, never an end; no clock, no I/O.

Nothing is looked at before a rank has done nothing for 10 s in an attempt without steps. Two looks must show all ranks
in the same functions. That is enough where those that are waited for have rested as long, as the kernel counts, and one
look where a rank calls a store that is not the run's. Who works is told of after three times that. Who imports a
library, compiles or sits in a debugger will come: nothing is said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchmuster.diagnose.facts.stacks import Doing
from torchmuster.head.hangs.start_words import StartLook, is_elsewhere, tell_start

_PATIENCE = 3.0  # times the limit, for what may end by itself
_MAX_PAUSE = 12.0  # times the limit
_MAX_LOOKS = 10  # eleven minutes: a look disturbs a rank a little
_AGAIN_S = 2.5  # the kernel's counters are read every two seconds
_MAY_TAKE_LONG = (Doing.SAVES, Doing.EVALUATES, Doing.UNKNOWN)
_WILL_COME = (Doing.COMPILES, Doing.DEBUGGED)


@dataclass(slots=True)
class StartWatch:
    """Watches the start of one attempt, and speaks at most once.

    Args:
        limit_s: How long ranks may wait in silence.
        store: `HOST:PORT` of the attempt's store.
        relay_port: A port of the head that leads to it, too; 0 without.
    """

    limit_s: float
    store: str = ""
    relay_port: int = 0
    _is_over: bool = False
    _ask_at: float = 0.0
    _asked_at: float = 0.0
    _is_again: bool = False
    _num_looks: int = 0
    _places: dict[int, tuple[str, str]] = field(default_factory=dict)

    def must_ask(self, now: float, rests: Mapping[int, float], *, moves: bool) -> bool:
        """Say whether the stacks of all ranks are wanted now.

        Args:
            now: The time.
            rests: Rank -> how many seconds it has done nothing; empty where that is not known yet.
            moves: A rank has done a step.
        """
        if moves:
            self._is_over = True
        if self._is_over or now < self._ask_at or max(rests.values(), default=0.0) < self.limit_s:
            return False
        self._num_looks += 1
        self._is_over = self._num_looks >= _MAX_LOOKS
        pause = 2.0 ** max(self._num_looks - 3, 0)  # soon at first: most starts are short
        self._asked_at = now
        self._ask_at = now + self.limit_s * min(pause, _MAX_PAUSE)
        return True

    def judge(self, looks: Sequence[StartLook], ended: Mapping[int, str]) -> str:
        """Return the sentence, or nothing.

        Args:
            looks: The ranks that live.
            ended: Rank -> how it has ended.
        """
        before, self._places = self._places, {one.rank: _place(one) for one in looks}
        waiting = [one for one in looks if one.meets]
        missing = [one for one in looks if not one.meets]
        if not waiting or any(one.imports or one.standing.doing in _WILL_COME for one in missing):
            return ""
        away = self._away(waiting)
        if max(one.rest_s for one in waiting) < self._limit_of(missing, ended, away=away):
            return ""
        if (missing or not away) and before != self._places:
            self._look_again()
            return ""
        self._is_over = True
        return tell_start(waiting, missing, ended, self.store, self.relay_port)

    def _look_again(self) -> None:
        """Ask soon once more: in this look some may just have moved on, and others not yet."""
        self._is_again = not self._is_again
        if self._is_again:
            self._ask_at = self._asked_at + _AGAIN_S

    def _away(self, waiting: Sequence[StartLook]) -> bool:
        """Say whether a rank has tried long enough to reach another store than that of its run."""
        return any(
            one.store is not None
            and is_elsewhere(one.store, self.store, self.relay_port)
            and one.rest_s >= self.limit_s
            for one in waiting
        )

    def _limit_of(
        self, missing: Sequence[StartLook], ended: Mapping[int, str], *, away: bool
    ) -> float:
        """Return how long they may wait: longer when it may end by itself."""
        may_end = any(self._works(one) for one in missing) or not (missing or ended)
        return _PATIENCE * self.limit_s if may_end and not away else self.limit_s

    def _works(self, one: StartLook) -> bool:
        return one.rest_s < self.limit_s or one.standing.doing in _MAY_TAKE_LONG


def _place(one: StartLook) -> tuple[str, str]:
    """Return the function in which a rank stands: a loop moves between its lines."""
    frame = one.standing.frame
    return (frame.file, frame.name) if frame is not None else ("", "")
