"""Which rank stands still while the others wait for it, and which is slower? State machines: values in, orders out, no clock, no I/O.

A hang is not "it takes long". It is a rank that has said nothing for longer than the run's own steps ever took, that
uses no processor and reads nothing, and whose stack does not change, while the others wait for it. Then there is a
warning at half of the limit, and at the limit the attempt ends. Who compiles, saves, evaluates or makes a first step
may stand for the ceiling; who sits in a debugger, for ever. Who works is never taken for standing.

    QUIET --silent for half of the limit--> ask for stacks --standing--> WARNED --at the limit, stacks--> END
      ^                                         |                          |
      +---------- a step, or it works ----------+--------------------------+
"""

import enum
import re
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from torchmuster.core.model.progress import RankPhase
from torchmuster.core.model.ranks import name_ranks
from torchmuster.launcher.facts.stacks import RankActivity, StackReading
from torchmuster.launcher.model.progress import RankProgress

# Where ranks stand, in one sentence: equal ones together, who waits first.


_MOST_NAMED = 16  # of ranks that stand at the same place


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rank in a sentence; `since_s` is how long it has not moved, None when that is not known."""

    rank: int
    node: str
    standing: StackReading
    since_s: float | None = None
    kernel: str = ""


def tell(seen: Sequence[Seen]) -> str:
    """Return who waits and who doesn't, in one sentence, equal ones together."""
    groups: dict[tuple[object, ...], list[Seen]] = {}
    for one in seen:
        standing = one.standing
        key = (standing.doing, standing.what, standing.place, standing.by, one.kernel)
        groups.setdefault(
            key if standing.doing is not RankActivity.UNINTERRUPTIBLE else (one.rank,), []
        ).append(one)
    ordered = sorted(
        groups.values(), key=lambda g: (g[0].standing.doing is not RankActivity.WAITS, -len(g))
    )
    return "; ".join(_tell_group(group) for group in ordered)


def _tell_group(group: Sequence[Seen]) -> str:
    first = group[0]
    ranks = [one.rank for one in group]
    single = len(ranks) == 1
    who = f"rank {ranks[0]} on {first.node}" if single else name_ranks(ranks)
    if first.standing.doing is RankActivity.WAITS:
        who = f"rank {ranks[0]}" if single else f"{len(ranks)} ranks"
        verb = "waits" if single else "wait"
        what = (
            f"{verb} {'for' if first.standing.what.startswith('`') else 'in'} {first.standing.what}"
        )
        return f"{who} {what}{_at(first.standing)}"
    times = [one.since_s for one in group if one.since_s is not None]
    how_long = f" for {max(times):.0f} s" if times else ""
    return f"{who} {describe_standing(first.standing, first.kernel, single=single)}{how_long}"


def describe_standing(standing: StackReading, kernel: str = "", *, single: bool = True) -> str:
    """Return what a rank does, as the end of a sentence: `is in read() (data.py:88)`."""
    is_, here = ("is" if single else "are"), _at(standing)
    inside = f" in {standing.what}{here}" if standing.what else here
    where = f", {standing.by}" if standing.by else ""
    match standing.doing:
        case RankActivity.STOPPED:
            whose = f"waits for {standing.by}, which is" if standing.by else is_
            return f"{whose} stopped (SIGSTOP){inside}"
        case RankActivity.UNINTERRUPTIBLE:
            at = f" ({kernel})" if kernel else ""
            return f"{'sleeps' if single else 'sleep'} uninterruptibly in the kernel{at}{inside}"
        case RankActivity.DEBUGGED:
            return f"{is_} in a debugger{here}"
        case RankActivity.COMPILES | RankActivity.SAVES | RankActivity.EVALUATES:
            verb = standing.doing.value if single else standing.doing.value[:-1]
            return f"{verb}{inside}"
        case RankActivity.WAITS:
            return f"{'waits' if single else 'wait'}{inside}"
        case RankActivity.WORKS:
            return f"{is_}{inside}{where}" if inside else f"{is_} at work"
        case _:
            at = f" ({kernel})" if kernel else ""
            return f"{'does' if single else 'do'} not show a stack{at}"


def _at(standing: StackReading) -> str:
    return f" ({standing.place})" if standing.place else ""


def group_texts(texts: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines with all stacks, equal ones once.

    Args:
        texts: Who, as `rank 3 on n1`, and the text.
    """
    groups: dict[str, list[str]] = {}
    for who, text in texts:
        groups.setdefault(re.sub(r"0x[0-9a-f]+", "", text), []).append(who)
    lines: list[str] = []
    for text, whose in groups.items():
        shown = ", ".join(whose[:_MOST_NAMED])
        if len(whose) > _MOST_NAMED:
            shown += f" and {len(whose) - _MOST_NAMED} more: {name_ranks(_ranks_in(whose))}"
        lines += [f"{shown}:", *(f"  {line}" for line in text.strip("\n").splitlines()), ""]
    return lines


def rank_first(lines: Sequence[str], rank: int) -> list[str]:
    """Return the lines of `group_texts` with the stack of a rank before all others, under a line of its own."""
    groups: list[list[str]] = []
    for line in lines:
        if not groups or (line and not line.startswith(" ")):
            groups.append([])
        groups[-1].append(line)
    for at, group in enumerate(groups):
        if rank in _named(group[0]):
            title = f"rank {rank} stands here:"
            rest = [line for other in (*groups[:at], *groups[at + 1 :]) for line in other]
            equal = [f"  (the same: {group[0].rstrip(':')})"] if len(_named(group[0])) > 1 else []
            return [title, *equal, *group[1:], *rest]
    return [f"rank {rank} shows no stack", "", *lines]


def _named(title: str) -> set[int]:
    """Return the ranks that the title of a group names, all of them also where it counts the most."""
    _, more, all_of_them = title.rpartition(" more: ")
    if not more:
        return _ranks_in([title])
    pieces = re.findall(r"(\d+)(?:-(\d+))?", all_of_them)
    return {rank for first, last in pieces for rank in range(int(first), int(last or first) + 1)}


def _ranks_in(texts: Sequence[str]) -> set[int]:
    return {int(number) for text in texts for number in re.findall(r"\brank (\d+) on ", text)}


FACTOR = 10.0  # times the 99th percentile of the run's steps
NUM_FIRST_STEPS = 3  # of an attempt: compilation, caches, the first batch
START_S = 10.0
_ACTIVE_SHARE = 0.05  # of a processor: less is a polling loop
_ACTIVE_IO_BYTES_PER_S = 10_000
_RESTS_S = 5.0
_LOOK_AGAIN_S = 1.0
_MAX_NAMED = 8

_MAY_TAKE_LONG = (RankActivity.COMPILES, RankActivity.SAVES, RankActivity.EVALUATES)
# Waits before the first step, or for work that one rank does for all: data is prepared, weights are loaded.
_STARTS = (
    "init_process_group",
    "rendezvous",
    "TCPStore",
    "new_group",
    "torchmuster's group",
    "torchmuster's once",
)
_LONG_PHASES = (
    RankPhase.SAVE,
    RankPhase.EVALUATE,
    RankPhase.STARTING,
    RankPhase.BETWEEN,
    RankPhase.OVER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """When a rank that stands is a hang, in seconds.

    Attributes:
        floor_s: At least, however fast the steps are.
        ceiling_s: At most, and for what may take long.
        blind_s: For scripts that don't say how far they are.
        start_s: How long ranks wait in silence for others at the start of training.
    """

    floor_s: float = 60.0
    ceiling_s: float = 1800.0
    blind_s: float = 300.0
    start_s: float = START_S


class HangVerdict(enum.Enum):
    """What follows from the stacks."""

    NOTHING = "nothing"
    WARN = "warn"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the stacks have shown.

    Attributes:
        rank: The first of those that stand still; None: nobody stands out.
        sentence: Who waits and who doesn't.
        headline: The same, with the time, as the first line of a report.
        standing: Of that rank.
        silent_s: How long it has stood.
        left_s: Until the attempt ends, if nothing moves, after a warning.
        may_pass: What holds it is outside of the script, as far as can be seen: the network, a file system, a signal.
    """

    verdict: HangVerdict
    sentence: str = ""
    headline: str = ""
    rank: int | None = None
    node: str = ""
    standing: StackReading | None = None
    silent_s: float = 0.0
    limit_s: float = 0.0
    left_s: float = 0.0
    may_pass: bool = False


@dataclass(slots=True)
class _Rank:
    node: str
    seen: RankProgress | None = None
    seen_at: float = 0.0
    active_at: float = 0.0  # when it last used the processor or moved data
    ended: str | None = None

    def silent_s(self, now: float) -> float:
        """Return how long it has not said anything; where it never speaks, how long it has done nothing."""
        seen = self.seen
        if seen is not None and seen.beat_age_s is not None:
            return seen.beat_age_s + (now - self.seen_at)
        return self.still_s(now)

    def still_s(self, now: float) -> float:
        """Return how long it has done nothing, as the kernel counts: up to the last look at its counters."""
        last = self.seen_at if self.seen is not None else now
        return max(last - self.active_at, 0.0)


@dataclass(slots=True)
class HangWatch:
    """Watches one attempt.

    Args:
        limits: When it is a hang.
        ranks: Rank -> node.
    """

    limits: WatchLimits
    ranks: Mapping[int, str]
    began_at: float
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _ask_at: float = 0.0
    _warned: tuple[object, ...] | None = None
    _num_asked: int = 0

    def __post_init__(self) -> None:
        for rank, node in self.ranks.items():
            self._ranks[rank] = _Rank(node=node, active_at=self.began_at)

    # What comes in.

    def take(self, now: float, progress: Iterable[RankProgress]) -> None:
        """Take what an agent tells of its ranks."""
        for one in progress:
            rank = self._ranks.get(one.rank)
            if rank is None or rank.ended is not None:
                continue
            if rank.seen is None or was_active(rank.seen, one, now - rank.seen_at):
                rank.active_at = now
            rank.seen, rank.seen_at = one, now

    def note_end(self, rank: int, how: str) -> None:
        """Note that a rank has ended, e.g. with exit code 0."""
        if rank in self._ranks:
            self._ranks[rank].ended = how

    def hold(self, now: float) -> None:
        """Nothing counts now: somebody sits in a debugger, or the run is being stopped."""
        for rank in self._ranks.values():
            rank.active_at = now
        self._warned = None
        self._ask_at = now + self.limits.floor_s / 2

    # What a start looks like.

    def rests(self, now: float) -> dict[int, float]:
        """Return for how many seconds each rank that lives has done nothing; empty until all were told of."""
        live = self._live()
        if any(rank.seen is None for rank in live.values()):
            return {}
        return {number: rank.still_s(now) for number, rank in live.items()}

    @property
    def has_steps(self) -> bool:
        """Say whether a rank of this attempt has done a step."""
        return any(rank.seen is not None and rank.seen.steps_here for rank in self._ranks.values())

    def ended(self) -> dict[int, str]:
        """Return the ranks that have ended, each with how."""
        return {number: r.ended for number, r in self._ranks.items() if r.ended is not None}

    # What is due.

    def limit_s(self, ranks: Container[int] | None = None, *, least: bool = False) -> float:
        """Return how long these ranks may stand now, or all of them; with `least`, the one of them that may least."""
        limits, live = self.limits, self._live()
        seen = [rank.seen for rank in live.values()]
        if any(one is None or one.beat_age_s is None for one in seen):
            return limits.blind_s
        known = [one for one in seen if one is not None]
        of = known if ranks is None else [one for one in known if one.rank in ranks]
        long = (one.steps_here < NUM_FIRST_STEPS or one.phase in _LONG_PHASES for one in of)
        if all(long) if least else any(long):
            return limits.ceiling_s
        slowest_s = max((one.p99_s for one in known), default=0.0)
        return min(max(limits.floor_s, FACTOR * slowest_s), limits.ceiling_s)

    def must_ask(self, now: float) -> bool:
        """Say whether the stacks of all ranks are wanted now; once it has, not again for a while."""
        live = self._live()
        if not live or any(rank.seen is None for rank in live.values()):
            return False
        limit_s = self.limit_s(least=True)  # who waits is seen in the stacks
        if not self._is_suspicious(now, limit_s):
            self._warned, self._num_asked = None, 0
            return False
        if now < self._ask_at:
            return False
        self._num_asked += 1  # who is asked in vain is asked less often
        pause_s = limit_s / 4 * 2 ** min(self._num_asked - 1, 5)
        self._ask_at = now + min(pause_s, self.limits.ceiling_s / 4)
        return True

    def _is_suspicious(self, now: float, limit_s: float) -> bool:
        live = self._live().values()
        if any(_is_stopped(r) and r.still_s(now) >= self.limits.floor_s / 2 for r in live):
            return True
        if self._is_blind():
            return all(rank.still_s(now) >= limit_s / 2 for rank in live)
        return any(rank.silent_s(now) >= limit_s / 2 for rank in live)

    def _live(self) -> dict[int, _Rank]:
        return {number: rank for number, rank in self._ranks.items() if rank.ended is None}

    def _is_blind(self) -> bool:
        live = self._live().values()
        return any(rank.seen is None or rank.seen.beat_age_s is None for rank in live)

    # What the stacks show.

    def judge(self, now: float, standings: Mapping[int, tuple[StackReading, str]]) -> Judgement:
        """Return what follows from where the ranks stand.

        Args:
            now: The time.
            standings: Rank -> what it does, and where it sleeps in the kernel.
        """
        seen = self._seen(now, standings)
        waiting = [one for one in seen if self._is_waiting(now, one)]
        others = [one for one in seen if one not in waiting]
        guilty, limit_s = self._guilty(now, waiting, others)
        if not guilty:
            self._warned = None
            return Judgement(verdict=HangVerdict.NOTHING, sentence=tell(seen))
        silent_s = min(self._stood_s(now, one.rank) for one in guilty)
        return self._conclude(now, seen, guilty, limit_s, silent_s)

    def _conclude(
        self, now: float, seen: list[Seen], guilty: list[Seen], limit_s: float, silent_s: float
    ) -> Judgement:
        mark = tuple((one.rank, one.standing.doing, one.standing.place) for one in guilty)
        first = guilty[0]
        # Somebody has stopped the whole job: that is on purpose.
        all_are_stopped = len(seen) > 1 and all(
            one.standing.doing is RankActivity.STOPPED for one in seen
        )
        verdict, left_s = HangVerdict.NOTHING, max(limit_s - silent_s, limit_s / 8)
        if self._warned != mark:
            verdict = HangVerdict.WARN if silent_s >= limit_s / 2 else HangVerdict.NOTHING
            self._warned = mark if verdict is HangVerdict.WARN else None
            if verdict is HangVerdict.WARN:  # who is at the limit by now is seen once more
                self._ask_at = now + left_s
        elif silent_s >= limit_s and not all_are_stopped:
            verdict = HangVerdict.END
        elif silent_s < limit_s:  # the promised moment, whatever pause `must_ask` has taken
            self._ask_at = min(self._ask_at, now + max(limit_s - silent_s, _LOOK_AGAIN_S))
        return Judgement(
            verdict=verdict,
            sentence=tell(seen),
            headline=_headline(seen, guilty, silent_s),
            rank=first.rank,
            node=first.node,
            standing=first.standing,
            silent_s=silent_s,
            limit_s=limit_s,
            left_s=left_s,
            may_pass=len(guilty) == len(seen) or _is_of_surroundings(first.standing),
        )

    def _seen(self, now: float, standings: Mapping[int, tuple[StackReading, str]]) -> list[Seen]:
        found = []
        for number, rank in sorted(self._live().items()):
            standing, kernel = standings.get(number, (StackReading(doing=RankActivity.UNKNOWN), ""))
            since_s = self._stood_s(now, number)
            found.append(
                Seen(rank=number, node=rank.node, standing=standing, since_s=since_s, kernel=kernel)
            )
        return found

    def _stood_s(self, now: float, number: int) -> float:
        rank = self._ranks[number]
        if rank.ended is not None:  # as long as the others have waited for it
            return min((other.silent_s(now) for other in self._live().values()), default=0.0)
        if _is_stopped(rank):
            return rank.still_s(now)
        return rank.silent_s(now)

    def _is_waiting(self, now: float, one: Seen) -> bool:
        """Say whether a rank waits for others; a stack that may be a wait is one when the processor rests."""
        standing = one.standing
        if standing.doing is not RankActivity.WAITS:
            return False
        rests = self._ranks[one.rank].still_s(now) >= min(self.limits.floor_s / 4, _RESTS_S)
        return standing.is_sure or rests

    def _guilty(
        self, now: float, waiting: list[Seen], others: list[Seen]
    ) -> tuple[list[Seen], float]:
        """Return who stands still, the most certain first, and how long that may last."""
        limit_s = self.limit_s()
        if any(one.standing.doing is RankActivity.DEBUGGED for one in others):
            return [], limit_s
        stopped = [one for one in others if one.standing.doing is RankActivity.STOPPED]
        if stopped:
            return stopped, min(limit_s, self.limits.floor_s)
        if not others:
            return self._guilty_of_waits(now, waiting, limit_s)
        limit_s = self.limit_s({one.rank for one in others})
        if any(not self._stands(now, one, limit_s) for one in others):
            return [], limit_s
        if self._is_blind() and not waiting:
            return [], limit_s  # it may do nothing on purpose
        starts = any(one.standing.what in _STARTS for one in waiting)
        if starts or any(one.standing.doing in _MAY_TAKE_LONG for one in others):
            limit_s = self.limits.ceiling_s
        first = [one for one in others if one.standing.doing is RankActivity.UNINTERRUPTIBLE]
        return first + [one for one in others if one not in first], limit_s

    def _stands(self, now: float, one: Seen, limit_s: float) -> bool:
        """Say whether a rank has done nothing for half of the limit, as the kernel counts."""
        rank = self._ranks[one.rank]
        half_s = limit_s / 2
        if rank.silent_s(now) < half_s:
            return False
        # Its counters are read every two seconds, and the last step still counts in the first of them.
        return rank.still_s(now) >= half_s - min(4.0, half_s / 2)

    def _guilty_of_waits(
        self, now: float, waiting: list[Seen], limit_s: float
    ) -> tuple[list[Seen], float]:
        """All wait: for one that has ended, or in different places, or for the network."""
        if any(self._ranks[one.rank].silent_s(now) < limit_s / 2 for one in waiting):
            return [], limit_s
        ended = [number for number, rank in self._ranks.items() if rank.ended is not None]
        if ended:
            number = ended[0]
            rank = self._ranks[number]
            standing = StackReading(doing=RankActivity.UNKNOWN, what=rank.ended or "")
            return [Seen(rank=number, node=rank.node, standing=standing)], limit_s
        groups: dict[tuple[str, str], list[Seen]] = {}
        for one in waiting:
            groups.setdefault((one.standing.what, one.standing.place), []).append(one)
        return min(groups.values(), key=len), limit_s


def _is_of_surroundings(standing: StackReading) -> bool:
    silent = standing.doing is RankActivity.UNKNOWN and not standing.what
    return silent or standing.doing in (RankActivity.STOPPED, RankActivity.UNINTERRUPTIBLE)


def was_active(before: RankProgress, now: RankProgress, elapsed_s: float) -> bool:
    """Say whether a rank has moved between two words of it: a step, its phase, its processor, its data."""
    if now.steps_here != before.steps_here or now.phase is not before.phase:
        return True
    if now.state == "R":  # it would run, also where others leave it no processor
        return True
    used_s = now.active_s - before.active_s
    moved_bytes = abs(now.io_bytes - before.io_bytes)  # what has ended is no longer counted
    elapsed_s = max(elapsed_s, 0.1)
    return used_s > _ACTIVE_SHARE * elapsed_s or moved_bytes > _ACTIVE_IO_BYTES_PER_S * elapsed_s


def _is_stopped(rank: _Rank) -> bool:
    return rank.seen is not None and rank.seen.state == "T"


def _headline(seen: Sequence[Seen], guilty: Sequence[Seen], silent_s: float) -> str:
    """Return `rank 2 stood still for 74 s while 3 ranks waited in all_reduce`."""
    numbers = {one.rank for one in guilty}
    others = [one for one in seen if one.rank not in numbers]
    names = name_ranks(sorted(numbers)) if len(numbers) <= _MAX_NAMED else f"{len(numbers)} ranks"
    what = _did(guilty, silent_s)
    waits = sorted(
        {one.standing.what for one in others if one.standing.doing is RankActivity.WAITS}
    )
    num_waiting = sum(one.standing.doing is RankActivity.WAITS for one in others)
    if not others and guilty and guilty[0].standing.doing is RankActivity.WAITS:
        return f"{_all(len(guilty))} waited in {guilty[0].standing.what} for {silent_s:.0f} s"
    if not num_waiting:
        return f"{names} {what}"
    ranks = "1 rank" if num_waiting == 1 else f"{num_waiting} ranks"
    return f"{names} {what} while {ranks} waited in {' and '.join(waits[:3])}"


def _did(guilty: Sequence[Seen], silent_s: float) -> str:
    standing, several = guilty[0].standing, len(guilty) > 1
    if standing.doing is RankActivity.STOPPED:
        return f"{'were' if several else 'was'} stopped (SIGSTOP) for {silent_s:.0f} s"
    if standing.doing is RankActivity.WAITS:
        return f"waited in {standing.what} for {silent_s:.0f} s"
    if standing.doing is RankActivity.UNKNOWN and standing.what:
        return f"had ended ({standing.what})"
    return f"stood still for {silent_s:.0f} s"


def _all(number: int) -> str:
    return "the one rank" if number == 1 else f"all {number} ranks"


# Which rank is slower than the others, and in what.
#
# In synchronous training all ranks make their steps at the same pace, so a rank's own work is what counts: what its
# step takes less what it waits for others. Where the library measures its waits (DDP on processors, `train/wrap.py`), the
# rank that waits least shows what the sums themselves take, and the others' waits are what they take beyond it. Elsewhere
# the rank that needs least after its forward is taken for one that does not wait; what the others need more there is
# counted as waiting, so that a rank which is slow after its forward can't be told from those that wait for it.


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
