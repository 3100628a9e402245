"""Reports the progress of the training loop to this node's agent; without an agent, does nothing.

Progress is one record in a file in the agent's folder, overwritten in place: a heartbeat is one
`pwrite` into the page cache, takes one or two microseconds and never waits for the agent.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.model import contract
from torchmuster.core.model import progress as heartbeat
from torchmuster.core.model.progress import RankPhase

# Phases shorter than this are reported with the next step: a stack says more about where a rank is.
_TELL_EVERY_S = 0.05
# Indexed by phase number: enum members are slow to hash and compare, and this runs in every step.
_IS_ASIDE = tuple(p in (RankPhase.SAVE, RankPhase.EVALUATE, RankPhase.BETWEEN) for p in RankPhase)
_IS_ALWAYS_REPORTED = tuple(_IS_ASIDE[p] or p is RankPhase.OVER for p in RankPhase)


class Heartbeat:
    """Records what this rank is doing. Called from the main thread only.

    Args:
        fd: The heartbeat file; None without an agent.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._serial = 0
        self._phase = RankPhase.STARTING
        self._since = self._step_at = time.monotonic()
        self._reported_at = 0.0
        self._steps_here = 0
        self._step = 0
        self._seconds = [0.0] * len(RankPhase)
        self._aside_s = 0.0  # of saves and evaluations since the last step

    def enter(self, phase: RankPhase) -> None:
        """Record that a phase begins."""
        if self._fd is None:
            return
        now = time.monotonic()
        spent_s = now - self._since
        before, self._phase, self._since = self._phase, phase, now
        self._seconds[before] += spent_s
        if _IS_ASIDE[before]:
            self._aside_s += spent_s
        if (
            now - self._reported_at > _TELL_EVERY_S
            or _IS_ALWAYS_REPORTED[phase]
            or _IS_ALWAYS_REPORTED[before]
        ):
            self._tell(now)

    def step(self, number: int) -> None:
        """Record that a step has ended.

        Args:
            number: The number of the step, counted over all attempts.
        """
        if self._fd is None:
            return
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        if _IS_ASIDE[self._phase]:
            self._aside_s += now - self._since
        duration_s = max(now - self._step_at - self._aside_s, 1e-9)
        self._since, self._step_at, self._aside_s = now, now, 0.0
        self._step, self._steps_here = number, self._steps_here + 1
        if self._steps_here > 1:  # the first one includes the whole start-up
            self._write(*heartbeat.pack_duration(self._steps_here - 2, duration_s))
        self._tell(now)

    def waited(self, seconds: float) -> None:
        """Record a wait for other ranks, part of `COMPUTE`; the next phase or step reports it."""
        self._seconds[RankPhase.WAIT] += seconds

    @contextmanager
    def during(self, phase: RankPhase) -> Iterator[None]:
        """Record a phase for the duration of the body, then return to the phase before it."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def close(self) -> None:
        """Close the file; later calls write nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _tell(self, now: float) -> None:
        self._reported_at = now
        self._serial += 1
        self._write(
            heartbeat.pack(
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
        except OSError:  # a full disk, or a script that closed a descriptor it does not own
            self._fd = None


def open_heartbeat(environ: Mapping[str, str] = os.environ) -> Heartbeat:
    """Return the heartbeat of this process; without an agent it writes nothing."""
    socket_path = environ.get(contract.SOCKET_VARIABLE)
    attempt, rank = environ.get(contract.ATTEMPT_VARIABLE), environ.get("RANK")
    if not socket_path or attempt is None or rank is None:
        return Heartbeat()
    path = heartbeat.heartbeat_path(os.path.dirname(socket_path), attempt, rank)
    try:
        low = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return Heartbeat()
    try:
        fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, heartbeat.HEARTBEAT_FD)
        os.pwrite(fd, bytes(heartbeat.PAGE_BYTES), 0)
    except OSError:
        return Heartbeat()
    finally:
        os.close(low)
    return Heartbeat(fd)


@dataclass(slots=True)
class StepState:
    """The current batch: the state that loader, wrapped model and run share.

    The loader sets it for each batch, the wrapped model weights its gradient by it, and the run
    counts with it.
    Outside a batch of our loader everything counts as a complete step.

    Attributes:
        weight: The weight of this rank's mean loss in the global mean; 1 without our loader.
        count: Number of samples of this rank's share; 0 for a repeated sample that must not count;
            None
            without our loader.
        ends_step: Whether the optimizer steps after this micro-batch.
        accumulates: Whether a step has several micro-batches.
        serial: Counts the batches that the loader has returned.
        settles: Whether a throw-away pass is running that is not the script's.
        heartbeat: Reports progress to the agent.
        uncalled: Wrapped models whose own forward has never been called.
    """

    weight: float = 1.0
    count: int | None = None
    ends_step: bool = True
    accumulates: bool = False
    serial: int = 0
    settles: bool = False
    heartbeat: Heartbeat = field(default_factory=open_heartbeat)
    uncalled: list[Any] = field(default_factory=list)

    def clear(self) -> None:
        """Reset: there is no current batch."""
        self.weight, self.count, self.ends_step, self.accumulates = 1.0, None, True, False
