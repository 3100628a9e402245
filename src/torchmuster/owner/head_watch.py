"""Whether the head still answers its owner, and what follows when it does not: pure, the clock is an argument.

The owner asks once a second. Its own pauses (Ctrl-Z, a laptop's sleep) are no silence of the head.
"""

from dataclasses import dataclass

from torchmuster.model.liveness.lease import SILENT_S, OwnClock, is_given_up

SAY_EVERY_S = 5.0
FIRST_WORD_S = 30.0  # a head that starts beside many others takes its time
FAR_SILENT_S = 20.0  # as long as an ssh connection may stall
_STOPPED_SILENT_S = 5.0
_SECOND_STOP_S = 3.0
_STOP_MARGIN_S = 30.0  # for the ends of workers, and the lease of a node that was lost meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLook:
    """What one look at the head has shown.

    Attributes:
        say: A sentence for the user.
        given_up: Why the head is ended now.
    """

    say: str | None = None
    given_up: str | None = None


class HeadWatch:
    """Counts the silence of one head after the other, and the stops that were asked for."""

    def __init__(self, clock: OwnClock, node: str, grace_s: float | None) -> None:
        self._clock = clock
        self._node = node
        self._grace_s = grace_s
        self._stops: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Count from now on: a head has been started."""
        self._heard_at = self._clock()
        self._has_spoken = False
        self._say_at = self._heard_at + SAY_EVERY_S

    def hear(self) -> None:
        """Note that the head has said something."""
        self._heard_at = self._clock()
        self._has_spoken = True
        self._say_at = self._heard_at + SAY_EVERY_S

    def stop(self) -> None:
        """Note that somebody has asked to stop."""
        self._stops.append(self._clock())

    def look(self, state: str | None) -> HeadLook:
        """Say what follows now; `state` is that of the head's process, None where it is on another machine."""
        now = self._clock()
        silent_s = now - self._heard_at
        limit_s = self._limit_s(state)
        if is_given_up(silent_s, limit_s, state):
            return HeadLook(given_up=f"it was silent for {silent_s:.0f} s and was killed")
        if self._stop_takes_too_long(now):
            return HeadLook(
                given_up="it did not end in time when it was asked to stop, and was killed"
            )
        if now < self._say_at:
            return HeadLook()
        self._say_at = now + SAY_EVERY_S
        return HeadLook(
            say=f"the head of {self._node} has been silent for {silent_s:.0f} s;"
            f" {self._what_follows(state, limit_s)}"
        )

    def _limit_s(self, state: str | None) -> float:
        if self._stops and state is not None:
            return _STOPPED_SILENT_S
        if not self._has_spoken:
            return FIRST_WORD_S
        return FAR_SILENT_S if state is None else SILENT_S

    def _what_follows(self, state: str | None, limit_s: float) -> str:
        if state is not None and not is_given_up(limit_s + 1.0, limit_s, state):
            return "its process runs, so muster waits for it"
        return f"after {limit_s:.0f} s it counts as lost"

    def _stop_takes_too_long(self, now: float) -> bool:
        if len(self._stops) > 1:
            is_silent = now - self._heard_at > _STOPPED_SILENT_S
            return len(self._stops) > 2 or is_silent or now - self._stops[1] > _SECOND_STOP_S
        if not self._stops or self._grace_s is None:
            return False
        return now - self._stops[0] > self._grace_s + _STOP_MARGIN_S
