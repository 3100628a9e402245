"""A workflow, complete: groups of tasks and the data that flows between them.

These values are what `workflow.json` in the run directory holds. Runtime tokens such as `{{output}}` still stand in
the texts; the agent of a task resolves them just before its command starts.
"""

import enum
from dataclasses import dataclass, field

from torchmuster.core.model.plan import GRACE_S, MAX_RESTARTS, NodeSetup


class ExitAction(enum.Enum):
    """The action after the end of a task's command."""

    COMPLETE = "COMPLETE"
    FAIL = "FAIL"
    RESCHEDULE = "RESCHEDULE"  # again, in a new working place
    RESTART = "RESTART"  # again, in the same working place


class InputKind(enum.Enum):
    """The source of an input."""

    TASK = "task"
    URL = "url"
    DATASET = "dataset"


class OutputKind(enum.Enum):
    """The destination of an output."""

    URL = "url"
    DATASET = "dataset"
    UPDATE_DATASET = "update_dataset"


class TaskNetwork(enum.Enum):
    """Whether the tasks on one machine share its network."""

    SHARED = "shared"
    PRIVATE = "private"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """One entry of `inputs`.

    Attributes:
        source: Task name, URL or dataset reference.
        run_id: The other run that `task: RUN:TASK` names.
        folder: For a dataset, the folder inside `{{input:N}}` that gets it.
    """

    kind: InputKind
    source: str
    run_id: str | None = None
    regex: str | None = None
    folder: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """One entry of `outputs`; `paths` are relative to `{{output}}`, none for all of it."""

    kind: OutputKind
    target: str
    paths: tuple[str, ...] = ()
    regex: str | None = None
    metadata: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """What is uploaded while the task runs."""

    path: str
    url: str
    frequency_s: float
    regex: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """One entry of `files`.

    Attributes:
        content: Text with runtime tokens, or base64.
        tokens: Whether runtime tokens in it are resolved: yes for inline text, no for `localpath`.
    """

    path: str
    content: str
    is_base64: bool = False
    tokens: bool = True
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRule:
    """Exit codes, as ranges with both ends, and what follows them."""

    action: ExitAction
    ranges: tuple[tuple[int, ...], ...]

    def matches(self, code: int) -> bool:
        """Return whether the rule covers this code."""
        return any(low <= code <= high for low, high in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources that a task requests; None for no request."""

    cpu: int | None = None
    gpu: int | None = None
    memory_bytes: int | None = None
    storage_bytes: int | None = None
    platform: str | None = None
    nodes_excluded: tuple[str, ...] = ()
    topology: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A training task, which is a run of its own.

    Attributes:
        nodes: `2`, or `1:3` for a range.
        nproc_per_node: As in the file: the number that `gpu` means is known on the node only.
    """

    nodes: str
    nproc_per_node: str | None
    script: str
    args: tuple[str, ...] = ()
    max_restarts: int = MAX_RESTARTS

    @property
    def min_nodes(self) -> int:
        """Return the minimum number of nodes."""
        return int(self.nodes.partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """Return how many nodes it takes at most."""
        return int(self.nodes.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A secret of a task, as variables or as files in a folder; this contains no values."""

    name: str
    folder: str | None = None
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """One command on one node, or one training run on several."""

    name: str
    lead: bool = False
    image: str | None = None
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    credentials: tuple[Credential, ...] = ()
    inputs: tuple[InputPlan, ...] = ()
    outputs: tuple[OutputPlan, ...] = ()
    files: tuple[TaskFile, ...] = ()
    resources: Resources = field(default_factory=Resources)
    exit_rules: tuple[ExitRule, ...] = ()
    checkpoints: tuple[CheckpointPlan, ...] = ()
    volume_mounts: tuple[str, ...] = ()
    privileged: bool = False
    host_network: bool = False
    max_retries: int = 3
    training: TrainingPlan | None = None

    @property
    def num_nodes(self) -> int:
        """Return on how many nodes the task runs at most."""
        return 1 if self.training is None else self.training.max_nodes

    @property
    def min_nodes(self) -> int:
        """Return how many nodes the task needs."""
        return 1 if self.training is None else self.training.min_nodes

    def action(self, code: int) -> ExitAction:
        """Return the action for an exit code: that of the first rule that covers it; otherwise 0 is success."""
        for rule in self.exit_rules:
            if rule.matches(code):
                return rule.action
        return ExitAction.COMPLETE if code == 0 else ExitAction.FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Tasks that start together.

    Attributes:
        after: The groups whose outputs these tasks read.
    """

    name: str
    tasks: tuple[TaskPlan, ...]
    barrier: bool = True
    ignore_nonlead: bool = True
    after: tuple[str, ...] = ()
    exec_timeout_s: float | None = None
    queue_timeout_s: float | None = None

    @property
    def lead(self) -> TaskPlan:
        """Return the task whose end is the group's."""
        return next((task for task in self.tasks if task.lead), self.tasks[0])

    def task(self, name: str) -> TaskPlan:
        """Return the task of this name; KeyError when there is none."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowPlan:
    """The complete plan of a workflow: nothing else decides what is started.

    Attributes:
        spec_path: The file that the user submitted; relative script paths start at its folder.
        python: The interpreter of training tasks and of our own helpers.
        reused: For groups that an earlier run has finished: group name -> that run's directory.
        setup: Lines of the site that every node runs before its task's first command.
        setup_origin: Where they stand, for errors.
    """

    run_id: str
    name: str
    groups: tuple[GroupPlan, ...]
    spec_path: str
    python: tuple[str, ...]
    cwd: str
    labels: dict[str, str] = field(default_factory=dict)
    pool: str | None = None
    grace_s: float = GRACE_S
    backoff_s: float = 1.0
    network: TaskNetwork = TaskNetwork.SHARED
    container: str = "none"
    uuid: str = ""
    reused: dict[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    setup_origin: str = ""

    @property
    def mixes_output(self) -> bool:
        """Return whether lines of several tasks mix, so that each needs its name from the first one on."""
        return sum(len(group.tasks) for group in self.groups) > 1

    def group(self, name: str) -> GroupPlan:
        """Return the group of this name; KeyError when there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)


# What processes of one group tell each other by files.

PODS_ENGINE = "pods"  # of `GroupNodes`: the nodes of a task are reached by their doors


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNode:
    """A node that a task was given; `gpus` are those that it may use there, None leaves it to the node."""

    name: str
    gpus: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNodes:
    """The nodes of each task of a group, as its head notes them where they are not this machine alone."""

    engine: str
    tasks: dict[str, tuple[TaskNode, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStart:
    """One attempt of a training task, for the run inside of it.

    Attributes:
        task: Its name.
        training: With the script and the arguments of this attempt: no token stands in them.
        folder: Where the run makes its directory.
        snapshots: The folder that all attempts of the task share.
        cwd: Where relative paths begin.
        grace_s: Of the workflow.
        node_setup: What each of its nodes does first.
        nodes: Those of its group; None where they are simulated ones of this machine.
        folders: What each of its nodes must have: what `{{output}}` stands for, and those in it that arguments name.
    """

    task: str
    training: TrainingPlan
    folder: str
    snapshots: str
    cwd: str
    grace_s: float
    node_setup: NodeSetup
    nodes: GroupNodes | None = None
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStart:
    """What the client tells the head of a group and the agents of its tasks.

    Attributes:
        gpus: What each task may see on its first node; one that is not named sees what is there.
        first_attempts: Where a head goes on counting that takes the place of a lost one.
        ran_s: For how long the group ran under that one.
        broker: Where agents on hosts of ssh are asked for; None where the tasks are on this machine.
        nodes: Those hosts.
    """

    gpus: dict[str, tuple[str, ...]] = field(default_factory=dict)
    first_attempts: dict[str, int] = field(default_factory=dict)
    ran_s: float = 0.0
    broker: str | None = None
    nodes: GroupNodes | None = None
