"""The hints for errors in a workflow file."""

from typing import Any

from torchmuster.spec.explain import FileFormat, hint_for_key
from torchmuster.spec.problems import FileProblems, KeyPath
from torchmuster.spec.workflow import schema

_MODELS: dict[str, Any] = {
    "workflow": schema.Workflow,
    "groups": schema.GroupModel,
    "tasks": schema.Task,
    "inputs": schema.InputModel,
    "outputs": schema.OutputModel,
    "files": schema.FileSpec,
    "checkpoint": schema.CheckpointModel,
    "timeout": schema.Timeout,
    "resources": schema.ResourceSpec,
    "topology": schema.Topology,
    "update_dataset": schema.UpdateDataset,
    "dataset": schema.DatasetInput,
    "kpis": schema.Kpi,
}
# What people write, and what this format calls it.
_OTHER_WORDS = {
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
# How one word becomes the map that stands in its place.
_MAP_OF_WORD = {
    "dataset": "{{name: {}}}",
    "update_dataset": "{{name: {}}}",
    "timeout": "{{exec_timeout: {}}}",
    "tasks": "- name: {}",
    "groups": "- name: {}",
    "inputs": "- task: {}",
    "outputs": "- url: {}",
    "files": "- {{path: {0}, localpath: {0}}}",
}


def validate(raw: Any, findings: FileProblems) -> schema.Workflow | None:
    """Return the workflow; None if there are errors, which are added to `findings`."""
    if not isinstance(raw, dict):
        return None
    return _FORMAT.read(schema.Workflow, raw, ("workflow",), findings)


def _unknown_hint(path: KeyPath) -> str | None:
    key, model = str(path[-1]), _model_at(path)
    known = list(model.model_fields) if model is not None else []
    is_resource = model is schema.Task and key.lower() in _A_RESOURCE
    if is_resource:
        return "it belongs to `workflow.resources`; `resource` names an entry there"
    return hint_for_key(key, known, _OTHER_WORDS, _where_it_belongs(key, known))


def _where_it_belongs(key: str, known: list[str]) -> str | None:
    """Return a hint for a key at the wrong level; otherwise the allowed keys."""
    homes = [name for name, model in _MODELS.items() if key in model.model_fields]
    if homes and key not in ("name", "path", "key", "group", "index"):
        return f"`{key}` belongs into `{homes[0]}`"
    return f"allowed here: {', '.join(known)}" if known else None


def _map_hint(path: KeyPath, found: Any) -> str | None:
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    if isinstance(found, str) and 0 < len(found) < 60 and key in _MAP_OF_WORD:
        pattern = _MAP_OF_WORD[key]
        if key == "inputs" and "://" in found:
            pattern = "- url: {}"
        return pattern.format(found)
    if isinstance(found, list):
        return "write `key: value`, without `- `"
    return None


def _model_at(path: KeyPath) -> Any:
    """Return the model whose keys are allowed at the last part of a path."""
    return next((_MODELS[str(part)] for part in reversed(path[:-1]) if part in _MODELS), None)


_FORMAT = FileFormat(missing="{}: ...", unknown=_unknown_hint, map=_map_hint)
