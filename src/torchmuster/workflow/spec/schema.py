"""The workflow file as pydantic models: every key of the format, with its rule, and hints for errors.

The models accept both versions of the format: 6.3 (datasets) and 6.4 (`url:`). Muster's own keys
are `nodes`, `nproc_per_node`, `script`, `max_restarts` and `max_retries` of a task, and `templated`
of a file. `check` has the rules that depend on more than one place of the file.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from torchmuster.core.spec.problems import KeyPath
from torchmuster.launcher.spec import scalars
from torchmuster.launcher.spec.scalars import FileProblems


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Topology(_Model):
    """Which nodes should be close to each other."""

    key: scalars.Text
    group: scalars.Text = "default"
    requirementType: Literal["required", "preferred"] = "required"


class ResourceSpec(_Model):
    """The resources that a task requests."""

    cpu: scalars.WholeNumber | None = None
    gpu: scalars.WholeNumber | None = None
    memory: scalars.Size | None = None
    storage: scalars.Size | None = None
    platform: scalars.Text | None = None
    nodesExcluded: scalars.Words = Field(default_factory=list)
    topology: list[Topology] = Field(default_factory=list)


class Timeout(_Model):
    """Time limits of a group: from RUNNING on, and in SCHEDULING."""

    exec_timeout: scalars.Seconds | None = None
    queue_timeout: scalars.Seconds | None = None


class DatasetInput(_Model):
    """A versioned dataset, which a task finds at `{{input:N}}/<name>`."""

    name: scalars.DatasetName
    path: scalars.PathInOutput | None = None
    metadata: scalars.Words = Field(default_factory=list)
    labels: scalars.Words = Field(default_factory=list)
    regex: scalars.Regex | None = None
    localpath: scalars.Text | None = None


class DatasetOutput(DatasetInput):
    """A new version of a dataset, made from `{{output}}` or a path in it."""


class UpdateDataset(_Model):
    """A new version of a dataset, made from its newest one and these files."""

    name: scalars.DatasetName
    paths: scalars.PathsInOutput = Field(default_factory=list)
    metadata: scalars.Words = Field(default_factory=list)
    labels: scalars.Words = Field(default_factory=list)


class InputModel(_Model):
    """One input: the output of a task, a URL or a dataset."""

    task: scalars.Text | None = None
    url: scalars.Url | None = None
    dataset: DatasetInput | None = None
    regex: scalars.Regex | None = None


class OutputModel(_Model):
    """One output: a URL or a dataset."""

    url: scalars.Url | None = None
    dataset: DatasetOutput | None = None
    update_dataset: UpdateDataset | None = None
    regex: scalars.Regex | None = None


class FileSpec(_Model):
    """A file that a task finds at `path`."""

    path: scalars.FilePath
    contents: scalars.Text | None = None
    localpath: scalars.Text | None = None
    base64: scalars.Flag = False
    templated: scalars.Flag = False


class CheckpointModel(_Model):
    """A folder that is uploaded while the task runs."""

    path: scalars.FolderPath
    url: scalars.Url
    frequency: scalars.Seconds
    regex: scalars.Regex | None = None


class Kpi(_Model):
    """A file of measurements; accepted, but without effect."""

    index: scalars.Text
    path: scalars.Text


class Task(_Model):
    """One command, or one training run on several nodes."""

    name: scalars.Name
    image: scalars.Text | None = None
    command: scalars.Words | None = None
    args: scalars.Words = Field(default_factory=list)
    lead: scalars.Flag = False
    environment: dict[scalars.Variable, scalars.EnvironmentValue] = Field(default_factory=dict)
    credentials: dict[scalars.Text, scalars.Credential] = Field(default_factory=dict)
    inputs: list[InputModel] = Field(default_factory=list)
    outputs: list[OutputModel] = Field(default_factory=list)
    files: list[FileSpec] = Field(default_factory=list)
    resource: scalars.Text | None = None
    exitActions: dict[scalars.Text, scalars.ExitRanges] = Field(default_factory=dict)
    checkpoint: list[CheckpointModel] = Field(default_factory=list)
    privileged: scalars.Flag = False
    hostNetwork: scalars.Flag = False
    volumeMounts: scalars.Words = Field(default_factory=list)
    downloadType: scalars.Text | None = None
    cacheSize: scalars.Text | None = None
    kpis: list[Kpi] = Field(default_factory=list)
    resources: Any = None
    backend: Any = None
    nodes: scalars.Nodes | None = None
    nproc_per_node: scalars.Workers | None = None
    script: scalars.Text | None = None
    max_restarts: scalars.WholeNumber | None = None
    max_retries: scalars.WholeNumber | None = None


class GroupModel(_Model):
    """Tasks that start together."""

    name: scalars.Name
    barrier: scalars.Flag = True
    ignoreNonleadStatus: scalars.Flag = True
    tasks: list[Task]


class Workflow(_Model):
    """The section `workflow:`."""

    name: scalars.Name
    labels: dict[scalars.Text, Any] = Field(default_factory=dict)
    pool: scalars.Text | None = None
    backend: scalars.Text | None = None
    resources: dict[scalars.Text, ResourceSpec] = Field(default_factory=dict)
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
    return scalars.hint_for_key(key, known, _KEY_SYNONYMS, _level_hint(key, known))


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


_FORMAT = scalars.FileFormat(missing="{}: ...", unknown=_unknown_hint, map=_map_hint)
