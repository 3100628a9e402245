"""The worker's side of progress: one record in a file of the agent's folder, overwritten in place.

A beat is one `pwrite` into the page cache, one or two microseconds, and never waits for the agent. Without an agent,
or when the file can't be written, nothing happens.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torchmuster.model import beats, contract
from torchmuster.model.beats import RankPhase

# The phases of shorter steps are told with the step: a stack says more of where a rank stands.
_TELL_EVERY_S = 0.05
_ALWAYS_TOLD = frozenset({RankPhase.SAVE, RankPhase.EVALUATE, RankPhase.BETWEEN, RankPhase.OVER})


class Beats:
    """What this rank is doing. Only the main thread calls it.

    Args:
        fd: The file; None: nobody listens.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._serial = 0
        self._phase = RankPhase.STARTING
        self._since = self._step_at = time.monotonic()
        self._told_at = 0.0
        self._steps_here = 0
        self._step = 0
        self._seconds = [0.0] * len(RankPhase)
        self._aside_s = 0.0  # in saves and evaluations since the last step

    def enter(self, phase: RankPhase) -> None:
        """Say what comes now."""
        if self._fd is None:
            return
        now = time.monotonic()
        spent_s = now - self._since
        before, self._phase, self._since = self._phase, phase, now
        self._seconds[before] += spent_s
        if before in (RankPhase.SAVE, RankPhase.EVALUATE, RankPhase.BETWEEN):
            self._aside_s += spent_s
        if phase in _ALWAYS_TOLD or before in _ALWAYS_TOLD or now - self._told_at > _TELL_EVERY_S:
            self._tell(now)

    def step(self, number: int) -> None:
        """Say that a step has ended.

        Args:
            number: Over all attempts.
        """
        if self._fd is None:
            return
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        if self._phase in (RankPhase.SAVE, RankPhase.EVALUATE, RankPhase.BETWEEN):
            self._aside_s += now - self._since
        duration_s = max(now - self._step_at - self._aside_s, 1e-9)
        self._since, self._step_at, self._aside_s = now, now, 0.0
        self._step, self._steps_here = number, self._steps_here + 1
        if self._steps_here > 1:  # the first holds the start of everything
            self._write(*beats.pack_duration(self._steps_here - 2, duration_s))
        self._tell(now)

    @contextmanager
    def during(self, phase: RankPhase) -> Iterator[None]:
        """Say what the body does; behind it, what was done before."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def close(self) -> None:
        """Say no more."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _tell(self, now: float) -> None:
        self._told_at = now
        self._serial += 1
        self._write(
            beats.pack(
                self._serial,
                self._steps_here,
                self._step,
                self._phase,
                now,
                self._step_at,
                self._seconds,
            ),
            0,
        )

    def _write(self, data: bytes, offset: int) -> None:
        if self._fd is None:
            return
        try:
            os.pwrite(self._fd, data, offset)
        except OSError:  # a full disk, or a script that has closed what it does not know
            self._fd = None


def open_beats(environ: Mapping[str, str] = os.environ) -> Beats:
    """Return the beats of this process; mute ones where no agent listens."""
    socket_path = environ.get(contract.SOCKET_VARIABLE)
    attempt, rank = environ.get(contract.ATTEMPT_VARIABLE), environ.get("RANK")
    if not socket_path or attempt is None or rank is None:
        return Beats()
    path = beats.beats_path(os.path.dirname(socket_path), attempt, rank)
    try:
        low = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return Beats()
    try:
        fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, beats.BEATS_FD)
        os.pwrite(fd, bytes(beats.PAGE_BYTES), 0)
    except OSError:
        return Beats()
    finally:
        os.close(low)
    return Beats(fd)
