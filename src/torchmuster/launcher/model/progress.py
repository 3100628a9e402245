"""Reports on ranks while they train: samples of all ranks, progress of one, and on request their stacks."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torchmuster.core.model.progress import RankPhase


def quantile(values: tuple[float, ...], share: float) -> float:
    """Return the value below which `share` of the values lie; 0 when there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """One rank as its agent sees it at one moment.

    Attributes:
        beat_age_s: Since its library's last word; None where the script has no such library, or no word yet.
        steps_here: Steps done in this attempt.
        step: Number of the last one.
        step_at: When that was, in seconds of its node's monotonic clock: only differences mean something.
        phase: What it did at its last word.
        seconds: Spent in each phase.
        median_s: Of the newest steps.
        p99_s: Of the newest steps.
        active_s: Processor time of the rank and of what it has started; only differences mean something.
        io_bytes: Read and written, likewise.
        rss_mib: Resident memory of the rank and of what it has started; what they share counts for each.
        gpu_percent: Utilization of the rank's GPU; None where there is none, or its driver doesn't say.
        gpu_mib: Memory in use on it, by whomever.
        state: The kernel's letter: `T` is stopped, `D` sleeps uninterruptibly; empty: it is gone.
    """

    rank: int
    state: str
    active_s: float
    io_bytes: int = 0
    rss_mib: int | None = None
    gpu_percent: int | None = None
    gpu_mib: int | None = None
    beat_age_s: float | None = None
    steps_here: int = 0
    step: int = 0
    step_at: float = 0.0
    phase: RankPhase = RankPhase.STARTING
    seconds: tuple[float, ...] = ()
    median_s: float = 0.0
    p99_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCall:
    """The connections of a rank that waits in the creation of a store, from the kernel and from torch's messages.

    Attributes:
        connected: `HOST:PORT` of its open TCP connections.
        calling: The same where nobody has answered yet.
        named: The address that torch names in the rank's log; empty where it names none.
        lines: Of the script, where it sets such an address: `train.py:5: os.environ["MASTER_PORT"] = "29501"`.
    """

    connected: tuple[str, ...] = ()
    calling: tuple[str, ...] = ()
    named: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """The stack of a rank.

    Attributes:
        state: The kernel's letter; empty: the process is gone.
        text: What faulthandler or py-spy wrote, the main thread first; empty when neither could.
        source: The text of the script's line where the main thread is.
        children: The same as `text`, of processes that it has forked, such as those of its loader.
        kernel: Where it sleeps in the kernel; empty when the kernel doesn't say.
        why_not: Why there is no text.
        uses_gpu: The process has opened one.
        store: Of a rank that stands in the making of a store; None for others.
    """

    rank: int
    pid: int
    state: str
    text: str = ""
    source: str = ""
    children: tuple[str, ...] = ()
    kernel: str = ""
    why_not: str = ""
    uses_gpu: bool = False
    store: StoreCall | None = None
