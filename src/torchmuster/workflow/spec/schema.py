"""The workflow file as pydantic models: every key of the format, with its rule.

The models accept both versions of the format: 6.3 (datasets) and 6.4 (`url:`). Muster's own keys
are `nodes`, `nproc_per_node`, `script`, `max_restarts` and `max_retries` of a task, and `templated`
of a file. `check` has the rules that depend on more than one place of the file.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from torchmuster.launcher.spec.scalars import (
    Credential,
    DatasetName,
    EnvironmentValue,
    ExitRanges,
    FilePath,
    Flag,
    FolderPath,
    Name,
    Nodes,
    PathInOutput,
    PathsInOutput,
    Regex,
    Seconds,
    Size,
    Text,
    Url,
    Variable,
    WholeNumber,
    Words,
    Workers,
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Topology(_Model):
    """Which nodes should be close to each other."""

    key: Text
    group: Text = "default"
    requirementType: Literal["required", "preferred"] = "required"


class ResourceSpec(_Model):
    """The resources that a task requests."""

    cpu: WholeNumber | None = None
    gpu: WholeNumber | None = None
    memory: Size | None = None
    storage: Size | None = None
    platform: Text | None = None
    nodesExcluded: Words = Field(default_factory=list)
    topology: list[Topology] = Field(default_factory=list)


class Timeout(_Model):
    """Time limits of a group: from RUNNING on, and in SCHEDULING."""

    exec_timeout: Seconds | None = None
    queue_timeout: Seconds | None = None


class DatasetInput(_Model):
    """A versioned dataset, which a task finds at `{{input:N}}/<name>`."""

    name: DatasetName
    path: PathInOutput | None = None
    metadata: Words = Field(default_factory=list)
    labels: Words = Field(default_factory=list)
    regex: Regex | None = None
    localpath: Text | None = None


class DatasetOutput(DatasetInput):
    """A new version of a dataset, made from `{{output}}` or a path in it."""


class UpdateDataset(_Model):
    """A new version of a dataset, made from its newest one and these files."""

    name: DatasetName
    paths: PathsInOutput = Field(default_factory=list)
    metadata: Words = Field(default_factory=list)
    labels: Words = Field(default_factory=list)


class InputModel(_Model):
    """One input: the output of a task, a URL or a dataset."""

    task: Text | None = None
    url: Url | None = None
    dataset: DatasetInput | None = None
    regex: Regex | None = None


class OutputModel(_Model):
    """One output: a URL or a dataset."""

    url: Url | None = None
    dataset: DatasetOutput | None = None
    update_dataset: UpdateDataset | None = None
    regex: Regex | None = None


class FileSpec(_Model):
    """A file that a task finds at `path`."""

    path: FilePath
    contents: Text | None = None
    localpath: Text | None = None
    base64: Flag = False
    templated: Flag = False


class CheckpointModel(_Model):
    """A folder that is uploaded while the task runs."""

    path: FolderPath
    url: Url
    frequency: Seconds
    regex: Regex | None = None


class Kpi(_Model):
    """A file of measurements; accepted, but without effect."""

    index: Text
    path: Text


class Task(_Model):
    """One command, or one training run on several nodes."""

    name: Name
    image: Text | None = None
    command: Words | None = None
    args: Words = Field(default_factory=list)
    lead: Flag = False
    environment: dict[Variable, EnvironmentValue] = Field(default_factory=dict)
    credentials: dict[Text, Credential] = Field(default_factory=dict)
    inputs: list[InputModel] = Field(default_factory=list)
    outputs: list[OutputModel] = Field(default_factory=list)
    files: list[FileSpec] = Field(default_factory=list)
    resource: Text | None = None
    exitActions: dict[Text, ExitRanges] = Field(default_factory=dict)
    checkpoint: list[CheckpointModel] = Field(default_factory=list)
    privileged: Flag = False
    hostNetwork: Flag = False
    volumeMounts: Words = Field(default_factory=list)
    downloadType: Text | None = None
    cacheSize: Text | None = None
    kpis: list[Kpi] = Field(default_factory=list)
    resources: Any = None
    backend: Any = None
    nodes: Nodes | None = None
    nproc_per_node: Workers | None = None
    script: Text | None = None
    max_restarts: WholeNumber | None = None
    max_retries: WholeNumber | None = None


class GroupModel(_Model):
    """Tasks that start together."""

    name: Name
    barrier: Flag = True
    ignoreNonleadStatus: Flag = True
    tasks: list[Task]


class Workflow(_Model):
    """The section `workflow:`."""

    name: Name
    labels: dict[Text, Any] = Field(default_factory=dict)
    pool: Text | None = None
    backend: Text | None = None
    resources: dict[Text, ResourceSpec] = Field(default_factory=dict)
    timeout: Timeout = Field(default_factory=Timeout)
    tasks: list[Task] = Field(default_factory=list)
    groups: list[GroupModel] = Field(default_factory=list)
