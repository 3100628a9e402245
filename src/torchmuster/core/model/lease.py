"""Leases: how long a process has been silent, and what follows (`docs/design.md`, rules 13 and 14).

A process that judges a lease counts only time in which it ran itself. So neither a pause of all
processes (a suspended job, a laptop's sleep) nor the delay of an overloaded machine ends a lease.
"""

import time
from collections.abc import Callable

PING_EVERY_S = 2.0
LEASE_S = 10.0
# A silent node's workers kill themselves after `LEASE_S`; the rest allows for the killing.
SILENT_S = 15.0
# A local process that the process table shows running or sleeping is slow, but not for ever.
SLOW_S = 60.0
# A judge checks at least once a second; what a turn takes beyond this was a pause.
MAX_TURN_S = 2.0
# After a pause longer than a lease, a process that was not paused may have replaced us.
PROBATION_S = 5.0
_MORE_THAN_PINGS_BYTES = 1200  # more than the pings of a lease
_AT_ONCE_S = 3.0
_STOPPED = frozenset("Tt")
_STANDING = _STOPPED | frozenset("DZX")


class OwnClock:
    """A clock that counts only time in which this process ran; read it at least once a second.

    Attributes:
        paused_s: The total time for which this process was paused.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.paused_s = 0.0

    def __call__(self) -> float:
        """Return the time; an interval since the last call counts as `MAX_TURN_S` at most."""
        now = self._clock()
        self.paused_s += max(now - self._last - MAX_TURN_S, 0.0)
        self._last = now
        return now - self.paused_s


class Lease:
    """The lease of an agent: the echo of a ping extends it from the moment that ping was sent."""

    def __init__(self, clock: OwnClock) -> None:
        self._clock = clock
        self._from = clock()
        self._paused_s = clock.paused_s
        self._number = 0
        self._sent: dict[int, float] = {}

    def ping(self) -> int:
        """Record that a ping is sent now; return its number."""
        self._look()
        self._number += 1
        self._sent[self._number] = self._clock()
        return self._number

    def renew(self, number: int) -> None:
        """Process the echo of a ping."""
        self._look()
        self._from = max(self._from, self._sent.pop(number, self._from))

    def begin(self) -> None:
        """Restart the lease now."""
        self._look()
        self._from = self._clock()

    def age_s(self) -> float:
        """Return the time since the last proof that the head gets our pings; call every second."""
        self._look()
        return self._clock() - self._from

    def _look(self) -> None:
        """After a long pause accept only the echo of a new ping, and require it soon."""
        now = self._clock()
        if self._clock.paused_s - self._paused_s > LEASE_S:
            self._sent.clear()
            self._from = min(self._from, now - (LEASE_S - PROBATION_S))
        self._paused_s = self._clock.paused_s


def is_stopped(state: str | None) -> bool:
    """Return whether a state from /proc/PID/stat means stopped by a signal or a debugger."""
    return state in _STOPPED


def is_given_up(silent_s: float, limit_s: float, state: str | None) -> bool:
    """Return whether a process that has been silent for this long counts as lost.

    Args:
        silent_s: Silence by the judge's own clock (`OwnClock`).
        limit_s: The lease.
        state: Its process state from /proc/PID/stat, if it is on this machine and no network is
            between; else None. A process that runs or sleeps here is slow, not gone.
    """
    if state is None or state in _STANDING:
        return silent_s > limit_s
    return silent_s > max(SLOW_S, limit_s)


class Stillness:
    """Detects a hung process on this machine, whether it answers pings or is only visible."""

    def __init__(self, clock: OwnClock) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Start again: the process was started or has answered."""
        self._alive_at = self._clock()

    def is_lost(self, state: str, *, answers: bool) -> bool:
        """Return whether the process counts as lost; call it once a second.

        Args:
            state: Its state in the process table.
            answers: It is expected to answer pings now. While it imports torch from a slow disk or
                serves others it is not: then only a stopped process counts as hung.
        """
        if not answers and state not in _STOPPED:
            self.begin()
        return is_given_up(self._clock() - self._alive_at, LEASE_S, state)


def large_packets_lost(stuck_bytes: int, since_s: float) -> str | None:
    """Return the end of a sentence about a path that drops large packets, if a lost lease shows it.

    Args:
        stuck_bytes: Bytes that the connection with the lost lease had not delivered.
        since_s: Time to open a new connection; a quick one shows that small packets pass.
    """
    if stuck_bytes < _MORE_THAN_PINGS_BYTES or since_s > _AT_ONCE_S:
        return None
    return (
        f"large packets seem not to pass: {stuck_bytes} bytes did not arrive in {LEASE_S:.0f} s, while a new connection"
        " is established at once (an MTU too large for the path? `ip link` shows that of each interface)"
    )
