"""An agent's reports on its ranks while they train: their progress, and on request their stacks."""

from dataclasses import dataclass

from torchmuster.model.heartbeat import RankPhase


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
