"""The story of a run: immutable values, all text printable and cut to a length, all lists bounded.

`read.py` makes them; `page.py` shows them, `--json` prints them. Times are seconds since 1970 (UTC) unless a name says
otherwise, durations are seconds.
"""

from dataclasses import dataclass, field

from torchmuster.core.model.events import AttemptNode
from torchmuster.launcher.model.run import RankEnd, RecordMoment
from torchmuster.launcher.owner.origin import CodeVersion

LEAST_STEPS = 20  # of each rank, before one is called slow
FORM = 1  # of `--json`: a reader can tell whether it knows all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatRan:
    """The program, who asked for it, and where it ran.

    Attributes:
        command: Its words, values that look secret replaced.
        software: Versions and hardware as the nodes have reported them before the start, one entry for each kind of node.
        environment: Variables of the plan; values whose name is a secret's are replaced.
        ran: The project's files whose code rank 0 has run, as it said at its last end: path, SHA-256, and whether
            the file has changed since the worker began.
        num_ran_left_out: How many more there were.
        packages: What is installed for its interpreter on the client's machine, as `numpy==2.4.6`.
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
        sentence: The error, or what a success leaves to be said.
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
class AttemptTold:
    """One attempt.

    Attributes:
        workers_at: When all workers had started.
        training_at: When the training library began or resumed, at `first_step`.
        last_step: The last that the record mentions.
        kept_step: What the next attempt, or a restart, goes on from.
        kept_at: When the training came to that step.
        why: Why it was started.
        ended_by: In one sentence; empty while it runs.
        has_failed: Whether a failure ended it.
        evidence: Lines of what the first failing rank said.
        ends: Ranks that ended by themselves, the first ones in their order.
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
class SeriesTold:
    """A metric over the steps that count; at most a few thousand points, extremes kept.

    Attributes:
        values: None where a value was not finite.
        num_points: How many were recorded.
        redone_steps, redone_values: Points of steps that a later attempt did again.
        not_finite: The first steps with `nan`, `inf` or `-inf`.
        bad_since: The step since which no value is finite, and the word for the last; None where that is finite.
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
class EpochTold:
    """An epoch with the proof of what it saw; `samples` is None without a loader of ours."""

    epoch: int
    step: int
    elapsed_s: float | None
    values: tuple[tuple[str, float | None], ...]
    samples: int | None = None
    lost: int = 0
    twice: int = 0
    is_whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTold:
    """A snapshot: how long the loop waited, and when it was complete; None: the record does not say that it ever was."""

    step: int
    at: float
    blocked_s: float
    done_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTold:
    """What the training library has recorded.

    Attributes:
        step: The last that counts.
        steps_done: All steps, those done twice counted twice.
        order: What decides the order of the samples, by name.
        folder: Of the snapshots.
    """

    step: int
    steps_done: int
    is_finished: bool
    series: tuple[SeriesTold, ...] = ()
    step_time: SeriesTold | None = None
    epochs: tuple[EpochTold, ...] = ()
    num_epochs: int = 0
    saves: tuple[SaveTold, ...] = ()
    num_saves: int = 0
    blocked_s: float = 0.0
    order: tuple[tuple[str, str], ...] = ()
    folder: str = ""
    num_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTotals:
    """What a rank did in all attempts together, in seconds; `own_s` is a step's work of its own, without waiting for others.

    Attributes:
        after_s: After the forward: backward, optimizer, whatever else the script does until its next batch.
        told_steps: The steps whose phases are known; the seconds of phases are those of them.
        over_median: Share by which `own_s` is above the median of all ranks.
    """

    rank: int
    node: str
    steps: int
    told_steps: int = 0
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
    """A quantity over time, over all ranks: least, median and most in each span of time; None where nothing is known."""

    name: str
    unit: str
    least: tuple[float | None, ...]
    median: tuple[float | None, ...]
    most: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksTold:
    """How the ranks stood over time, from `samples.jsonl`.

    Attributes:
        began: The start of the first span of time.
        width_s: The length of each.
        own_ms: By rank, then by span: a step's own work in milliseconds.
        has_phases: Whether the script uses the training library, which alone tells phases.
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
class PairTold:
    """The connection of two nodes, by their places in the list."""

    source: int
    target: int
    why: str | None = None
    latency_us: float | None = None
    mb_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTold:
    """The network that the workers used, and what was measured between nodes."""

    sentence: str
    nodes: tuple[str, ...] = ()
    pairs: tuple[PairTold, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the run took, in node seconds: a node that is held for an hour takes 3600, whatever it does.

    Attributes:
        held_s: All of it, from the start of the run to its end.
        worker_s: The same, counted in workers.
        starting_s: Before the first training step: nodes, imports, the start of workers, what the script loads.
        kept_s: Training whose steps count.
        lost_s: Training whose steps were done again, or were never saved.
        restarting_s: Between the end of an attempt and the first training of the next.
        saving_s: The part of `kept_s` and `lost_s` in which the loop waited for a snapshot.
        most_kept_s: What may have been kept where nobody knows what a failed attempt has left; else `kept_s`.
        goodput: `kept_s` of `held_s`; None where nothing was held.
        most_goodput: `most_kept_s` of `held_s`.
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
class TaskTold:
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
class GroupTold:
    """A group of a workflow."""

    name: str
    state: str
    why: str
    after: tuple[str, ...]
    tasks: tuple[TaskTold, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTold:
    """A member of a sweep.

    Attributes:
        values: In the order of the sweep's names.
        metric: The last value; None where there is none, or none that is finite.
        not_finite: `nan`, `inf` or `-inf`, where the last value is that.
        step: Of that value.
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
class SweepTold:
    """What a sweep has tried.

    Attributes:
        names: What varies.
        metric: By which it is judged; empty where it has none.
        goal: `min` or `max`.
        best: The number of the member with the best last value.
        counted: How many members are in each state.
        members: The best first.
    """

    names: tuple[str, ...]
    metric: str
    goal: str
    best: int | None
    counted: tuple[tuple[str, int], ...]
    members: tuple[MemberTold, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that the record of a run tells.

    Attributes:
        num_attempts: All; the list leaves out those in the middle of very many.
        causes: What ended the attempts, and how often.
        trainings: Of a workflow: the stories of its training tasks, by task.
        gaps: What is not known, and why, a sentence each.
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
    attempts: tuple[AttemptTold, ...] = ()
    num_attempts: int = 0
    causes: tuple[tuple[str, int], ...] = ()
    moments: tuple[RecordMoment, ...] = ()
    num_moments: int = 0
    training: TrainingTold | None = None
    ranks: RanksTold | None = None
    network: NetworkTold | None = None
    cost: Cost = field(default_factory=Cost)
    groups: tuple[GroupTold, ...] = ()
    trainings: "tuple[tuple[str, Story], ...]" = ()
    sweep: SweepTold | None = None
    gaps: tuple[str, ...] = ()

    @property
    def slowest(self) -> RankTotals | None:
        """Return the rank whose own work takes longest; None where fewer than two are known, or some did too few steps to tell."""
        known = [t for t in (self.ranks.totals if self.ranks else ()) if t.own_s is not None]
        if any(t.told_steps < LEAST_STEPS for t in known):
            return None
        return max(known, key=lambda t: t.own_s or 0.0) if len(known) > 1 else None
