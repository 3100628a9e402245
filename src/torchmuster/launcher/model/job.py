"""A job: the request to a scheduler, the scheduler's view of it, and the allocation inside it.

The terms here belong to no scheduler: `engines` translates. Sizes are in bytes, times in seconds.
"""

import enum
from dataclasses import dataclass, field
from typing import Literal

from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import few_of


class JobState(enum.Enum):
    """The state of a scheduler's job, in the same words for every scheduler."""

    PENDING = "pending"
    HELD = "held"
    SUSPENDED = "suspended"  # it has its nodes, and waits to be resumed
    RUNNING = "running"
    ENDING = "ending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILED = "node_failed"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    UNKNOWN = "unknown"  # an unknown word, or none: never a success

    @property
    def is_final(self) -> bool:
        """Return whether the job is over; a REQUEUED one comes back.

        A preempted job that comes back is REQUEUED: Slurm records PREEMPTED for it only in its
        accounting (`_job_requeue_op`, 22.05).
        """
        return self not in _WITHOUT_RESULT or self in _ENDS

    @property
    def of_run(self) -> RunState:
        """Return the state of a run without a result: never a success."""
        return _WITHOUT_RESULT.get(self, RunState.LOST)


_WITHOUT_RESULT = {
    JobState.PENDING: RunState.WAITING,
    JobState.HELD: RunState.WAITING,
    JobState.SUSPENDED: RunState.WAITING,
    JobState.REQUEUED: RunState.WAITING,
    JobState.UNKNOWN: RunState.UNKNOWN,
    JobState.RUNNING: RunState.RUNNING,
    JobState.ENDING: RunState.RUNNING,
    JobState.PREEMPTED: RunState.PREEMPTED,
    JobState.CANCELLED: RunState.CANCELLED,
    JobState.TIMED_OUT: RunState.LOST,
}

_ENDS = (JobState.CANCELLED, JobState.TIMED_OUT, JobState.PREEMPTED)


class AfterKind(enum.Enum):
    """The condition on the end of another job; sbatch and qsub use the same words."""

    OK = "afterok"
    ANY = "afterany"


class NodeLauncher(enum.Enum):
    """The command that starts a process on another node of the allocation."""

    SRUN = "srun"
    PBSDSH = "pbsdsh"
    TMRSH = "pbs_tmrsh"
    MPIEXEC = "mpiexec"
    SSH = "ssh"


WayOfSite = Literal["pbsdsh", "mpiexec", "pbs_tmrsh", "ssh"]  # the launchers that a site may choose


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDependency:
    """A job that has to end first."""

    job_id: str
    kind: AfterKind = AfterKind.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChunk:
    """Equal nodes of a job, with the resources of each; None or 0 for no request.

    Attributes:
        workers: Training processes on each node; each needs a CPU where `cpus` is None.
        extra: The site's keys: for a PBS chunk (`sales_op=blanca`), for sbatch, or a pod's `image`.
    """

    num_nodes: int = 1
    cpus: int | None = None
    workers: int = 1
    gpus: int = 0
    memory_bytes: int | None = None
    storage_bytes: int | None = None
    extra: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArray:
    """Elements of a job, numbered from 0.

    Attributes:
        size: Number of elements; at least 2, since PBS has no array of one.
        parallel: How many may run at a time; None leaves it to the scheduler.
    """

    size: int
    parallel: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """One job, complete.

    Attributes:
        head: Command that starts on the first node; `$PYTHON` as first argument is `python`.
        about: What the head does, for a comment in the script.
        log_path: Absolute path of the job's output; appended to when the job starts again.
        min_nodes: Smallest useful number of nodes; None when all of `chunks` are needed.
        outlives_nodes: The run continues after the loss of some nodes.
        max_nodes: Largest useful number of nodes; None for the nodes of `chunks`.
        queue: Partition of Slurm, queue of PBS.
        constraint: Features that every node has, in Slurm's own syntax.
        directives: The site's lines in the scheduler's syntax: `--reservation=x`, `-l place=excl`.
        own_keys: The site's keys that mean something only to this scheduler.
        run_id: The run's id, if the job is to show it to those who find the job.
        brings: (name there, path here) of files sent with the job to nodes that don't share the
            client's. Files in a
            further parcel have its number before their name, `1/package.txz`.
        shares: Name of the job that also sends `brings` for this one.
        first_index: Index of its first node among the nodes of all jobs that share.
        package_copy: A folder next to the runs for torchmuster on nodes that lack it; unpacked from
            `.zip`.
        setup: Shell lines before the head: `module load cuda/12.6`.
        node_lines: Lines that the agents run on every node; the script has them only for a first
            node that lacks
            `python`. None if no agents run them.
        warn_s: How long before its time limit the job is to get SIGUSR1.
        array: The job is an array; each element runs the head, which reads its number from its
            environment.
    """

    name: str
    chunks: tuple[NodeChunk, ...]
    head: tuple[str, ...]
    log_path: str
    python: str = "/usr/bin/python3"
    about: str = ""
    min_nodes: int | None = None
    outlives_nodes: bool = False
    max_nodes: int | None = None
    time_limit_s: float | None = None
    after: tuple[JobDependency, ...] = ()
    queue: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodes_excluded: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    own_keys: tuple[tuple[str, str], ...] = ()
    run_id: str | None = None
    brings: tuple[tuple[str, str], ...] = ()
    shares: str | None = None
    first_index: int = 0
    package_copy: str | None = None
    setup: tuple[str, ...] = ()
    node_lines: tuple[str, ...] | None = None
    requeue: bool = True
    warn_s: float | None = None
    array: "JobArray | None" = None

    @property
    def num_nodes(self) -> int:
        """Return the maximum number of nodes of the job."""
        return self.max_nodes or sum(chunk.num_nodes for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The meaning of a scheduler's reason for a wait.

    Attributes:
        never: The job can never start, however long it waits.
        may_be_never: The same, if the cluster has less than the job requests; the caller must check
            that.
        patience_s: How long the job may wait for it before it is given up; None for no limit.
    """

    sentence: str
    hint: str | None = None
    never: bool = False
    may_be_never: bool = False
    patience_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A scheduler's view of one job.

    Attributes:
        reason: Why it waits or ended, as the scheduler writes it.
        wait: Meaning of the reason, if the engine's table has it.
        start_estimate: When it is expected to start, as the scheduler writes it.
        exit_code: The head's exit code; None if the scheduler doesn't report it, 128 + n for signal
            n.
        nodes: The names of its nodes; empty before it has started.
    """

    job_id: str
    state: JobState
    reason: str | None = None
    start_estimate: str | None = None
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()
    wait: Wait | None = None


def describe_job(view: JobView) -> str:
    """Return a sentence on a job's state, with its reason's meaning and the scheduler's wording."""
    text = f"job {view.job_id} is {view.state.value.replace('_', ' ')}"
    if view.wait is not None:
        text += f": {view.wait.sentence}"
    # A running job's reason only says how it was started, or why it had waited.
    if view.reason is not None and (view.state is not JobState.RUNNING or view.wait is not None):
        text += f" ({view.reason})"
    if view.start_estimate is not None:
        text += f", expected to start {view.start_estimate}"
    if view.nodes:
        text += f" on {few_of(view.nodes, 8)}"
    if view.wait is not None and view.wait.hint is not None:
        text += f"; {view.wait.hint}"
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedNode:
    """A node that is allocated to a job.

    Attributes:
        slot: Its first line in PBS's node file, from 0: what `pbsdsh -n` takes.
        het_group: Its component of a heterogeneous Slurm job.
        gpus: None if the scheduler does not report it.
    """

    name: str
    cpus: int | None = None
    gpus: int | None = None
    slot: int = 0
    het_group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The job that a process runs in, from its environment.

    Attributes:
        ends_at: The end of the time limit, seconds since 1970.
        own_node: The node of this process, if the scheduler names it.
    """

    job_id: str
    nodes: tuple[AllocatedNode, ...] = field(default=())
    ends_at: float | None = None
    own_node: str | None = None
