"""How all ranks of an attempt stood at one moment: a line of the record from which a run is shown, live and afterwards.

Columns rather than a row for each rank: a line of 512 ranks stays small, and a view draws a column at once. The head
makes one from what agents report every two seconds; it sends it to those who look, and writes it to `samples.jsonl`,
less often the longer a run lasts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

QUIET_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """All ranks of an attempt at one moment. Columns have a value for each rank, by rank; None where nobody knows.

    A column of which nobody knows anything is empty. Phases are seconds since the sample before it in the file, of this attempt; only the training library tells them.
    A plain script has `states`, `cpus`, `rss_mib`, `io_mib` and the columns of the GPU.

    Attributes:
        time: UTC, ISO 8601.
        attempt: Number of the attempt.
        over_s: Seconds since the sample before, or since the first report of the attempt.
        nodes: Name of each rank's node.
        states: The kernel's letter: `R`, `S`, `D`, `T`; empty: the process is gone; `?`: nothing was told of it yet.
        report_ages_s: Since its agent's last report of it.
        still_s: For how long it has used no processor and moved no data, output among it, by that report.
        steps: Number of the last step over all attempts.
        steps_here: Steps done in this attempt.
        ages_s: Since the library's last word.
        phases: Name of what it does, of `RankPhase`, in lower case.
        steps_per_s: Since the sample before, the time for snapshots and evaluations included.
        median_s: A step, of the newest, without snapshots and evaluations.
        data_s: In the loader.
        forward_s: In the forward pass.
        rest_s: In backward, optimizer and waits for other ranks.
        wait_s: The share of `rest_s` that the rank waits for others: what it spends there beyond the rank that
            spends least.
        save_s: In snapshots.
        evaluate_s: In evaluations.
        cpus: Processors used, on average since the sample before.
        rss_mib: Resident memory of the rank and of what it has started.
        io_mib: Read and written since the sample before.
        gpu_percent: Utilization of the rank's GPU.
        gpu_mib: Memory in use on it.
    """

    time: str
    attempt: int
    over_s: float
    nodes: tuple[str, ...]
    states: tuple[str, ...]
    report_ages_s: tuple[float | None, ...] = ()
    still_s: tuple[float | None, ...] = ()
    steps: tuple[int | None, ...] = ()
    steps_here: tuple[int | None, ...] = ()
    ages_s: tuple[float | None, ...] = ()
    phases: tuple[str, ...] = ()
    steps_per_s: tuple[float | None, ...] = ()
    median_s: tuple[float | None, ...] = ()
    data_s: tuple[float | None, ...] = ()
    forward_s: tuple[float | None, ...] = ()
    rest_s: tuple[float | None, ...] = ()
    wait_s: tuple[float | None, ...] = ()
    save_s: tuple[float | None, ...] = ()
    evaluate_s: tuple[float | None, ...] = ()
    cpus: tuple[float | None, ...] = ()
    rss_mib: tuple[int | None, ...] = ()
    io_mib: tuple[float | None, ...] = ()
    gpu_percent: tuple[int | None, ...] = ()
    gpu_mib: tuple[int | None, ...] = ()


def quiet_s(sample: RankSample) -> float:
    """Return for how many seconds no rank that lives has done anything; 0 below a minute, and where one is not known."""
    live = [rank for rank, state in enumerate(sample.states) if state]
    still = [sample.still_s[rank] if rank < len(sample.still_s) else None for rank in live]
    least = min((0.0 if one is None else one for one in still), default=0.0)
    return least if least >= QUIET_S else 0.0


def split(sample: RankSample, most: int) -> list[RankSample]:
    """Return the sample in parts of at most so many ranks each, in their order; `join` makes it whole again."""
    columns = _columns(sample)
    starts = range(0, max(len(sample.nodes), 1), most)
    return [
        replace(sample, **{name: column[at : at + most] for name, column in columns.items()})
        for at in starts
    ]


def join(parts: Sequence[RankSample]) -> RankSample:
    """Return the sample that was split."""
    columns = [_columns(part) for part in parts]
    whole: dict[str, Any] = {
        name: tuple(one for part in columns for one in part[name]) for name in columns[0]
    }
    return replace(parts[0], **whole)


def _columns(sample: RankSample) -> dict[str, Any]:
    every = {field.name: getattr(sample, field.name) for field in fields(sample)}
    return {name: value for name, value in every.items() if isinstance(value, tuple)}
