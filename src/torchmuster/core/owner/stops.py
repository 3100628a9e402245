"""Stop signals to an owner and the time of its job, for `core/model/owner_policy.py`."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster.core.model.owner_policy import AskForEnd, JobTime, OwnerAction, StopRequests
from torchmuster.core.model.verdict import AT_ONCE, StopCause, cause_of_stop
from torchmuster.core.net import messages
from torchmuster.core.owner.session import EarlyStop, hangup_ignored

LAST_STOP = "the time of the job is over"
_LOOK_EVERY_S = 1.0


@dataclass(slots=True)
class Deadline:
    """Watches the time of one job.

    Attributes:
        limit: Decides which actions are due.
        ask: Asks the scheduler for the end if the environment has none.
        ask_again: Asks it on the way and at the end, from any thread.
    """

    limit: JobTime
    ask: Callable[[], float | None] | None = None
    ask_again: Callable[[], float | None] | None = None

    def find_out(self) -> None:
        """Ask for an unknown end: a warning needs it, and it explains a later signal.

        Don't call it while agents are watched: other children of this process are then ended as
        orphans.
        """
        if self.limit.ends_at is None and self.ask is not None:
            self.limit.ends_at = self.ask()

    async def watch(self, act: Callable[[OwnerAction], None]) -> None:
        """Carry out the actions that are due, until the end of the time."""
        limit = self.limit
        limit.may_ask = self.ask_again is not None
        while not limit.is_done:
            for action in limit.look(time.time()):
                if not isinstance(action, AskForEnd):
                    act(action)
                elif self.ask_again is not None:
                    end = await asyncio.to_thread(self.ask_again)
                    for follows in limit.answer(end, time.time()):
                        act(follows)
            await asyncio.sleep(_LOOK_EVERY_S)

    def is_up(self) -> bool:
        """Return whether a worker that saves and leaves now does so because of the time."""
        return self.limit.is_up(time.time())

    def is_over(self) -> bool:
        """Return whether a signal now is due to the time."""
        return self.limit.is_over(time.time())


@dataclass(slots=True)
class Stops:
    """Counts the stop signals to an owner.

    Attributes:
        judge: Returns the origin of a stop from its signal.
        may_save: Returns whether workers may have been saving since they were asked.
        clock: Returns monotonic time.
        requests: The stop requests so far.
    """

    judge: Callable[[int], StopCause] = cause_of_stop
    may_save: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    requests: StopRequests = field(default_factory=StopRequests)
    _is_deaf_to_sigint: bool = False

    def listen(self, taken: Callable[[], None], early: EarlyStop | None = None) -> None:
        """Handle stop signals in the event loop, also an early one; call `taken` if one counts."""
        self._is_deaf_to_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, AT_ONCE):
            if signum == signal.SIGHUP and hangup_ignored():
                continue
            asyncio.get_running_loop().add_signal_handler(signum, self._take, signum, taken)
        if early is not None and early.signum:
            os.kill(os.getpid(), early.signum)

    def _take(self, signum: int, taken: Callable[[], None]) -> None:
        if self.requests.ask(signum, self.clock(), may_save=self.may_save()):
            taken()

    @property
    def count(self) -> int:
        """Return the number of requests; an immediate one counts as two."""
        return self.requests.count

    @property
    def signum(self) -> int:
        """Return the signal of the last request; 0 for none."""
        return self.requests.signum

    @property
    def cause(self) -> StopCause:
        """Return the origin of the last request, as far as known now."""
        return self.judge(self.signum)

    def message(self) -> messages.Stop | None:
        """Return the message for a head; None without a request."""
        if not self.count:
            return None
        signum, cause = self.signum, self.cause
        if self._is_deaf_to_sigint and signum == signal.SIGINT:
            signum = int(signal.SIGTERM)  # a shell's background job: its workers ignore SIGINT, too
        who = "SIGTERM or `muster cancel`" if cause is StopCause.OUTSIDE else ""
        return messages.Stop(signum=signum, at_once=self.count > 1, cause=cause, who=who)
