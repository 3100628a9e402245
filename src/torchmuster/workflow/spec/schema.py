"""The workflow file as pydantic models: every key of the format, with its rule, and hints for errors.

The models accept both versions of the format: 6.3 (datasets) and 6.4 (`url:`). Muster's own keys
are `nodes`, `nproc_per_node`, `script`, `max_restarts` and `max_retries` of a task, and `templated`
of a file. `check` has the rules that depend on more than one place of the file.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from torchmuster.core.spec.problems import FileProblems, KeyPath
from torchmuster.launcher.spec.scalars import (
    Credential,
    DatasetName,
    EnvironmentValue,
    ExitRanges,
    FileFormat,
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
    hint_for_key,
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


_MODELS: dict[str, Any] = {
    "workflow": Workflow,
    "groups": GroupModel,
    "tasks": Task,
    "inputs": InputModel,
    "outputs": OutputModel,
    "files": FileSpec,
    "checkpoint": CheckpointModel,
    "timeout": Timeout,
    "resources": ResourceSpec,
    "topology": Topology,
    "update_dataset": UpdateDataset,
    "dataset": DatasetInput,
    "kpis": Kpi,
}
# Keys that people write by mistake, and their names in this format.
_KEY_SYNONYMS = {
    "env": "environment",
    "envs": "environment",
    "cmd": "command",
    "entrypoint": "command",
    "volumes": "volumeMounts",
    "mounts": "volumeMounts",
    "depends_on": "inputs",
    "needs": "inputs",
    "retries": "max_retries",
    "requirement_type": "requirementType",
    "secrets": "credentials",
    "master": "lead",
}
_A_RESOURCE = ("cpu", "cpus", "gpu", "gpus", "mem", "memory", "storage", "platform", "disk")
# For a text where a map belongs: the map to write instead.
_MAP_HINTS = {
    "dataset": "{{name: {}}}",
    "update_dataset": "{{name: {}}}",
    "timeout": "{{exec_timeout: {}}}",
    "tasks": "- name: {}",
    "groups": "- name: {}",
    "inputs": "- task: {}",
    "outputs": "- url: {}",
    "files": "- {{path: {0}, localpath: {0}}}",
}


def validate(raw: Any, findings: FileProblems) -> Workflow | None:
    """Return the parsed workflow; on errors, add them to `findings` and return None."""
    if not isinstance(raw, dict):
        return None
    return _FORMAT.read(Workflow, raw, ("workflow",), findings)


def _unknown_hint(path: KeyPath) -> str | None:
    key, model = str(path[-1]), _model_at(path)
    known = list(model.model_fields) if model is not None else []
    is_resource = model is Task and key.lower() in _A_RESOURCE
    if is_resource:
        return "it belongs to `workflow.resources`; `resource` names an entry there"
    return hint_for_key(key, known, _KEY_SYNONYMS, _level_hint(key, known))


def _level_hint(key: str, known: list[str]) -> str | None:
    """Return a hint that names the key's proper level; if there is none, list the allowed keys."""
    homes = [name for name, model in _MODELS.items() if key in model.model_fields]
    if homes and key not in ("name", "path", "key", "group", "index"):
        return f"`{key}` belongs into `{homes[0]}`"
    return f"allowed here: {', '.join(known)}" if known else None


def _map_hint(path: KeyPath, found: Any) -> str | None:
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    if isinstance(found, str) and 0 < len(found) < 60 and key in _MAP_HINTS:
        pattern = _MAP_HINTS[key]
        if key == "inputs" and "://" in found:
            pattern = "- url: {}"
        return pattern.format(found)
    if isinstance(found, list):
        return "write `key: value`, without `- `"
    return None


def _model_at(path: KeyPath) -> Any:
    """Return the model that the last part of a path should be a key of."""
    return next((_MODELS[str(part)] for part in reversed(path[:-1]) if part in _MODELS), None)


_FORMAT = FileFormat(missing="{}: ...", unknown=_unknown_hint, map=_map_hint)
