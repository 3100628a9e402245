"""The heartbeat of a rank: its progress, in a small file in its agent's folder.

The training library overwrites the one record in place (`train/heartbeat.py`), the agent reads it every two seconds
(`launcher/node/inquiries.py`). So a step never waits for the agent, and the record is always the newest.
"""

import enum
import math
import os
import struct
from dataclasses import dataclass

from torchmuster.core.model.contract import STACK_FD

HEARTBEAT_FD = STACK_FD + 1

NUM_DURATIONS = 128  # of the newest steps
_MAX_STEP_S = 1e7


class RankPhase(enum.IntEnum):
    """What a rank is doing, as far as the library knows."""

    STARTING = 0  # no step of this attempt is done
    DATA = 1  # waiting for the loader's next batch
    COMPUTE = 2  # everything else between two batches: backward, optimizer, waits for other ranks
    FORWARD = 3
    SAVE = 4
    EVALUATE = 5
    BETWEEN = 6  # between epochs: the script's own code
    OVER = 7  # the library's run is closed; the script continues
    WAIT = 8  # DDP's wait for other ranks within COMPUTE, if measured; never entered


_NUM_PHASES = len(RankPhase)
# serial, steps of this attempt, number of the step, phase, time of the beat and of the step
# (seconds of CLOCK_MONOTONIC, which a node's processes share), seconds in each phase, serial again:
# a half written record has two different ones.
_RECORD = struct.Struct(f"<4Q2d{_NUM_PHASES}dQ")
_DURATION = struct.Struct("<f")
PAGE_BYTES = _RECORD.size + NUM_DURATIONS * _DURATION.size


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRecord:
    """The last record of one rank.

    Attributes:
        steps_here: Steps done in this attempt.
        step: Number of the last step over all attempts.
        at: When it was written, in seconds of CLOCK_MONOTONIC.
        step_at: When the last step ended.
        seconds: Time spent in each phase so far, in this attempt.
        durations: Seconds of the newest steps, without saves and evaluations, unordered.
    """

    steps_here: int
    step: int
    phase: RankPhase
    at: float
    step_at: float
    seconds: tuple[float, ...]
    durations: tuple[float, ...] = ()


def pack_duration(number: int, duration_s: float) -> tuple[bytes, int]:
    """Return the bytes for the duration of a step, and their offset in the file."""
    return _DURATION.pack(duration_s), _RECORD.size + number % NUM_DURATIONS * _DURATION.size


def pack(
    serial: int,
    steps_here: int,
    step: int,
    phase: int,
    at: float,
    step_at: float,
    seconds: list[float],
) -> bytes:
    """Return the record packed from plain values: fast, as it runs in the training loop."""
    return _RECORD.pack(serial, steps_here, step, phase, at, step_at, *seconds, serial)


def unpack(page: bytes) -> HeartbeatRecord | None:
    """Return the record of a file; None if it is incomplete or invalid."""
    if len(page) < _RECORD.size:
        return None
    serial, steps_here, step, phase, at, step_at, *rest = _RECORD.unpack_from(page)
    *seconds, again = rest
    times = (at, step_at, *seconds)
    if serial != again or not serial or phase >= _NUM_PHASES:
        return None
    if not all(math.isfinite(value) and value >= 0 for value in times):
        return None
    return HeartbeatRecord(
        steps_here=steps_here,
        step=step,
        phase=RankPhase(phase),
        at=at,
        step_at=step_at,
        seconds=tuple(seconds),
        durations=_durations(page, steps_here),
    )


def _durations(page: bytes, steps_here: int) -> tuple[float, ...]:
    room = (len(page) - _RECORD.size) // _DURATION.size
    number = min(room, NUM_DURATIONS, max(steps_here - 1, 0))
    found = struct.unpack_from(f"<{number}f", page, _RECORD.size)
    return tuple(value for value in found if 0 < value < _MAX_STEP_S)


def heartbeat_path(folder: str, attempt: int | str, rank: int | str) -> str:
    """Return the path of a rank's heartbeat file in its agent's folder."""
    return os.path.join(folder, f"heartbeat-{attempt}-{rank}")
