"""Table rows for the ranks of a sample: filtered, sorted, with the cost of the slow ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core.model.text import span
from torchmuster.launcher.head.hang_watch import median_without
from torchmuster.launcher.model.progress import RankSample
from torchmuster.launcher.ui.table import DASH, show_mib, show_number, show_share

SLOW_SHARE = 0.1  # of the other ranks' own work
_LEAST_COST_S = 0.002  # per step: less is noise
_SIGN_LATE_S = 10.0
SORTS = ("rank", "step", "steps/s", "age", "cpu", "memory", "gpu", "wait")
_DOES = {"R": "runs", "S": "sleeps", "D": "disk wait", "T": "stopped", "Z": "ended", "": "ended"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """The numbers of one rank in a view; None where unknown.

    Attributes:
        does: What the rank does, in a word: from the library, else from the kernel.
        age_s: Seconds since its last sign of life: the library's, else its agent's.
        wait: The share of a step in which it waits for other ranks.
        cost_s: How much shorter every step would be if this rank were as fast as the others; 0 for
            most.
        part: Where it is slower: `data` or `compute`.
    """

    rank: int
    node: str
    does: str
    step: int | None = None
    steps_per_s: float | None = None
    age_s: float | None = None
    cpus: float | None = None
    rss_mib: int | None = None
    gpu_percent: int | None = None
    gpu_mib: int | None = None
    wait: float | None = None
    cost_s: float = 0.0
    part: str = ""

    @property
    def needs_attention(self) -> bool:
        """Whether it needs attention: slow, stopped, unknown, or without a sign of life."""
        late = self.age_s is not None and self.age_s > _SIGN_LATE_S and self.does == "runs"
        return self.cost_s > 0 or late or self.does in ("stopped", "disk wait", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A rank's own work in a step, in seconds."""

    data_s: float
    compute_s: float

    @property
    def whole_s(self) -> float:
        return self.data_s + self.compute_s


def rank_rows(sample: RankSample) -> list[RankRow]:
    """Return one row per rank, in the order of ranks."""
    work = _work(sample)
    others = _Others(
        sorted(one.whole_s for one in work.values()), sorted(one.data_s for one in work.values())
    )
    rows = []
    for rank, node in enumerate(sample.nodes):
        cost_s, part = others.cost(work[rank]) if rank in work else (0.0, "")
        state, phase = _at(sample.states, rank), _at(sample.phases, rank)
        beat_s = _at(sample.ages_s, rank)
        rows.append(
            RankRow(
                rank=rank,
                node=node,
                does=_does(state, phase),
                step=_at(sample.steps, rank),
                steps_per_s=_at(sample.steps_per_s, rank),
                age_s=beat_s if beat_s is not None else _at(sample.report_ages_s, rank),
                cpus=_at(sample.cpus, rank),
                rss_mib=_at(sample.rss_mib, rank),
                gpu_percent=_at(sample.gpu_percent, rank),
                gpu_mib=_at(sample.gpu_mib, rank),
                wait=_wait_share(sample, rank),
                cost_s=cost_s,
                part=part,
            )
        )
    return rows


def choose(rows: Sequence[RankRow], word: str, sort: str) -> list[RankRow]:
    """Return the rows that match a filter, sorted with the most interesting first.

    Args:
        rows: One per rank.
        word: Part of a node's name or of what a rank does, `3`, `0-7`, or `slow`; empty for all.
        sort: One of `SORTS`.
    """
    kept = [row for row in rows if _matches(row, word.strip().lower())]
    if sort == "rank":
        return kept
    known = [row for row in kept if _KEYS[sort](row) is not None]
    unknown = [row for row in kept if _KEYS[sort](row) is None]
    return sorted(known, key=_KEYS[sort], reverse=sort in _DESCENDING) + unknown


_KEYS: dict[str, Callable[[RankRow], Any]] = {
    "step": lambda row: row.step,
    "steps/s": lambda row: row.steps_per_s,
    "age": lambda row: row.age_s,
    "cpu": lambda row: row.cpus,
    "memory": lambda row: row.rss_mib,
    "gpu": lambda row: row.gpu_percent,
    "wait": lambda row: row.wait,  # the others wait for the rank that waits least
}
_DESCENDING = ("age", "cpu", "memory")


def _matches(row: RankRow, word: str) -> bool:
    if not word:
        return True
    first, dash, last = word.partition("-")
    if word.isdecimal():
        return row.rank == int(word)
    if dash and first.isdecimal() and last.isdecimal():
        return int(first) <= row.rank <= int(last)
    if word == "slow":
        return row.cost_s > 0
    return word in row.node.lower() or word in row.does


HEADER = ("RANK", "NODE", "DOES", "STEP", "STEPS/S", "AGE", "CPU", "MEM", "GPU", "GPUMEM", "WAIT")


def cells(row: RankRow) -> tuple[str, ...]:
    """Return the cells of a row, in the order of `HEADER`."""
    return (
        str(row.rank),
        row.node,
        row.does + (f" +{row.cost_s * 1000:.0f}ms" if row.cost_s else ""),
        str(row.step) if row.step is not None else DASH,
        show_number(row.steps_per_s),
        span(row.age_s, whole=True).replace(" ", ""),
        f"{row.cpus:.1f}" if row.cpus is not None else DASH,
        show_mib(row.rss_mib),
        f"{row.gpu_percent}%" if row.gpu_percent is not None else DASH,
        show_mib(row.gpu_mib),
        show_share(row.wait),
    )


def slowest(rows: Sequence[RankRow]) -> RankRow | None:
    """Return the rank that costs the others most; None if no rank stands out."""
    slow = [row for row in rows if row.cost_s > 0]
    return max(slow, key=lambda row: row.cost_s, default=None)


def _does(state: str | None, phase: str | None) -> str:
    if state is None or state == "?":
        return "unknown"
    if phase and state in ("R", "S"):
        return phase
    return _DOES.get(state, state)


def _at(column: Sequence[Any], rank: int) -> Any:
    return column[rank] if rank < len(column) else None


def _step_s(sample: RankSample, rank: int) -> tuple[float, float, float, float] | None:
    """Return the seconds in the window for data, forward, rest and waiting; None without steps."""
    rest_s, wait_s = _at(sample.rest_s, rank), _at(sample.wait_s, rank)
    if rest_s is None or wait_s is None:
        return None
    data_s = _at(sample.data_s, rank) or 0.0
    return data_s, _at(sample.forward_s, rank) or 0.0, rest_s, wait_s


def _wait_share(sample: RankSample, rank: int) -> float | None:
    found = _step_s(sample, rank)
    if found is None:
        return None
    whole_s = sum(found[:3])
    return found[3] / whole_s if whole_s > 0 else None


def _work(sample: RankSample) -> dict[int, _Work]:
    """Return each rank's own work per step, scaled to the median step because windows differ."""
    work = {}
    for rank in range(len(sample.nodes)):
        found, step_s = _step_s(sample, rank), _at(sample.median_s, rank)
        if found is None or not step_s or sum(found[:3]) <= 0:
            continue
        data_s, forward_s, rest_s, wait_s = (value * step_s / sum(found[:3]) for value in found)
        work[rank] = _Work(data_s=data_s, compute_s=forward_s + rest_s - wait_s)
    return work


@dataclass(frozen=True, slots=True)
class _Others:
    """The step times of all ranks, sorted once, to compare one rank with the rest."""

    whole: list[float]
    data: list[float]

    def cost(self, mine: _Work) -> tuple[float, str]:
        """Return a rank's extra time over the others, and where; 0 if it doesn't stand out."""
        if len(self.whole) < 2:
            return 0.0, ""
        others_s = median_without(self.whole, mine.whole_s)
        cost_s = mine.whole_s - others_s
        if cost_s <= max(SLOW_SHARE * others_s, _LEAST_COST_S):
            return 0.0, ""
        data_s = mine.data_s - median_without(self.data, mine.data_s)
        return cost_s, "data" if data_s >= cost_s / 2 else "compute"
