"""The decisions of an owner, the same for every owner; pure, with the time as an argument.

An owner starts something (a head of a run or of a group, a member of a sweep, the agents in pods),
follows it to its end and writes the one result. `StopRequests` counts requests to stop, `JobTime`
follows the end of the job's time, and `RestartBudget` decides what a loss costs. `OwnerPolicy` combines
them for one owned thing.
"""

import signal
from dataclasses import dataclass, field
from enum import Enum

from torchmuster.core.model.lease import SILENT_S, is_given_up
from torchmuster.core.model.verdict import AGAIN_AFTER_S, AT_ONCE, TERM_AGAIN_AFTER_S

SAY_EVERY_S = 5.0
FIRST_WORD_S = 30.0  # a head that starts along with many others is slow
FAR_SILENT_S = 20.0  # an ssh connection may stall that long
_STOPPED_SILENT_S = 5.0
_SECOND_STOP_S = 3.0
_STOP_MARGIN_S = 30.0  # for ending workers, and the lease of a node lost meanwhile

STOP_BEFORE_S = 15.0  # before the job's end: time for the next link's requeue or submission
KILL_AFTER_S = 5.0
_NEAR_S = 90.0  # the training library keeps a minute back for its last save
_CLOCKS_DIFFER_S = 3.0  # between the scheduler's clock and ours
_MOVED_S = 60.0  # smaller changes don't count
_ASK_EVERY_S = 60.0


# Actions of an owner.


@dataclass(frozen=True, slots=True)
class Say:
    """Print a sentence for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the workers to save and leave: the time is nearly over."""


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Stop the workers because the time is over: politely, or at once."""

    at_once: bool


@dataclass(frozen=True, slots=True)
class AskForEnd:
    """Ask the scheduler when the job ends; its reply goes to `JobTime.answer`."""


@dataclass(frozen=True, slots=True)
class TellEnd:
    """Tell the workers that the end of the job has moved."""

    ends_at: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the head, because it is silent or does not end when asked."""

    why: str


OwnerAction = Say | Warn | StopWorkers | AskForEnd | TellEnd | GiveUp


class AfterLoss(Enum):
    """What follows after a life has ended."""

    OVER = "it has its result"
    STOPPED = "somebody has asked to stop"
    SPENT = "no life is left"
    AGAIN = "another one begins"
    ELSEWHERE = "another owner has it, or will have it"


@dataclass(slots=True)
class RestartBudget:
    """Counts how often an owner may restart what it owns.

    Attributes:
        most: How many losses are followed by a restart.
        spent: How many restarts have been used up.
        lost: All losses, including those that cost nothing.
    """

    most: int
    spent: int = 0
    lost: int = 0

    @property
    def left(self) -> int:
        """Return how many restarts are left."""
        return max(0, self.most - self.spent)

    def after_loss(
        self, *, has_result: bool = False, is_stopped: bool = False, is_free: bool = False
    ) -> AfterLoss:
        """Count a loss; return what follows.

        Args:
            has_result: It had ended with a result in the record; only its last message was lost.
            is_stopped: A stop was requested: start nothing more.
            is_free: It had not begun anything, so the restart is free.
        """
        if has_result:
            return AfterLoss.OVER
        if is_stopped:
            return AfterLoss.STOPPED
        if not is_free and not self.left:
            return AfterLoss.SPENT
        self.spent += not is_free
        self.lost += 1
        return AfterLoss.AGAIN


@dataclass(slots=True)
class StopRequests:
    """Counts stop requests: the first asks the workers, the second ends them, the third ends heads.

    `timeout`, a shell and a scheduler signal both the wrapper and the whole process group, so one
    request may arrive several times. A repeated SIGTERM or SIGHUP counts only after seconds, and
    never while workers may be saving: SIGKILL remains for more.

    Attributes:
        count: Number of requests; an immediate one counts as two.
        num_asked: Number of requests, each counted once.
        signum: The signal of the last one.
    """

    count: int = 0
    num_asked: int = 0
    signum: int = 0
    _counted_at: float = 0.0

    def ask(self, signum: int, now: float, *, may_save: bool = False) -> bool:
        """Handle a signal that requests a stop; return whether it counts.

        Args:
            signum: The signal.
            now: Monotonic time.
            may_save: Workers may have been saving since the last request.
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

    def after_end(self, *, is_whole: bool, is_cancelled: bool) -> AfterLoss:
        """Return what follows an end in a pod: another owner continues if the pod was removed.

        Args:
            is_whole: It is complete, whatever requested the stop.
            is_cancelled: A user requested the stop, not the system that removes the pod.
        """
        if self.count and not is_whole and not is_cancelled:
            return AfterLoss.ELSEWHERE
        return AfterLoss.OVER


@dataclass(slots=True)
class JobTime:
    """The end of a job's time: warns the workers, then stops them. Times are seconds since 1970.

    Attributes:
        warn_s: How long before the end workers get SIGUSR1; 0 for never.
        ends_at: The end; None if unknown.
        goes_on: Another job may continue the run, so workers that don't leave are stopped before
            the end.
        ends_the_run: Nothing else enforces the time: the run is stopped at its end.
        may_ask: The scheduler may be asked again, on the way and at the end: a suspended job gets
            more time, and a limit can be changed.
        was_up: The workers have been told about the end.
    """

    warn_s: float
    ends_at: float | None = None
    goes_on: bool = False
    ends_the_run: bool = False
    may_ask: bool = False
    was_up: bool = False
    _steps: list[tuple[float, list[OwnerAction]]] | None = None  # (seconds before the end, actions)
    _is_asking: bool = False
    _asked_at: float = 0.0
    _ask_at: float = 0.0

    @property
    def is_done(self) -> bool:
        """Return whether no step is left."""
        return self._steps is not None and not self._steps

    def look(self, now: float) -> list[OwnerAction]:
        """Return the actions due now; call it about once a second.

        If workers are neither warned nor stopped, it only tracks the end: a training library
        watches the time itself.
        """
        actions = self._begin(now) if self._steps is None else []
        if self.ends_at is None or self._is_asking:
            return actions
        while self._steps and now >= self.ends_at - self._steps[0][0]:
            if self._asks(now):
                return [*actions, AskForEnd()]
            left_s, step = self._steps.pop(0)
            if StopWorkers(at_once=False) in step:
                self.may_ask = False  # a stop that has begun is completed
                # Workers that are stopped late get the same time until they are killed.
                late_s = now - (self.ends_at - left_s)
                self._steps = [(after_s - late_s, then) for after_s, then in self._steps]
            self.was_up |= self.warn_s > 0 or self.goes_on
            self._plan_question(now)
            actions += step
        if self._steps and now >= self._ask_at and self._asks(now):
            actions.append(AskForEnd())
        return actions

    def answer(self, ends_at: float | None, now: float) -> list[OwnerAction]:
        """Handle the scheduler's reply, None without one; return the actions due now."""
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
        if 0 < (left_s := self.ends_at - now) < 2 * warn_s:  # else no time would be left for work
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
        """Schedule the next question, after a quarter of the remaining time."""
        if self.ends_at is None or not self._steps:
            return
        left_s = self.ends_at - self._steps[0][0] - now
        self._ask_at = now + (
            max(_ASK_EVERY_S, left_s / 4) if left_s > 2 * _ASK_EVERY_S else left_s
        )

    def is_up(self, now: float) -> bool:
        """Return whether a worker that saves and leaves now does so because of the time."""
        near = self.ends_at is not None and now >= self.ends_at - max(self.warn_s, _NEAR_S)
        return self.was_up or near

    def is_over(self, now: float) -> bool:
        """Return whether a signal now is due to the time; having warned alone is not enough."""
        return self.was_up if self.ends_at is None else now >= self.ends_at - _CLOCKS_DIFFER_S


@dataclass(slots=True)
class OwnerPolicy:
    """Decides about one owned thing: a head, a member, a first pod's run.

    Attributes:
        name: Its name in sentences, as in `the head of NAME`.
        lives: Its remaining restarts.
        stops: The stop requests to its owner, shared by all that it owns.
        grace_s: How long workers have to end when asked; None: only silence ends it, and the owner
            handles everything else.
    """

    name: str
    lives: RestartBudget
    stops: StopRequests = field(default_factory=StopRequests)
    grace_s: float | None = None
    _heard_at: float = 0.0
    _has_spoken: bool = False
    _say_at: float = 0.0
    _stopped_at: list[float] = field(default_factory=list)

    # One head's life. `now` is read from the owner's own clock: its pauses (Ctrl-Z, a laptop's
    # sleep) don't count as silence of the head.

    def begin(self, now: float) -> None:
        """Note that a head has been started."""
        self._heard_at, self._has_spoken, self._say_at = now, False, now + SAY_EVERY_S

    def hear(self, now: float) -> None:
        """Note a message from the head."""
        self._heard_at, self._has_spoken, self._say_at = now, True, now + SAY_EVERY_S

    def look(self, now: float, state: str | None) -> Say | GiveUp | None:
        """Return the action due now; call it once a second.

        Args:
            now: Time by the owner's own clock.
            state: State of the head's process from /proc/PID/stat; None if on another machine.
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
    ) -> AfterLoss:
        """Handle an end without a reported result; nothing of it may be left.

        Args:
            has_result: The record has its result: only its last message was lost.
            is_free: It had not begun anything, so the restart is free.
            is_replaced: Another owner has taken over.
        """
        if is_replaced:
            return AfterLoss.ELSEWHERE
        is_stopped = self.stops.count > 0
        return self.lives.after_loss(has_result=has_result, is_stopped=is_stopped, is_free=is_free)
