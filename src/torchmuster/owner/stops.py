"""The requests to stop an owner, counted: the first asks the workers, the second ends them, the third the heads.

`timeout`, a shell and a scheduler signal the wrapper and the whole process group, so one request may come several times. SIGTERM
and SIGHUP ask again only after seconds, and never where workers may be saving: whoever wants more has SIGKILL.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable

from torchmuster.model.stop import (
    AGAIN_AFTER_S,
    AT_ONCE,
    TERM_AGAIN_AFTER_S,
    StopCause,
    cause_of_stop,
)
from torchmuster.net import messages
from torchmuster.owner.session import hangup_ignored


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
