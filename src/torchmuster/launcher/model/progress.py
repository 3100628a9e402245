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
    """The state of all ranks of an attempt at one moment, from which runs are shown live and later.

    The head makes one from the agents' reports every two seconds, sends it to viewers, and writes
    it to `samples.jsonl`, less often the longer a run lasts. It is stored in columns rather than
    rows: a line for 512 ranks stays small, and a view draws one column at a time.

    Columns have one value per rank, in order; None if unknown. A column without any values is
    empty. Phases are in seconds since the previous sample of this attempt; only the training
    library reports them. A plain script has `states`, `cpus`, `rss_mib`, `io_mib` and the columns
    of the GPU.

    Attributes:
        time: UTC, ISO 8601.
        attempt: Number of the attempt.
        over_s: Seconds since the previous sample, or since the first report of the attempt.
        nodes: Name of each rank's node.
        states: The kernel's letter: `R`, `S`, `D`, `T`; empty: the process is gone; `?`: not
            reported yet.
        report_ages_s: Seconds since its agent's last report.
        still_s: How long it has used no processor and moved no data, output included, by that
            report.
        steps: Number of the last step over all attempts.
        steps_here: Steps done in this attempt.
        ages_s: Seconds since the library's last report.
        phases: Its `RankPhase`, in lower case.
        steps_per_s: Since the previous sample, including time for snapshots and evaluations.
        median_s: Median of the newest steps, without snapshots and evaluations.
        data_s: In the loader.
        forward_s: In the forward pass.
        rest_s: In backward, optimizer and waits for other ranks.
        wait_s: Part of `rest_s` spent waiting for other ranks: the excess over the rank that spends
            least.
        save_s: In snapshots.
        evaluate_s: In evaluations.
        cpus: Processors used, averaged since the previous sample.
        rss_mib: Resident memory of the rank and its descendants.
        io_mib: Data read and written since the previous sample.
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
    """Return how many seconds all living ranks have been idle; 0 if below a minute or unknown."""
    live = [rank for rank, state in enumerate(sample.states) if state]
    still = [sample.still_s[rank] if rank < len(sample.still_s) else None for rank in live]
    least = min((0.0 if one is None else one for one in still), default=0.0)
    return least if least >= QUIET_S else 0.0


def split(sample: RankSample, most: int) -> list[RankSample]:
    """Return the sample in parts of at most `most` ranks each, in order; `join` reverses it."""
    columns = _columns(sample)
    starts = range(0, max(len(sample.nodes), 1), most)
    return [
        replace(sample, **{name: column[at : at + most] for name, column in columns.items()})
        for at in starts
    ]


def join(parts: Sequence[RankSample]) -> RankSample:
    """Return the sample that was split into these parts."""
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
        beat_age_s: Seconds since its library's last report; None without a library or a report.
        steps_here: Steps done in this attempt.
        step: Number of the last step.
        step_at: When it ended, on its node's monotonic clock: only differences have a meaning.
        phase: What it was doing at its last report.
        seconds: Time spent in each phase.
        median_s: Median of the newest steps.
        p99_s: 99th percentile of the newest steps.
        active_s: Processor time of the rank and its descendants; only differences have a meaning.
        io_bytes: Bytes read and written, likewise.
        rss_mib: Resident memory of the rank and its descendants; shared memory counts for each.
        gpu_percent: Utilization of the rank's GPU; None without one, or if its driver doesn't
            report it.
        gpu_mib: Memory in use on that GPU, by any process.
        state: The kernel's letter: `T` is stopped, `D` is uninterruptible sleep; empty: gone.
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
    """Connections of a rank that hangs in creating a store, from the kernel and torch's messages.

    Attributes:
        connected: `HOST:PORT` of its open TCP connections.
        calling: The same for connections that have not been answered.
        named: The address in torch's message in the rank's log; empty without one.
        lines: Lines of the script that set such an address: `train.py:5: os.environ["MASTER_PORT"]
            = "29501"`.
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
        text: Output of faulthandler or py-spy, the main thread first; empty if neither worked.
        source: The script's source line at which the main thread is.
        children: The same as `text`, for processes that it has forked, such as loader workers.
        kernel: Where it sleeps in the kernel; empty if the kernel doesn't say.
        why_not: Why there is no text.
        uses_gpu: The process has opened a GPU.
        store: For a rank that is creating a store; None for others.
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
