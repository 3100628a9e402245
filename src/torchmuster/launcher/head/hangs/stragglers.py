"""Which rank is slower than the others, and in what: pure values, no clock of its own.

In synchronous training all ranks make their steps at the same pace, so a rank's own work is what counts: what its
step takes less what it waits for others. Where the library measures its waits (DDP on processors, `train/wrap.py`), the
rank that waits least shows what the sums themselves take, and the others' waits are what they take beyond it. Elsewhere
the rank that needs least after its forward is taken for one that does not wait; what the others need more there is
counted as waiting, so that a rank which is slow after its forward can't be told from those that wait for it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from torchmuster.core.model.progress import RankPhase
from torchmuster.launcher.model.progress import RankProgress

WINDOW_STEPS = 25
SLOWER_BY = 0.2
_NUM_WINDOWS = 2  # one after the other
_LEAST_S = 0.002  # in a step: less is noise
_AGAIN_S = 600.0
_PARTS = {"data": "data", "forward": "its forward", "after forward": "what follows its forward"}
_ASIDE = (RankPhase.SAVE, RankPhase.EVALUATE, RankPhase.BETWEEN, RankPhase.STARTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        share: By how much: 0.31 for 31 %.
        part: What is slow: `data`, `forward`, or `after forward`: whatever a step does then, measured as one.
        part_s: How long that takes in a step.
        others_s: How long it takes the others.
        step_s: What a step takes.
    """

    rank: int
    node: str
    share: float
    num_steps: int
    part: str
    part_s: float
    others_s: float
    step_s: float

    def tell(self) -> str:
        """Return the sentence for the user."""
        return (
            f"rank {self.rank} on {self.node} is {self.share * 100:.0f} % slower than the others for"
            f" {self.num_steps} steps: {_PARTS[self.part]} takes {_ms(self.part_s)} ms of"
            f" {_ms(self.step_s)} ms (others {_ms(self.others_s)})"
        )


def _ms(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step of one rank takes on average; `waited_s` is 0 where waits are not measured."""

    step_s: float
    data_s: float
    forward_s: float
    waited_s: float = 0.0

    @property
    def rest_s(self) -> float:
        """Return what is left after the forward: backward, optimizer, waits for other ranks, all else of the script."""
        return max(self.step_s - self.data_s - self.forward_s, 0.0)


@dataclass(slots=True)
class Stragglers:
    """Compares the ranks of one attempt, window by window.

    Args:
        nodes: Rank -> node.
    """

    nodes: dict[int, str]
    _bases: dict[int, RankProgress] = field(default_factory=dict)
    _seen: dict[int, RankProgress] = field(default_factory=dict)
    _runs: dict[int, int] = field(default_factory=dict)  # windows in a row, by rank
    _steps: dict[int, int] = field(default_factory=dict)
    _reported_at: dict[int, float] = field(default_factory=dict)
    _last: int | None = None  # the rank that had done the fewest steps at the last look at all

    def take(self, now: float, progress: Iterable[RankProgress]) -> list[Straggler]:
        """Take what an agent tells; return who has been slow for long enough, each once in ten minutes."""
        for one in progress:
            if one.beat_age_s is not None and one.rank in self.nodes and one.steps_here > 1:
                self._seen[one.rank] = one
                self._bases.setdefault(one.rank, one)
        if len(self._seen) < len(self.nodes) or len(self.nodes) < 2:
            return []
        if self._last is not None and self._done(self._last) < WINDOW_STEPS:
            return []  # nothing has to be counted of thousands of ranks for each report of eight
        self._last = min(self.nodes, key=self._done)
        done = self._done(self._last)
        if done < WINDOW_STEPS:
            return []
        found = self._compare(done)
        self._bases = dict(self._seen)
        due = [one for one in found if now - self._reported_at.get(one.rank, -_AGAIN_S) >= _AGAIN_S]
        self._reported_at.update({one.rank: now for one in due})
        return due

    def _done(self, rank: int) -> int:
        return self._seen[rank].steps_here - self._bases[rank].steps_here

    def _compare(self, done: int) -> list[Straggler]:
        steps = {rank: per_step(self._bases[rank], self._seen[rank]) for rank in self.nodes}
        waits = waits_s(steps)
        own = {
            rank: one.data_s + one.forward_s + one.rest_s - waits[rank]
            for rank, one in steps.items()
        }
        found, ordered = [], sorted(own.values())
        for rank, own_s in own.items():
            others_s = median_without(ordered, own_s)
            slow = own_s - others_s > max(SLOWER_BY * others_s, _LEAST_S)
            self._runs[rank] = self._runs.get(rank, 0) + 1 if slow else 0
            self._steps[rank] = self._steps.get(rank, 0) + done if slow else 0
            if self._runs[rank] >= _NUM_WINDOWS:
                share = own_s / others_s - 1.0 if others_s > 0 else 0.0
                found.append(self._straggler(rank, share, steps, waits))
        return found

    def _straggler(
        self, rank: int, share: float, steps: dict[int, StepParts], waits: dict[int, float]
    ) -> Straggler:
        parts = {
            "data": {other: one.data_s for other, one in steps.items()},
            "forward": {other: one.forward_s for other, one in steps.items()},
            "after forward": {other: one.rest_s - waits[other] for other, one in steps.items()},
        }
        others_s = {
            part: median(s for other, s in of.items() if other != rank)
            for part, of in parts.items()
        }
        part = max(parts, key=lambda name: parts[name][rank] - others_s[name])
        return Straggler(
            rank=rank,
            node=self.nodes[rank],
            share=share,
            num_steps=self._steps[rank],
            part=part,
            part_s=parts[part][rank],
            others_s=others_s[part],
            step_s=steps[rank].step_s,
        )


def median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of at least two sorted values, of which `value` is left out."""
    left_out, num = bisect_left(ordered, value), len(ordered) - 1
    low, high = (ordered[at + (at >= left_out)] for at in ((num - 1) // 2, num // 2))
    return (low + high) / 2


def waits_s(steps: Mapping[int, StepParts]) -> dict[int, float]:
    """Return what each of these ranks waits for the others in a step, beyond the one that waits least.

    Measured where all of them measure it; else what its rest takes beyond the shortest rest.
    """
    if all(one.waited_s > 0 for one in steps.values()):
        least_s = min((one.waited_s for one in steps.values()), default=0.0)
        return {rank: min(one.waited_s - least_s, one.rest_s) for rank, one in steps.items()}
    least_s = min((one.rest_s for one in steps.values()), default=0.0)
    return {rank: one.rest_s - least_s for rank, one in steps.items()}


def per_step(before: RankProgress, now: RankProgress) -> StepParts:
    """Return what a step took between two words of a rank."""
    steps = max(now.steps_here - before.steps_here, 1)
    spent = [late - early for early, late in zip(before.seconds, now.seconds, strict=True)]
    aside_s = sum(spent[phase] for phase in _ASIDE)
    return StepParts(
        step_s=max(now.step_at - before.step_at - aside_s, 0.0) / steps,
        data_s=max(spent[RankPhase.DATA], 0.0) / steps,
        forward_s=max(spent[RankPhase.FORWARD], 0.0) / steps,
        waited_s=max(spent[RankPhase.WAIT], 0.0) / steps,
    )
