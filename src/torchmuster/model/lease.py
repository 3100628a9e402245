"""Leases: who has been silent for how long, and what follows (`docs/design.md`, rules 13 and 14).

A judge counts only time in which it ran itself. So a pause that everybody shares (a suspended job, a laptop's sleep) and
the delay of an overloaded machine cost nobody his lease.
"""

import time
from collections.abc import Callable

PING_EVERY_S = 2.0
LEASE_S = 10.0
# A silent node's workers kill themselves after `LEASE_S`; the rest is the time that the killing may take.
SILENT_S = 15.0
# Who is seen to run or to sleep in the process table of this machine is only slow, but not for ever.
SLOW_S = 60.0
# A judge looks at least once a second; what a longer turn takes beyond this was a pause.
MAX_TURN_S = 2.0
# Behind a pause longer than a lease somebody who was not paused may have replaced us.
PROBATION_S = 5.0
_MORE_THAN_PINGS_BYTES = 1200  # the pings of a lease take less
_AT_ONCE_S = 3.0
_STOPPED = frozenset("Tt")
_STANDING = _STOPPED | frozenset("DZX")


class OwnClock:
    """Seconds in which this process ran, for who asks at least once a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._paused_s = 0.0

    def __call__(self) -> float:
        """Return the time; what passed since the last call counts as `MAX_TURN_S` at most."""
        now = self._clock()
        self._paused_s += max(now - self._last - MAX_TURN_S, 0.0)
        self._last = now
        return now - self._paused_s

    @property
    def paused_s(self) -> float:
        """Return how long this process has stood still."""
        return self._paused_s


class Lease:
    """What an agent holds: prolonged by the echo of its own pings, counted from the moment that each was sent."""

    def __init__(self, clock: OwnClock) -> None:
        self._clock = clock
        self._from = clock()
        self._paused_s = clock.paused_s
        self._number = 0
        self._sent: dict[int, float] = {}

    def ping(self) -> int:
        """Note that a ping is sent now; return its number."""
        self._look()
        self._number += 1
        self._sent[self._number] = self._clock()
        return self._number

    def renew(self, number: int) -> None:
        """Take the echo of a ping."""
        self._look()
        self._from = max(self._from, self._sent.pop(number, self._from))

    def begin(self) -> None:
        """Count from now on."""
        self._look()
        self._from = self._clock()

    def age_s(self) -> float:
        """Return how old the last proof is that the head hears us; ask once a second."""
        self._look()
        return self._clock() - self._from

    def _look(self) -> None:
        """Behind a long pause only the echo of a new ping counts, and has to come soon."""
        now = self._clock()
        if self._clock.paused_s - self._paused_s > LEASE_S:
            self._sent.clear()
            self._from = min(self._from, now - (LEASE_S - PROBATION_S))
        self._paused_s = self._clock.paused_s


def is_given_up(silent_s: float, limit_s: float, state: str | None) -> bool:
    """Say whether who has been silent for so long is given up.

    Args:
        silent_s: Counted by a clock of the judge's own (`OwnClock`).
        limit_s: The lease.
        state: The state of its process, in the words of /proc/PID/stat, where that is this machine's and reached without a
            network; None elsewhere. Who runs or sleeps there is slow, not gone.
    """
    if state is None or state in _STANDING:
        return silent_s > limit_s
    return silent_s > max(SLOW_S, limit_s)


class Stillness:
    """Whether a process of this machine stands still: one that answers pings, or one that is only seen."""

    def __init__(self, clock: OwnClock) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Count from now on: it has been started, or has answered."""
        self._alive_at = self._clock()

    def is_lost(self, state: str, *, answers: bool) -> bool:
        """Say whether it is given up; ask once a second.

        Args:
            state: From the process table.
            answers: It is expected to answer pings now. Who imports torch from a slow disk, or serves others, is not:
                only being stopped is standing still then.
        """
        if not answers and state not in _STOPPED:
            self.begin()
        return is_given_up(self._clock() - self._alive_at, LEASE_S, state)


def large_packets_lost(stuck_bytes: int, since_s: float) -> str | None:
    """Return the half of a sentence that names a path for small packets only, when the end of a lease shows one.

    Args:
        stuck_bytes: What a connection whose lease has ended had not brought to the other machine.
        since_s: After how long a new connection stood. One that stands at once shows that small packets pass.
    """
    if stuck_bytes < _MORE_THAN_PINGS_BYTES or since_s > _AT_ONCE_S:
        return None
    return (
        f"large packets seem not to pass: {stuck_bytes} bytes did not arrive in {LEASE_S:.0f} s, while a new connection"
        " stands at once (an MTU too large for the path? `ip link` shows that of each interface)"
    )
