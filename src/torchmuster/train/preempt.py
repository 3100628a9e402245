"""Preemption: a signal or a time limit becomes one step at which all ranks stop, saved.

No collective and no traffic in a quiet step. A thread in each rank listens; when any rank is asked to
stop, it says so in the store, and then

    each rank     promises a ceiling: a boundary it will not pass before the decision. That is the
                  boundary it stands at (waiting for data, or evaluating), or the next one
    rank 0        takes the highest ceiling as the decision: no rank has passed it, all can reach it
    each rank     stops at that boundary

A rank that has reached its ceiling waits; the others need nothing of it before they reach theirs, for
the ceilings differ by one step at most and the decision is the higher.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchmuster.train.workers import STOP_SIGNALS

_POLL_S = 0.2
_SAY_AFTER_S = 5.0
_LISTENED = (signal.SIGTERM, signal.SIGUSR1)
_PREFIX = "muster/stop"


class StopNow(BaseException):
    """Raised in the main thread where it waits for data; not an Exception, so nothing eats it."""


class StopWatch:
    """Listens for requests to stop, and agrees with the other ranks on where.

    Attributes:
        reason: Why the run stops, once it is decided.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        deadline: Callable[[], float | None],
        say: Callable[[str], None],
    ) -> None:
        """Only store.

        Args:
            store: A connection of its own: the thread and the loop must not wait for each other.
            rank: Of this process.
            world_size: Number of ranks.
            deadline: Returns the time (`time.time()`) at which to stop by ourselves, or None.
            say: Prints a line.
        """
        self.reason = ""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._deadline = deadline
        self._say = say
        self._lock = threading.Condition()
        self._step = 0
        self._parked = False
        self._interruptible = False
        self._ceiling: int | None = None
        self._decision: int | None = None
        self._request = ""
        self._published = False
        self._over = threading.Event()
        self._old_handlers: dict[int, Any] = {}
        self._old_wakeup_fd = -1
        self._wakeup_r, self._wakeup_w = -1, -1
        self._thread = threading.Thread(target=self._listen, name="muster-stop", daemon=True)

    def begin(self, step: int) -> None:
        """Begin to listen, standing at boundary `step`; from the main thread only."""
        self._step = step
        self._wakeup_r, self._wakeup_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for signum in _LISTENED:
            self._old_handlers[signum] = signal.signal(signum, self._take_signal)
        # The C part of the handler writes here at once, also while the main thread is in a collective.
        self._old_wakeup_fd = signal.set_wakeup_fd(self._wakeup_w, warn_on_full_buffer=False)
        self._thread.start()

    def close(self) -> None:
        """Give the signals back."""
        if self._wakeup_r < 0:
            return
        self._over.set()
        signal.set_wakeup_fd(self._old_wakeup_fd)
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        self._thread.join(timeout=5.0)
        os.close(self._wakeup_r)
        os.close(self._wakeup_w)
        self._wakeup_r = -1

    def request(self, reason: str) -> None:
        """Ask all ranks to stop, from any thread."""
        self._request = self._request or reason

    # The main thread.

    def must_stop(self, step: int) -> bool:
        """Note that `step` steps are done; say whether this is where all ranks stop.

        Waits for the decision when this boundary is the ceiling that was promised.
        """
        with self._lock:
            self._step = step
            self._parked = False
            began, said = time.monotonic(), False
            while self._ceiling is not None and self._decision is None and step >= self._ceiling:
                self._lock.wait(1.0)
                if not said and time.monotonic() - began > _SAY_AFTER_S:
                    said = True
                    self._say(
                        f"rank {self._rank} waits at step {step} for the ranks that are behind"
                    )
            return self._decision is not None and step >= self._decision

    @contextmanager
    def parked(self, *, interruptible: bool) -> Iterator[None]:
        """In the body, the main thread waits at the boundary that it reached last."""
        with self._lock:
            self._parked = True
        self._interruptible = interruptible
        try:
            yield
        finally:
            self._interruptible = False

    @property
    def decided_here(self) -> bool:
        """Whether all ranks stop at the boundary that the main thread stands at."""
        return self._decision is not None and self._step >= self._decision

    def unpark(self) -> bool:
        """Go on from the boundary, e.g. into a collective; True when all ranks stop here instead."""
        return self.must_stop(self._step)

    def _take_signal(self, signum: int, frame: Any) -> None:
        if self._interruptible and self.decided_here:
            self._interruptible = False
            raise StopNow
        if self._decision is not None:
            return  # our own thread's, a moment too late, or one request more
        self._request = self._request or signal.Signals(signum).name
        old = self._old_handlers.get(signum)
        if callable(old) and old is not signal.default_int_handler:
            old(signum, frame)

    # The thread.

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the main thread takes them
        while not self._over.is_set():
            try:
                self._look()
            except RuntimeError:  # the store has gone, and the attempt with it
                return
            if self._decision is not None:
                self._wake_main()
                return
            self._read_wakeups()

    def _read_wakeups(self) -> None:
        ready, _, _ = select.select([self._wakeup_r], [], [], _POLL_S)
        if ready:
            for number in os.read(self._wakeup_r, 64):
                if number in _LISTENED:
                    self._request = self._request or signal.Signals(number).name

    def _look(self) -> None:
        deadline = self._deadline()
        if deadline is not None and time.time() >= deadline:
            self.request("the time limit is near")
        if self._request and not self._published:
            self._published = True
            self._store.compare_set(
                f"{_PREFIX}/request", "", f"{self._request} on rank {self._rank}"
            )
        if self._ceiling is None and self._store.check([f"{_PREFIX}/request"]):
            self.reason = self._store.get(f"{_PREFIX}/request").decode()
            self._promise()
        if self._ceiling is not None:
            self._decide()

    def _promise(self) -> None:
        with self._lock:
            self._ceiling = self._step if self._parked else self._step + 1
        self._store.set(f"{_PREFIX}/ceiling/{self._rank}", str(self._ceiling))

    def _decide(self) -> None:
        keys = [f"{_PREFIX}/ceiling/{rank}" for rank in range(self._world_size)]
        if self._rank == 0 and self._store.check(keys):
            highest = max(int(self._store.get(key)) for key in keys)
            self._store.set(f"{_PREFIX}/decision", str(highest))
            self._say(f"stopping after step {highest}: {self.reason}")
        if self._store.check([f"{_PREFIX}/decision"]):
            decision = int(self._store.get(f"{_PREFIX}/decision"))
            with self._lock:
                self._decision = decision
                self._lock.notify_all()

    def _wake_main(self) -> None:
        """Interrupt a wait for data; again and again, for one signal may come too early."""
        while not self._over.wait(_POLL_S):
            with self._lock:
                due = self.decided_here and self._interruptible
            if due:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
