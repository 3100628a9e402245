"""The end of a job's time: when the workers hear of it, and when the head stops them itself."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

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
