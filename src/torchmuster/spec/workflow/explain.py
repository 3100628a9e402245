"""What the schema finds wrong with a workflow, in our words; pydantic's own never reach a user."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from torchmuster.spec.findings import FileProblems, KeyPath, did_you_mean, show_path
from torchmuster.spec.scalars import kind_of, shown
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
    """Return the workflow; None when it is none, with the reasons in `findings`."""
    if not isinstance(raw, dict):
        return None
    try:
        return schema.Workflow.model_validate(raw)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            _take_problem(problem, raw, findings)
        return None


def _take_problem(problem: Any, raw: Any, findings: FileProblems) -> None:
    """Put pydantic's finding into our words."""
    path: KeyPath = ("workflow", *_real_path(tuple(problem["loc"]), raw))
    kind, found = problem["type"], problem["input"]
    at_key = problem["loc"][-1:] == ("[key]",)
    if kind == "muster":
        what = problem["ctx"]["what"]
        if at_key and what.startswith("expected a text"):
            what = f"expected a text as the key, found {kind_of(found)}"
        findings.add(path, what, problem["ctx"].get("fix"), at_key=at_key)
    elif kind == "extra_forbidden":
        _take_unknown_key(path, findings)
    elif kind == "missing":
        what = f"`{path[-1]}` is missing in {show_path(path[:-1])}"
        findings.add(path[:-1], what, f"{path[-1]}: ...", at_key=True)
    elif kind in ("model_type", "dict_type"):
        findings.add(path, f"expected a map, found {kind_of(found)}", _map_hint(path, found))
    elif kind == "list_type":
        fix = "begin each entry with `- `" if isinstance(found, dict) else None
        fix = f"[{found}]" if isinstance(found, str) and len(found) < 60 else fix
        findings.add(path, f"expected a list, found {kind_of(found)}", fix)
    elif kind == "literal_error":
        allowed = problem["ctx"]["expected"].replace("'", "`")
        names = re.findall(r"`(\w+)`", allowed)
        fix = did_you_mean(found, names) if isinstance(found, str) else None
        findings.add(path, f"{kind_of(found)} is not one of {allowed}", fix)
    elif kind == "invalid_key":
        findings.add(path, f"expected a text as the key, found {kind_of(path[-1])}", at_key=True)
    else:
        findings.add(path, f"this value does not fit, found {kind_of(found)}")


def _take_unknown_key(path: KeyPath, findings: FileProblems) -> None:
    key, parent = str(path[-1]), path[:-1]
    model = _model_at(path)
    known = list(model.model_fields) if model is not None else []
    other = _OTHER_WORDS.get(key.lower())
    if other in known:
        fix: str | None = f"did you mean `{other}`?"
    elif model is schema.Task and key.lower() in _A_RESOURCE:
        fix = "it belongs to `workflow.resources`; `resource` names an entry there"
    else:
        fix = did_you_mean(key, known, _where_it_belongs(key, known))
    findings.add(path, f"unknown key {shown(key)} in {show_path(parent)}", fix, at_key=True)


def _where_it_belongs(key: str, known: list[str]) -> str | None:
    """Return a hint for a key that stands at a wrong level; else the keys that are allowed."""
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


def _real_path(location: tuple[Any, ...], raw: Any) -> tuple[Any, ...]:
    """Leave out what pydantic adds to a path: the members of a union, `[key]`."""
    path: list[Any] = []
    here = raw
    for part in location:
        if (isinstance(here, Mapping) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        ):
            here = here[part]
        elif isinstance(here, Mapping) and (key := _key_of(here, part)) is not None:
            part = key  # noqa: PLW2901 - pydantic speaks of a key by its text
            here = here[key]
        elif part in ("[key]", "(text)", "(map)") or not isinstance(here, Mapping):
            continue
        else:
            here = None
        path.append(part)
    return tuple(path)


def _key_of(found: Mapping[Any, Any], part: Any) -> Any:
    return next((key for key in found if not isinstance(key, str) and str(key) == part), None)


def _model_at(path: KeyPath) -> Any:
    """Return the model whose keys may stand where the last part of a path stands."""
    for part in reversed(path[:-1]):
        if part in _MODELS:
            if part == "dataset" and "outputs" in path:
                return schema.DatasetOutput
            return _MODELS[str(part)]
    return None
