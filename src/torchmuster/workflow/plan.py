"""The complete plan of a workflow: groups of tasks and the data that flows between them.

`workflow.json` in the run directory holds these values. Texts still contain runtime tokens such as
`{{output}}`; the agent of a task resolves them just before its command starts.
"""

import enum
from dataclasses import dataclass, field

from torchmuster.core.model.plan import GRACE_S, MAX_RESTARTS, NodeSetup


class ExitAction(enum.Enum):
    """What follows the end of a task's command."""

    COMPLETE = "COMPLETE"
    FAIL = "FAIL"
    RESCHEDULE = "RESCHEDULE"  # retry in a new working directory
    RESTART = "RESTART"  # retry in the same working directory


class InputKind(enum.Enum):
    """The kind of source of an input."""

    TASK = "task"
    URL = "url"
    DATASET = "dataset"


class OutputKind(enum.Enum):
    """The kind of destination of an output."""

    URL = "url"
    DATASET = "dataset"
    UPDATE_DATASET = "update_dataset"


class TaskNetwork(enum.Enum):
    """Whether the tasks on one node share its network."""

    SHARED = "shared"
    PRIVATE = "private"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """One entry of `inputs`.

    Attributes:
        source: A task name, a URL or a dataset reference.
        run_id: The other run, where the file says `task: RUN:TASK`.
        folder: The folder inside `{{input:N}}` that receives a dataset.
    """

    kind: InputKind
    source: str
    run_id: str | None = None
    regex: str | None = None
    folder: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """One entry of `outputs`; `paths` are relative to `{{output}}`, empty for all of it."""

    kind: OutputKind
    target: str
    paths: tuple[str, ...] = ()
    regex: str | None = None
    metadata: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """A folder that is uploaded every `frequency_s` seconds while the task runs."""

    path: str
    url: str
    frequency_s: float
    regex: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """One entry of `files`.

    Attributes:
        content: Text, which may contain runtime tokens, or base64.
        tokens: Whether runtime tokens are resolved: in inline text and templates, not in other
            `localpath` files.
    """

    path: str
    content: str
    is_base64: bool = False
    tokens: bool = True
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRule:
    """Inclusive ranges of exit codes, and the action that follows them."""

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
    """The training run that a training task starts.

    Attributes:
        nodes: `2`, or `1:3` for a range.
        nproc_per_node: As in the file: only the node knows which number `gpu` means.
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
        """Return the maximum number of nodes."""
        return int(self.nodes.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A secret of a task, as variables or as files in a folder; holds no secret values."""

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
        """Return the maximum number of nodes of the task."""
        return 1 if self.training is None else self.training.max_nodes

    @property
    def min_nodes(self) -> int:
        """Return the minimum number of nodes of the task."""
        return 1 if self.training is None else self.training.min_nodes

    def action(self, code: int) -> ExitAction:
        """Return the action of the first rule that covers a code; by default only 0 completes."""
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
        """Return the lead; without one, the first task."""
        return next((task for task in self.tasks if task.lead), self.tasks[0])

    def task(self, name: str) -> TaskPlan:
        """Return the task of this name; KeyError when there is none."""
        return {task.name: task for task in self.tasks}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowPlan:
    """The complete plan of a workflow; nothing else determines what starts.

    Attributes:
        spec_path: The file that the user submitted; script paths are relative to its folder.
        python: The interpreter of training tasks and of our own helpers.
        reused: The groups that an earlier run has finished: group name -> that run's directory.
        setup: Shell lines of the site that every node runs before its task's first command.
        setup_origin: The file that contains them, for error messages.
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
        """Return whether lines of several tasks can mix, so that each line needs a task's name."""
        return sum(len(group.tasks) for group in self.groups) > 1

    def group(self, name: str) -> GroupPlan:
        """Return the group of this name; KeyError when there is none."""
        return {group.name: group for group in self.groups}[name]


# Files that the processes of one group exchange.

PODS_ENGINE = "pods"  # a `GroupNodes.engine`: a task's nodes are pods, which run servers


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNode:
    """A node of a task; `gpus` are those that the task may use there, None for all it finds."""

    name: str
    gpus: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNodes:
    """The nodes of each task of a group, which its head records unless all run on this machine."""

    engine: str
    tasks: dict[str, tuple[TaskNode, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShare:
    """One task's part of a private network.

    Attributes:
        name: The name of the task.
        address: The task's IPv4 address.
        join: The namespaces to enter, `user` and `net`, for `write_view`.
        environment: The variables for Gloo and NCCL, which would otherwise use the address of the
            machine's own name, outside of this network.
        hosts: The content of its /etc/hosts, which names all tasks.
        resolver: The content of its /etc/resolv.conf; None for the machine's.
    """

    name: str
    address: str
    join: dict[str, str | None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    hosts: bytes = b""
    resolver: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInput:
    """One attempt of a training task: the input of its nested training run.

    Attributes:
        task: The task's name.
        training: The plan with this attempt's script and arguments, all tokens resolved.
        folder: Where the training run creates its run directory.
        snapshots: The folder that all attempts of the task share.
        cwd: The folder that relative paths start from.
        grace_s: The grace of the workflow.
        node_setup: What each node does first.
        nodes: The nodes of its group; None for simulated nodes on this machine.
        folders: Folders that every node must have: that of `{{output}}`, and those in it that
            arguments name.
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
class GroupInput:
    """The input of a group's head, and of its tasks' agents, from the owner of the workflow.

    Attributes:
        gpus: The GPUs that each task may see on its first node; a task without an entry sees all.
        first_attempts: The first attempt of each task, when this head replaces a lost one.
        ran_s: How long the group ran under the lost head.
        broker: The name of the broker that starts agents on ssh hosts; None when all tasks are on
            this machine.
        nodes: The ssh hosts.
    """

    gpus: dict[str, tuple[str, ...]] = field(default_factory=dict)
    first_attempts: dict[str, int] = field(default_factory=dict)
    ran_s: float = 0.0
    broker: str | None = None
    nodes: GroupNodes | None = None
