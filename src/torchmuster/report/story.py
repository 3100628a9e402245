"""The story of a run: immutable values with printable, truncated texts and bounded lists.

`read.py` and `find.py` make them; `page.py` shows them, `--json` prints them. Times are seconds
since 1970 (UTC) unless a name says otherwise; durations are seconds. How numbers and times read on
the page and in a comparison is at the end.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from torchmuster.core.model.events import AttemptNode
from torchmuster.launcher.model.run import RankEnd, RecordMoment
from torchmuster.launcher.owner.origin import CodeVersion

LEAST_STEPS = 20  # that each rank must have before one is called slow
FORM = 1  # the format version of `--json`


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatRan:
    """The program, who started it, and where it ran.

    Attributes:
        command: Its command line, with values that look secret replaced.
        software: Versions and hardware that the nodes reported before the start, one entry for
            each kind of node.
        environment: Variables of the plan; the values of secrets are replaced.
        ran: The project's files that rank 0 has run, as reported at its last end: path, SHA-256,
            and whether the file has changed since the worker began.
        num_ran_left_out: The number of further such files.
        packages: The packages of its interpreter on the client's machine, as `numpy==2.4.6`.
    """

    command: tuple[str, ...] = ()
    folder: str = ""
    interpreter: str = ""
    engine: str = ""
    jobs: tuple[str, ...] = ()
    user: str = ""
    host: str = ""
    submitted: float | None = None
    num_nodes: str = ""
    workers_per_node: tuple[int, ...] = ()
    torchmuster: str = ""
    software: tuple[dict[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()
    limits: tuple[tuple[str, str], ...] = ()
    code: CodeVersion | None = None
    why_no_code: str = ""
    ran: tuple[tuple[str, str, bool], ...] = ()
    num_ran_left_out: int = 0
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the run ended, or that it has not.

    Attributes:
        sentence: The error, or a note on a success.
        because: The evidence, as lines.
        go_on: How to continue.
    """

    state: str
    is_final: bool
    exit_code: int | None = None
    elapsed_s: float | None = None
    sentence: str = ""
    at: str = ""
    because: tuple[str, ...] = ()
    hint: str = ""
    notes: tuple[str, ...] = ()
    go_on: str = ""
    restarts_spent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStory:
    """One attempt.

    Attributes:
        workers_at: When all workers had started.
        training_at: When the training library began or resumed, at `first_step`.
        last_step: The last step in the record.
        kept_step: The step from which the next attempt, or a restart, continues.
        kept_at: When the training reached that step.
        why: Why it was started.
        ended_by: What ended it, in one sentence; empty while it runs.
        has_failed: Whether a failure ended it.
        evidence: Lines from the first rank that failed.
        ends: Ranks that ended by themselves, the first ones in order.
    """

    number: int
    began: float
    ended: float | None = None
    workers_at: float | None = None
    training_at: float | None = None
    why: str = ""
    ended_by: str = ""
    has_failed: bool = False
    cause_rank: int | None = None
    cause_node: str = ""
    world_size: int = 0
    nodes: tuple[AttemptNode, ...] = ()
    num_nodes: int = 0
    first_step: int | None = None
    last_step: int | None = None
    kept_step: int | None = None
    kept_at: float | None = None
    evidence: tuple[str, ...] = ()
    ends: tuple[RankEnd, ...] = ()
    num_ends: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesStory:
    """A metric over the steps that count, thinned to a few thousand points with extremes kept.

    Attributes:
        values: The values; None where one was not finite.
        num_points: How many points were recorded.
        redone_steps, redone_values: Points of steps that a later attempt did again.
        not_finite: The first steps with `nan`, `inf` or `-inf`.
        bad_since: The step since which no value is finite, and the last value as text; None if
            the last value is finite.
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    num_points: int
    redone_steps: tuple[int, ...] = ()
    redone_values: tuple[float | None, ...] = ()
    not_finite: tuple[tuple[int, str], ...] = ()
    num_not_finite: int = 0
    bad_since: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStory:
    """An epoch with its count of samples; `samples` is None without our loader."""

    epoch: int
    step: int
    elapsed_s: float | None
    values: tuple[tuple[str, float | None], ...]
    samples: int | None = None
    lost: int = 0
    twice: int = 0
    is_whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStory:
    """A snapshot: how long the loop waited, and when it was complete; None if never recorded."""

    step: int
    at: float
    blocked_s: float
    done_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStory:
    """What the training library has recorded.

    Attributes:
        step: The last step that counts.
        steps_done: The number of steps done; those done twice count twice.
        order: The settings that decide the order of the samples, by name.
        folder: The snapshot folder.
    """

    step: int
    steps_done: int
    is_finished: bool
    series: tuple[SeriesStory, ...] = ()
    step_time: SeriesStory | None = None
    epochs: tuple[EpochStory, ...] = ()
    num_epochs: int = 0
    saves: tuple[SaveStory, ...] = ()
    num_saves: int = 0
    blocked_s: float = 0.0
    order: tuple[tuple[str, str], ...] = ()
    folder: str = ""
    num_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTotals:
    """What a rank did in all attempts together, in seconds.

    Attributes:
        after_s: After the forward pass: backward, optimizer, and the rest until the next batch.
        phased_steps: The number of steps whose phases are known; the phases' seconds are theirs.
        own_s: The rank's own work per step, without waiting for others.
        over_median: The share by which `own_s` is above the median of all ranks.
    """

    rank: int
    node: str
    steps: int
    phased_steps: int = 0
    data_s: float = 0.0
    forward_s: float = 0.0
    after_s: float = 0.0
    wait_s: float = 0.0
    save_s: float = 0.0
    evaluate_s: float = 0.0
    own_s: float | None = None
    over_median: float | None = None
    cpus: float | None = None
    rss_mib: int | None = None
    io_mib: float | None = None
    gpu_percent: float | None = None
    gpu_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A quantity in each time span: least, median and most over all ranks; None if unknown."""

    name: str
    unit: str
    least: tuple[float | None, ...]
    median: tuple[float | None, ...]
    most: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStory:
    """The ranks over time, from `samples.jsonl`.

    Attributes:
        began: The start of the first time span.
        width_s: The length of each span.
        own_ms: Own work per step in milliseconds, by rank, then by span.
        has_phases: Whether phases are known, which only the training library reports.
    """

    began: float
    width_s: float
    num_spans: int
    num_samples: int
    has_phases: bool
    totals: tuple[RankTotals, ...] = ()
    own_ms: tuple[tuple[float | None, ...], ...] = ()
    bands: tuple[Band, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePair:
    """The connection of two nodes, given by their indices in the list."""

    source: int
    target: int
    why: str | None = None
    latency_us: float | None = None
    mb_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStory:
    """The network that the workers used, and what was measured between nodes."""

    sentence: str
    nodes: tuple[str, ...] = ()
    pairs: tuple[NodePair, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of the run in node seconds: a node that is held for an hour costs 3600.

    Attributes:
        held_s: The total, from the start of the run to its end.
        worker_s: The same, counted in workers.
        starting_s: Before the first training step: nodes, imports, workers' start, loading.
        kept_s: Training whose steps count.
        lost_s: Training whose steps were done again, or were never saved.
        restarting_s: Between the end of an attempt and the first training of the next.
        saving_s: The part of `kept_s` and `lost_s` in which the loop waited for a snapshot.
        most_kept_s: `kept_s` plus the training for which it is unknown whether it was saved.
        goodput: `kept_s / held_s`; None if no node was held.
        most_goodput: `most_kept_s / held_s`.
    """

    held_s: float = 0.0
    worker_s: float = 0.0
    starting_s: float = 0.0
    kept_s: float = 0.0
    lost_s: float = 0.0
    restarting_s: float = 0.0
    saving_s: float = 0.0
    most_kept_s: float = 0.0
    goodput: float | None = None
    most_goodput: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStory:
    """A task of a workflow; `training` is the folder of its own run's record, if it made one."""

    name: str
    state: str
    attempts: int
    began: float | None = None
    ended: float | None = None
    why: str = ""
    code: int | None = None
    is_lead: bool = False
    output: str = ""
    training: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStory:
    """A group of a workflow."""

    name: str
    state: str
    why: str
    after: tuple[str, ...]
    tasks: tuple[TaskStory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStory:
    """A member of a sweep.

    Attributes:
        values: Its values, in the order of the sweep's names.
        metric: The last value of the metric; None if there is none, or it is not finite.
        not_finite: The last value as text if it is `nan`, `inf` or `-inf`.
        step: The step of that value.
    """

    number: int
    values: tuple[str, ...]
    state: str
    metric: float | None = None
    not_finite: str = ""
    step: int | None = None
    attempts: int = 0
    elapsed_s: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStory:
    """The members of a sweep and their outcome.

    Attributes:
        names: The names of the values that vary.
        metric: The name of the metric; empty if there is none.
        goal: `min` or `max`.
        best: The number of the member with the best last value.
        counted: The number of members in each state.
        members: The members, the best first.
    """

    names: tuple[str, ...]
    metric: str
    goal: str
    best: int | None
    counted: tuple[tuple[str, int], ...]
    members: tuple[MemberStory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Everything that the record of a run contains.

    Attributes:
        num_attempts: The number of all attempts; a long list has only the first and the last.
        causes: What ended the attempts, and how often.
        trainings: For a workflow: the stories of its training tasks, by task.
        gaps: What is not known, and why, in one sentence each.
    """

    form: int = FORM
    made: float
    made_by: str
    kind: str
    run_id: str
    name: str
    folder: str
    what: WhatRan
    ending: Ending
    began: float | None = None
    ended: float | None = None
    attempts: tuple[AttemptStory, ...] = ()
    num_attempts: int = 0
    causes: tuple[tuple[str, int], ...] = ()
    moments: tuple[RecordMoment, ...] = ()
    num_moments: int = 0
    training: TrainingStory | None = None
    ranks: RanksStory | None = None
    network: NetworkStory | None = None
    cost: Cost = field(default_factory=Cost)
    groups: tuple[GroupStory, ...] = ()
    trainings: "tuple[tuple[str, Story], ...]" = ()
    sweep: SweepStory | None = None
    gaps: tuple[str, ...] = ()

    @property
    def slowest(self) -> RankTotals | None:
        """Return the rank with the most own work; None if too few ranks or steps are known."""
        known = [t for t in (self.ranks.totals if self.ranks else ()) if t.own_s is not None]
        if any(t.phased_steps < LEAST_STEPS for t in known):
            return None
        return max(known, key=lambda t: t.own_s or 0.0) if len(known) > 1 else None


def node_time(seconds: float, what: str = "node") -> str:
    """Return node seconds as `3.21 node hours`, or below 0.1 hours as `48 node seconds`."""
    if seconds >= 360:
        return f"{seconds / 3600:.2f} {what} hours"
    return f"{seconds:.3g} {what} seconds"


def clock(at: float | None) -> str:
    """Return a time in UTC, to the second; `-` if it is not known."""
    if at is None:
        return "-"
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "-"


def figure(value: float | None) -> str:
    """Return a number with four significant digits; `-` if it is not known."""
    if value is None:
        return "-"
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3e}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share as `92 %`; `-` if it is not known."""
    return "-" if share is None else f"{share * 100:.{digits}f} %"
