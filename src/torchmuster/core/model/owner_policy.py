"""What an owner decides: pure, the time is an argument, and the same rules for every owner.

An owner starts something (a head of a run or of a group, a member of a sweep, the agents in pods), follows it to its end
and writes the one result. Three parts answer what follows: `StopRequests` who was asked to stop how often, `JobTime`
when the job's time is over, `Lives` what a loss costs. `OwnerPolicy` joins them for one thing that is owned.
"""

import signal
from dataclasses import dataclass, field
from enum import Enum

from torchmuster.core.model.lease import SILENT_S, is_given_up
from torchmuster.core.model.verdict import AGAIN_AFTER_S, AT_ONCE, TERM_AGAIN_AFTER_S

SAY_EVERY_S = 5.0
FIRST_WORD_S = 30.0  # a head that starts beside many others takes its time
FAR_SILENT_S = 20.0  # as long as an ssh connection may stall
_STOPPED_SILENT_S = 5.0
_SECOND_STOP_S = 3.0
_STOP_MARGIN_S = 30.0  # for the ends of workers, and the lease of a node that was lost meanwhile

STOP_BEFORE_S = (
    15.0  # before the end of the job's time: what the next link's requeue or submission may take
)
KILL_AFTER_S = 5.0
_NEAR_S = 90.0  # the training library keeps a minute back for its last save
_CLOCKS_DIFFER_S = 3.0  # the scheduler counts in seconds of its own
_MOVED_S = 60.0  # less is no move
_ASK_EVERY_S = 60.0


# Actions of an owner.


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Let the workers save and leave: the time is nearly over."""


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Stop the workers because of the time: politely, or at once."""

    at_once: bool


@dataclass(frozen=True, slots=True)
class AskForEnd:
    """Ask the scheduler when the job ends; `JobTime.answer` takes what it says."""


@dataclass(frozen=True, slots=True)
class TellEnd:
    """Tell the workers that the end of the job has moved."""

    ends_at: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the head: it is silent, or does not end when it is asked to."""

    why: str


OwnerAction = Say | Warn | StopWorkers | AskForEnd | TellEnd | GiveUp


class WhatFollows(Enum):
    """What follows the end of a life."""

    OVER = "it has its result"
    STOPPED = "somebody has asked to stop"
    SPENT = "no life is left"
    AGAIN = "another one begins"
    ELSEWHERE = "another owner has it, or will have it"


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


@dataclass(slots=True)
class StopRequests:
    """The requests to stop an owner, counted: the first asks the workers, the second ends them, the third ends heads.

    `timeout`, a shell and a scheduler signal the wrapper and the whole process group, so one request may come several times.
    SIGTERM and SIGHUP ask again only after seconds, and never where workers may be saving: whoever wants more has SIGKILL.

    Attributes:
        count: How many there were; one that asks for an end at once counts as two.
        num_asked: How many there were, each counted once.
        signum: The signal of the last one.
    """

    count: int = 0
    num_asked: int = 0
    signum: int = 0
    _counted_at: float = 0.0

    def ask(self, signum: int, now: float, *, may_save: bool = False) -> bool:
        """Take a signal that asks to stop; return whether it counts.

        Args:
            signum: The signal.
            now: A time that never goes back.
            may_save: Workers may be saving since they were asked.
        """
        since_s = now - self._counted_at
        if signum == AT_ONCE:
            self.count = max(self.count + 1, 2)
            self.signum = self.signum or int(signal.SIGINT)
        elif (
            not self.count
            or (signum == signal.SIGINT and since_s >= AGAIN_AFTER_S)
            or (signum != signal.SIGINT and since_s >= TERM_AGAIN_AFTER_S and not may_save)
        ):
            self.count += 1
            self.signum = int(signum)
        else:
            return False
        self.num_asked += 1
        self._counted_at = now
        return True

    def after_end(self, *, is_whole: bool, is_cancelled: bool) -> WhatFollows:
        """Take that it ended where the owner's place may be taken away, and another one follows: in a pod.

        Args:
            is_whole: It needs nothing more, whoever has asked to stop.
            is_cancelled: A user has asked to stop, not who takes the place away.
        """
        if self.count and not is_whole and not is_cancelled:
            return WhatFollows.ELSEWHERE
        return WhatFollows.OVER


@dataclass(slots=True)
class JobTime:
    """The end of a job's time: warns the workers, then stops them. Times are seconds since 1970.

    Attributes:
        warn_s: How long before the end workers get SIGUSR1; 0 for never.
        ends_at: The end; None where nobody knows it.
        goes_on: Another job may continue the run, so that workers who do not leave are stopped before the end.
        ends_the_run: Nothing else watches the time: the run is stopped when it is over.
        may_ask: The scheduler can be asked on the way and when the time has come: a job that was suspended has more, and a
            limit can be changed.
        was_up: The workers were told of the end.
    """

    warn_s: float
    ends_at: float | None = None
    goes_on: bool = False
    ends_the_run: bool = False
    may_ask: bool = False
    was_up: bool = False
    _steps: list[tuple[float, list[OwnerAction]]] | None = None  # how long before the end, what
    _is_asking: bool = False
    _asked_at: float = 0.0
    _ask_at: float = 0.0

    @property
    def is_done(self) -> bool:
        """Return whether nothing is left to do."""
        return self._steps is not None and not self._steps

    def look(self, now: float) -> list[OwnerAction]:
        """Return what follows now; call it about once a second.

        Where workers are neither warned nor stopped it follows the end alone: a training library watches the time itself.
        """
        actions = self._begin(now) if self._steps is None else []
        if self.ends_at is None or self._is_asking:
            return actions
        while self._steps and now >= self.ends_at - self._steps[0][0]:
            if self._asks(now):
                return [*actions, AskForEnd()]
            left_s, step = self._steps.pop(0)
            if StopWorkers(at_once=False) in step:
                self.may_ask = False  # what has been begun is ended
                # Workers that are stopped late have as long until they are killed.
                late_s = now - (self.ends_at - left_s)
                self._steps = [(after_s - late_s, then) for after_s, then in self._steps]
            self.was_up |= self.warn_s > 0 or self.goes_on
            self._plan_question(now)
            actions += step
        if self._steps and now >= self._ask_at and self._asks(now):
            actions.append(AskForEnd())
        return actions

    def answer(self, ends_at: float | None, now: float) -> list[OwnerAction]:
        """Take what the scheduler says, None where it does not answer; return what follows now."""
        assert self.ends_at is not None
        self._is_asking, self._asked_at = False, now
        moved_s = 0.0 if ends_at is None else ends_at - self.ends_at
        if ends_at is not None and abs(moved_s) >= _MOVED_S:
            self.ends_at = ends_at
        self._plan_question(now)
        actions = self.look(now)
        if self.ends_at != ends_at or not moved_s:
            return actions
        moved = f"the end of the job has moved by {moved_s:+.0f} s"
        return [Say(moved), TellEnd(self.ends_at), *actions]

    def _begin(self, now: float) -> list[OwnerAction]:
        self._steps = []
        if self.ends_at is None:
            unknown = "the end of this job is unknown: the run continues in another job only after SIGUSR1"
            return [Say(unknown)] if self.goes_on else []
        said: list[OwnerAction] = []
        warn_s = self.warn_s
        if 0 < (left_s := self.ends_at - now) < 2 * warn_s:  # else nothing would get done
            said.append(
                Say(f"--warn {warn_s:g}s is too long for a job of {left_s:.0f} s: half of it")
            )
            warn_s = left_s / 2
        if warn_s > 0:
            text = f"the job ends in {warn_s:.0f} s: workers get SIGUSR1 to save and leave"
            self._steps.append((warn_s, [Say(text), Warn()]))
        if self.goes_on:
            stop_s = min(STOP_BEFORE_S, warn_s / 2) if warn_s > 0 else STOP_BEFORE_S
            text = f"the workers did not leave, and the job ends in {stop_s:.0f} s: they are stopped here"
            self._steps.append((stop_s, [Say(text), StopWorkers(at_once=False)]))
            self._steps.append(
                (stop_s - min(KILL_AFTER_S, stop_s / 3), [StopWorkers(at_once=True)])
            )
        elif self.ends_the_run:
            text = "the time limit of the run is over: its workers are stopped"
            self._steps.append((0.0, [Say(text), StopWorkers(at_once=False)]))
        elif not self._steps:
            self._steps.append((0.0, []))
        self._plan_question(now)
        return said

    def _asks(self, now: float) -> bool:
        asks = self.may_ask and now >= self._asked_at + _ASK_EVERY_S
        if asks:
            self._is_asking, self._asked_at = True, now
        return asks

    def _plan_question(self, now: float) -> None:
        """Ask ever more often on the way: after a quarter of what is left."""
        if self.ends_at is None or not self._steps:
            return
        left_s = self.ends_at - self._steps[0][0] - now
        self._ask_at = now + (
            max(_ASK_EVERY_S, left_s / 4) if left_s > 2 * _ASK_EVERY_S else left_s
        )

    def is_up(self, now: float) -> bool:
        """Return whether a worker that leaves now, saved, leaves because of the time."""
        near = self.ends_at is not None and now >= self.ends_at - max(self.warn_s, _NEAR_S)
        return self.was_up or near

    def is_over(self, now: float) -> bool:
        """Return whether a signal that comes now comes because of the time: not a second earlier for a mere warning."""
        return self.was_up if self.ends_at is None else now >= self.ends_at - _CLOCKS_DIFFER_S


@dataclass(slots=True)
class OwnerPolicy:
    """Decides about one thing that is owned: a head, a member, a first pod's run.

    Attributes:
        name: What it is called in sentences, as in `the head of NAME`.
        lives: What its losses cost.
        stops: The requests to its owner: one for all that it owns.
        grace_s: What workers have to end in when they are asked; None where only its silence ends what is owned, as without
            a stop: what else ends it, its owner knows.
    """

    name: str
    lives: Lives
    stops: StopRequests = field(default_factory=StopRequests)
    grace_s: float | None = None
    _heard_at: float = 0.0
    _has_spoken: bool = False
    _say_at: float = 0.0
    _stopped_at: list[float] = field(default_factory=list)

    # One head's life. `now` is of a clock of the owner's own: its pauses (Ctrl-Z, a laptop's sleep) are no silence of the head.

    def begin(self, now: float) -> None:
        """Take that a head has been started."""
        self._heard_at, self._has_spoken, self._say_at = now, False, now + SAY_EVERY_S

    def hear(self, now: float) -> None:
        """Take that the head has said something."""
        self._heard_at, self._has_spoken, self._say_at = now, True, now + SAY_EVERY_S

    def look(self, now: float, state: str | None) -> Say | GiveUp | None:
        """Return what follows now; call it once a second.

        Args:
            now: Of a clock of the owner's own.
            state: Of the head's process, in the words of /proc/PID/stat; None where that is on another machine.
        """
        if self.grace_s is not None:
            self._stopped_at += [now] * (self.stops.num_asked - len(self._stopped_at))
        silent_s, limit_s = now - self._heard_at, self._limit_s(state)
        if is_given_up(silent_s, limit_s, state):
            return GiveUp(f"it was silent for {silent_s:.0f} s and was killed")
        if self._stop_takes_too_long(now):
            return GiveUp("it did not end in time when it was asked to stop, and was killed")
        if now < self._say_at:
            return None
        self._say_at = now + SAY_EVERY_S
        follows = f"after {limit_s:.0f} s it counts as lost"
        if state is not None and not is_given_up(limit_s + 1.0, limit_s, state):
            follows = "its process runs, so muster waits for it"
        return Say(f"the head of {self.name} has been silent for {silent_s:.0f} s; {follows}")

    def _limit_s(self, state: str | None) -> float:
        if self._stopped_at and state is not None:
            return _STOPPED_SILENT_S
        if not self._has_spoken:
            return FIRST_WORD_S
        return FAR_SILENT_S if state is None else SILENT_S

    def _stop_takes_too_long(self, now: float) -> bool:
        stopped = self._stopped_at
        if len(stopped) > 1:
            is_silent = now - self._heard_at > _STOPPED_SILENT_S
            return len(stopped) > 2 or is_silent or now - stopped[1] > _SECOND_STOP_S
        if not stopped or self.grace_s is None:
            return False
        return now - stopped[0] > self.grace_s + _STOP_MARGIN_S

    # The end of a life.

    def after_loss(
        self, *, has_result: bool = False, is_free: bool = False, is_replaced: bool = False
    ) -> WhatFollows:
        """Take that it ended without telling its result; nothing of it may be left.

        Args:
            has_result: The record has its result: its last words were lost.
            is_free: Nothing had begun, so that it costs nothing.
            is_replaced: Another owner has taken over.
        """
        if is_replaced:
            return WhatFollows.ELSEWHERE
        is_stopped = self.stops.count > 0
        return self.lives.after_loss(has_result=has_result, is_stopped=is_stopped, is_free=is_free)
