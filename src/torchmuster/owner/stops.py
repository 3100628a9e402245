"""The requests to stop an owner, counted: the first asks the workers, the second ends them, the third the heads.

`timeout`, a shell and a scheduler signal the wrapper and the whole process group, so one request may come several times. SIGTERM
and SIGHUP ask again only after seconds, and never where workers may be saving: whoever wants more has SIGKILL.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchmuster.model.stop import (
    AGAIN_AFTER_S,
    AT_ONCE,
    TERM_AGAIN_AFTER_S,
    StopCause,
    cause_of_stop,
)
from torchmuster.net import messages
from torchmuster.owner.session import hangup_ignored

# The end of a job's time: when the workers hear of it, and when the head stops them itself.


STOP_BEFORE_S = 15.0  # what the next link's requeue or submission may take
KILL_AFTER_S = 5.0
_NEAR_S = 90.0  # the training library keeps a minute back for its last save
_CLOCKS_DIFFER_S = 3.0  # the scheduler counts in seconds of its own
_MOVED_S = 60.0  # less is no move
_ASK_EVERY_S = 60.0
LAST_STOP = "the time of the job is over"


@dataclass(slots=True)
class Deadline:
    """Watches the clock of one job.

    Attributes:
        warn_s: How long before the end workers get SIGUSR1; 0 for never.
        ends_at: The end, seconds since 1970; None where the job's environment does not say.
        ask: Asks the scheduler for that end, where the environment has none.
        ask_again: Asks it on the way and when the time has come, from any thread: a job that was suspended has more, and a limit can be changed.
        moved: Called with an end that has moved.
        goes_on: Another job may continue the run, so that workers who do not leave are stopped before the end.
        ends_the_run: Nothing else watches the time: the run is stopped when it is over.
        was_up: The workers were told of the end.
    """

    warn_s: float
    ends_at: float | None = None
    ask: Callable[[], float | None] | None = None
    ask_again: Callable[[], float | None] | None = None
    moved: Callable[[float], None] = lambda _: None
    goes_on: bool = False
    ends_the_run: bool = False
    was_up: bool = False
    _asked_at: float = 0.0

    def find_out(self) -> None:
        """Ask for the end where it is not known: a warning needs it, and a signal that comes then is the time limit.

        Not while the agents are watched: whatever else this process has started then is ended as an orphan.
        """
        if self.ends_at is None and self.ask is not None:
            self.ends_at = self.ask()

    async def watch(
        self,
        say: Callable[[str], None],
        warn: Callable[[], None],
        stop: Callable[[bool], None],
    ) -> None:
        """Warn, then stop: `stop(False)` asks the workers, `stop(True)` ends them at once.

        Where neither is wanted it follows the end alone: a training library watches the time itself.
        """
        if self.ends_at is None:
            if self.goes_on:
                say(
                    "the end of this job is unknown: the run continues in another job only after SIGUSR1"
                )
            return
        warn_s = self._shorten(self.ends_at - time.time(), say)
        if warn_s > 0:
            await self._wait_until(warn_s, say)
            self.was_up = True
            say(f"the job ends in {warn_s:.0f} s: workers get SIGUSR1 to save and leave")
            warn()
        if self.goes_on:
            await self._stop_before_the_end(warn_s, say, stop)
        elif self.ends_the_run:
            await self._wait_until(0.0, say)
            say("the time limit of the run is over: its workers are stopped")
            stop(False)
        elif self.warn_s <= 0:
            await self._wait_until(0.0, say)

    async def _stop_before_the_end(
        self, warn_s: float, say: Callable[[str], None], stop: Callable[[bool], None]
    ) -> None:
        left_s = min(STOP_BEFORE_S, warn_s / 2) if warn_s > 0 else STOP_BEFORE_S
        await self._wait_until(left_s, say)
        self.was_up = True
        say(f"the workers did not leave, and the job ends in {left_s:.0f} s: they are stopped here")
        stop(False)
        await asyncio.sleep(min(KILL_AFTER_S, left_s / 3))
        stop(True)

    async def _wait_until(self, left_s: float, say: Callable[[str], None]) -> None:
        """Wait until so long before the end, by the scheduler's clock."""
        assert self.ends_at is not None
        while True:
            pause_s = max(0.0, self.ends_at - left_s - time.time())
            if self.ask_again is not None and pause_s > 2 * _ASK_EVERY_S:
                pause_s = max(_ASK_EVERY_S, pause_s / 4)
            await asyncio.sleep(pause_s)
            now = time.time()
            end = None
            if self.ask_again is not None and now >= self._asked_at + _ASK_EVERY_S:
                self._asked_at = now
                end = await asyncio.to_thread(self.ask_again)
            if end is not None and abs(end - self.ends_at) >= _MOVED_S:
                say(f"the end of the job has moved by {end - self.ends_at:+.0f} s")
                self.ends_at = end
                self.moved(end)
            elif now >= self.ends_at - left_s:
                return

    def _shorten(self, left_s: float, say: Callable[[str], None]) -> float:
        """Return the warning's time, at most half of what is left: else nothing would get done."""
        if 0 < left_s < 2 * self.warn_s:
            say(f"--warn {self.warn_s:g}s is too long for a job of {left_s:.0f} s: half of it")
            return left_s / 2
        return self.warn_s

    def is_up(self, now: float | None = None) -> bool:
        """Say whether a worker that leaves now, saved, leaves because of the time."""
        now = time.time() if now is None else now
        near = self.ends_at is not None and now >= self.ends_at - max(self.warn_s, _NEAR_S)
        return self.was_up or near

    def is_over(self, now: float | None = None) -> bool:
        """Say whether a signal that comes now comes because of the time: not a second earlier for a mere warning."""
        if self.ends_at is None:
            return self.was_up
        return (time.time() if now is None else now) >= self.ends_at - _CLOCKS_DIFFER_S


class EarlyStop:
    """A signal that asks to stop before the owner's loop listens: workers that have just begun get their grace too.

    Attributes:
        signum: The first that came; 0 for none.
    """

    def __init__(self) -> None:
        self.signum = 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._take)

    def _take(self, signum: int, _: object) -> None:
        self.signum = self.signum or signum


class Stops:
    """How often an owner was asked to stop.

    Args:
        judge: Returns who asked, from the signal.
        may_save: Returns whether workers may be saving since they were asked.
        clock: Returns a time that never goes back.

    Attributes:
        count: How often.
        signum: By which signal the last time.
    """

    def __init__(
        self,
        judge: Callable[[int], StopCause] = cause_of_stop,
        may_save: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = 0
        self.signum = 0
        self._judge = judge
        self._may_save = may_save
        self._clock = clock
        self._counted_at = 0.0
        self._is_deaf_to_sigint = False

    def listen(self, taken: Callable[[], None], early: EarlyStop | None = None) -> None:
        """Take the signals from now on, in the event loop, and that which came early; `taken` is called after each that counts."""
        self._is_deaf_to_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, AT_ONCE):
            if signum == signal.SIGHUP and hangup_ignored():
                continue
            asyncio.get_running_loop().add_signal_handler(signum, self._take, signum, taken)
        if early is not None and early.signum:
            os.kill(os.getpid(), early.signum)

    def _take(self, signum: int, taken: Callable[[], None]) -> None:
        now = self._clock()
        if signum == signal.SIGINT:
            insists = now - self._counted_at >= AGAIN_AFTER_S
        else:
            insists = now - self._counted_at >= TERM_AGAIN_AFTER_S and not self._may_save()
        if signum == AT_ONCE:
            self.count = max(self.count + 1, 2)
            self.signum = self.signum or int(signal.SIGINT)
        elif insists or not self.count:
            self.count += 1
            self.signum = int(signum)
        else:
            return
        self._counted_at = now
        taken()

    @property
    def cause(self) -> StopCause:
        """Return who asked the last time, as it is known now."""
        return self._judge(self.signum)

    def message(self) -> messages.Stop | None:
        """Return what a head is told; None while nobody has asked."""
        if not self.count:
            return None
        signum, cause = self.signum, self.cause
        if self._is_deaf_to_sigint and signum == signal.SIGINT:
            signum = int(signal.SIGTERM)  # a background job of a shell: its workers ignore it, too
        who = "SIGTERM or `muster cancel`" if cause is StopCause.OUTSIDE else ""
        return messages.Stop(signum=signum, at_once=self.count > 1, cause=cause, who=who)
