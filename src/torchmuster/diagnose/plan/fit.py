"""Fits a network's latency and bandwidth to the times of sums, by least squares.

Standard library only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SAG = 0.9
"""A bus bandwidth below this part of the next smaller size's shows loss, the MTU or incast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The median time of an all-reduce.

    Attributes:
        size_bytes: Of the vector on each rank.
        seconds: Median of the slowest rank.
        cpu_s: What it costs each rank's processor.
    """

    size_bytes: int
    seconds: float
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingFit:
    """A ring all-reduce's latency and bandwidth.

    Attributes:
        num_ranks: The number of ranks in the measurement.
        latency_s: Of one hop: alpha.
        bytes_per_s: Of each rank and direction, including the cost of the sums: 1/beta.
        cpu_s_per_byte: A rank's processor time for each byte of the vector.
        r_squared: 1 when the model explains all differences between the times.
        worst: The largest deviation of a time from the model, as a part of the time.
        busbw_bytes_per_s: Of the largest size.
        sags: Whether that is less than 90 % of the next smaller size's.
    """

    num_ranks: int
    latency_s: float
    bytes_per_s: float
    cpu_s_per_byte: float
    r_squared: float
    worst: float
    busbw_bytes_per_s: float
    sags: bool


def read_timings(found: Iterable[Mapping[str, Any]]) -> list[Timing]:
    """Return the timings of the test job's `between` or `inside`."""
    return [
        Timing(
            size_bytes=int(one["bytes"]),
            seconds=float(one["seconds"]),
            cpu_s=float(one.get("cpu_seconds", 0.0)),
        )
        for one in found
    ]


def bus_bandwidth(timing: Timing, num_ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce in bytes/s, to be compared with the link's.

    Source: nccl-tests, doc/PERFORMANCE.md: busbw = S/t * 2(n-1)/n.
    """
    return timing.size_bytes / timing.seconds * 2 * (num_ranks - 1) / num_ranks


def fit_ring(timings: Sequence[Timing], num_ranks: int) -> RingFit:
    """Fit T = 2(n-1) alpha + 2(n-1)/n S beta to times of several sizes.

    Least squares with the weights 1/t, as for errors that grow with the root of the time: plain
    ones would see the largest size alone; relative ones would trust the small sizes, which shapers
    and buffers pass for free, as much as the large ones. Neither alpha nor beta can be less than 0.
    The cost of the sums (gamma) grows with S as the transfer does, so it is a part of beta.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4, for the model; the fit is the textbook's.

    Raises:
        ValueError: Fewer than two ranks or two sizes.
    """
    if num_ranks < 2 or len({timing.size_bytes for timing in timings}) < 2:
        raise ValueError("a fit needs two ranks and two sizes")
    ordered = sorted(timings, key=lambda timing: timing.size_bytes)
    rows = [
        (2.0 * (num_ranks - 1), 2 * (num_ranks - 1) / num_ranks * one.size_bytes, one.seconds)
        for one in ordered
    ]
    alpha, beta = _solve(rows)
    guessed = [alpha * a + beta * b for a, b, _ in rows]
    largest, smaller = ordered[-1], ordered[-2]
    busbw = bus_bandwidth(largest, num_ranks)
    return RingFit(
        num_ranks=num_ranks,
        latency_s=alpha,
        bytes_per_s=1 / beta,
        cpu_s_per_byte=largest.cpu_s / largest.size_bytes,
        r_squared=_r_squared([t for _, _, t in rows], guessed),
        worst=max(abs(guess - t) / t for guess, (_, _, t) in zip(guessed, rows, strict=True)),
        busbw_bytes_per_s=busbw,
        sags=busbw < SAG * bus_bandwidth(smaller, num_ranks),
    )


def _solve(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return alpha, beta >= 0 that bring alpha*a + beta*b nearest to t in all rows (a, b, t)."""
    aa = sum(a * a / t for a, _, t in rows)
    ab = sum(a * b / t for a, b, t in rows)
    bb = sum(b * b / t for _, b, t in rows)
    at, bt = sum(a for a, _, _ in rows), sum(b for _, b, _ in rows)
    determinant = aa * bb - ab * ab
    alpha = (at * bb - bt * ab) / determinant
    beta = (aa * bt - ab * at) / determinant
    if alpha < 0:
        return 0.0, bt / bb
    # A time that does not grow with the size gives only a lower bound of the bandwidth.
    return (alpha, beta) if beta > 0 else (at / aa, _TINY)


_TINY = 1e-15  # seconds a byte: a petabyte/s, more than any link has


def _r_squared(times: Sequence[float], guessed: Sequence[float]) -> float:
    mean = sum(times) / len(times)
    total = sum((t - mean) ** 2 for t in times)
    rest = sum((t - guess) ** 2 for t, guess in zip(times, guessed, strict=True))
    return 1 - rest / total if total else 1.0
