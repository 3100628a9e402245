"""A job: the request to a scheduler, the scheduler's view of it, and the environment inside it.

No scheduler's own terms are used here: `engines` translates. Sizes are bytes, times seconds.
"""

import enum
from dataclasses import dataclass, field
from typing import Literal

from torchmuster.core.model.states import JobState
from torchmuster.core.model.text import few_of


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


WayOfSite = Literal["pbsdsh", "mpiexec", "pbs_tmrsh", "ssh"]  # what a site may choose from


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDependency:
    """A job that has to end first."""

    job_id: str
    kind: AfterKind = AfterKind.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChunk:
    """Equal nodes of a job, with the resources of each; None or 0 for no request.

    Attributes:
        workers: Processes that will train on each, so it needs as many CPUs where none are asked for.
        extra: Keys of the site: of a PBS chunk (`sales_op=blanca`), options of sbatch, or of pods their `image`.
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
        size: How many; at least 2, since PBS has no array of one.
        parallel: How many may run at a time; None for as many as the scheduler likes.
    """

    size: int
    parallel: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """One job, complete.

    Attributes:
        head: Command words that start on the first node; `$PYTHON` as first word is `python`.
        about: What the head does, as a comment of the script.
        log_path: What the job writes, absolute; appended to when it starts again.
        min_nodes: The least that will do; None when all of `chunks` are needed.
        outlives_nodes: What runs in it goes on without some of them.
        max_nodes: The most that are of use; None for the nodes of `chunks`.
        queue: Partition of Slurm, queue of PBS.
        constraint: Features that every node has, in Slurm's own syntax.
        directives: Lines of the site as the scheduler takes them: `--reservation=x`, `-l place=excl`.
        own_keys: What the site says by keys that mean something to this scheduler alone.
        run_id: Of the run, where the job is to tell it to those who find the job.
        brings: Files that travel with the job where nodes don't see the client's: name there, path here. Those in a
            further parcel have its number before their name, `1/package.txz`.
        shares: The name of the job that sends `brings` for this one, too.
        first_index: The number of its first node among those of all jobs that share.
        package_copy: A folder beside the runs for torchmuster on nodes that lack it; it is unpacked from `.zip`.
        setup: Shell lines before the head: `module load cuda/12.6`.
        node_lines: Lines that the agents run on every node; the script has them only for a first node that lacks
            `python`. None where there are no agents that do so.
        warn_s: How long before its time limit the job wants to hear of it (SIGUSR1).
        array: The job is an array; each of its elements runs the head, which reads its number from its environment.
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
    """What a scheduler's reason for a wait means.

    Attributes:
        never: The job can't start, however long it waits.
        may_be_never: So it is where there is less than the job asks for; that has to be looked at.
        patience_s: How long it may stand before it is given up; None for as long as any.
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
        reason: Why it waits or ended, in the scheduler's own words.
        wait: What that means, where the engine's table knows it.
        start_estimate: When it is expected to start, as the scheduler writes it.
        exit_code: Of the head; None where the scheduler doesn't say, 128 + n for signal n.
        nodes: The names of its nodes, none before it has started.
    """

    job_id: str
    state: JobState
    reason: str | None = None
    start_estimate: str | None = None
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()
    wait: Wait | None = None


def describe_job(view: JobView) -> str:
    """Return a sentence on the state of a job, with the meaning of its reason and the scheduler's own word for it."""
    text = f"job {view.job_id} is {view.state.value.replace('_', ' ')}"
    if view.wait is not None:
        text += f": {view.wait.sentence}"
    # Of a job that runs it says how it was started, or still why it had not been.
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
    """A node that a job has got.

    Attributes:
        slot: Its first line in PBS's node file, from 0: what `pbsdsh -n` takes.
        het_group: Its component of a heterogeneous Slurm job.
        gpus: None where the scheduler does not tell.
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
        own_node: The node of this process, where the scheduler names it.
    """

    job_id: str
    nodes: tuple[AllocatedNode, ...] = field(default=())
    ends_at: float | None = None
    own_node: str | None = None
