"""Where the loop stands, and telling it to the agent of this node; without an agent, nothing is told.

Progress is one record in a file of the agent's folder, overwritten in place: a beat is one `pwrite` into the page
cache, one or two microseconds, and never waits for the agent. Other messages go over the worker socket.
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchmuster.model import beats, contract
from torchmuster.model.beats import RankPhase

# The phases of shorter steps are told with the step: a stack says more of where a rank stands.
_TELL_EVERY_S = 0.05
_AGENT_TIMEOUT_S = 2.0
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


@dataclass(slots=True)
class Pace:
    """The batch in hand: the one value that loader, wrapped model and run share.

    The loader says what the batch is; the wrapped model weighs its gradient by it; the run counts by it. Outside a
    batch of our own loader everything counts as a whole step.

    Attributes:
        weight: What this rank's mean loss counts in the global mean; 1 without our loader.
        count: Samples of this rank's share; 0 for a repeated sample that must not count; None
            without our loader.
        ends_step: Whether the optimizer steps after this micro-batch.
        accumulates: Whether a step has several micro-batches.
        serial: Counts the batches that were handed out.
        beats: Tells the agent what is done now.
    """

    weight: float = 1.0
    count: int | None = None
    ends_step: bool = True
    accumulates: bool = False
    serial: int = 0
    beats: Beats = field(default_factory=open_beats)

    def clear(self) -> None:
        """Say that no batch is in hand."""
        self.weight, self.count, self.ends_step, self.accumulates = 1.0, None, True, False


def tell_agent(kind: str, **fields: Any) -> None:
    """Send one message to the agent of this node; without one, do nothing."""
    path = os.environ.get(contract.SOCKET_VARIABLE)
    if not path:
        return
    payload = json.dumps({"kind": kind, **fields}).encode()
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent,
    ):
        agent.settimeout(_AGENT_TIMEOUT_S)
        agent.connect(path)
        agent.sendall(struct.pack("!I", len(payload)) + payload)
        agent.recv(1)  # the agent has it before it hears of our end
