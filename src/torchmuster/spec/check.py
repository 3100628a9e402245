"""Rules that depend on more than one place of a workflow file.

They read the plain YAML values and pass over what has the wrong type, because `spec.schema` reports that: so a file
with a wrong type in one task still has its other mistakes reported in the same go.
"""

import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torchmuster.model.tokens import Token, find_tokens
from torchmuster.spec.findings import Findings, KeyPath, did_you_mean
from torchmuster.spec.schema import kind_of

_LABEL_KEY = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_MAX_TASKS = 20_000
_ACTIONS = ("COMPLETE", "FAIL", "RESCHEDULE", "RESTART")
_TRAINING_KEYS = ("nodes", "nproc_per_node", "max_restarts")
_NO_EFFECT = {
    "downloadType": "inputs are always whole before a command starts",
    "cacheSize": "inputs are not cached",
    "kpis": "nobody collects them here",
    "backend": "the engine is chosen with --on",
    "resources": "`resource` names an entry of `workflow.resources`",
}


@dataclass(slots=True)
class _TaskView:
    path: KeyPath
    name: str
    group: int
    raw: dict[str, Any]


@dataclass(slots=True)
class _View:
    """The names of the file, as far as they can be read."""

    findings: Findings
    tasks: list[_TaskView] = field(default_factory=list)
    groups: list[tuple[KeyPath, str, dict[str, Any]]] = field(default_factory=list)
    resources: dict[str, Any] = field(default_factory=dict)


def check_workflow(raw: Any, findings: Findings) -> None:
    """Add every problem of the structure of `workflow:` to `findings`."""
    if not isinstance(raw, dict):
        findings.add(("workflow",), f"expected a map, found {kind_of(raw)}")
        return
    view = _View(findings)
    _check_top(raw, view)
    _collect(raw, view)
    _check_names(raw, view)
    for path, name, group in view.groups:
        _check_group(path, name, group, findings)
    for task in view.tasks:
        _check_task(task, view)
    _check_dependencies(view)


def _check_top(raw: dict[str, Any], view: _View) -> None:
    findings = view.findings
    top: KeyPath = ("workflow",)
    given = [key for key in ("tasks", "groups") if raw.get(key)]
    if len(given) == 2:
        what = "a workflow has `tasks` or `groups`, not both"
        findings.add((*top, "tasks"), what, "put the tasks into a group", at_key=True)
    elif not given:
        findings.add(top, "a workflow needs `tasks` or `groups`, with at least one", at_key=True)
    for key in ("pool", "backend"):
        if raw.get(key) is not None:
            what = f"`{key}` has no effect here"
            findings.warn((*top, key), what, why="the engine is chosen with --on")
    labels = raw.get("labels")
    if isinstance(labels, dict):
        _check_labels((*top, "labels"), labels, findings)
    resources = raw.get("resources")
    view.resources = resources if isinstance(resources, dict) else {}
    for key in ("name", "labels", "resources", "timeout"):
        for path, text in _texts((*top, key), raw.get(key)):
            for token in find_tokens(text):
                what = f"the token `{token.text}` is not resolved here"
                findings.add(path, what, why="tokens have a value inside tasks only")


def _check_labels(path: KeyPath, labels: dict[Any, Any], findings: Findings) -> None:
    if len(labels) > 16:
        findings.add(path, f"there are {len(labels)} labels; at most 16 are allowed", at_key=True)
    for key, value in labels.items():
        if not isinstance(key, str) or not _LABEL_KEY.fullmatch(key):
            findings.add((*path, key), f"`{key}` can't be the key of a label", at_key=True)
        if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
            fix = f'"{value}"' if isinstance(value, bool | int | float) else None
            what = f"the label `{key}` can't have the value {kind_of(value)}"
            findings.add((*path, key), what, fix)


def _collect(raw: dict[str, Any], view: _View) -> None:
    groups = raw.get("groups") if isinstance(raw.get("groups"), list) else []
    tasks = raw.get("tasks") if isinstance(raw.get("tasks"), list) else []
    for i, group in enumerate(groups or []):
        path: KeyPath = ("workflow", "groups", i)
        if isinstance(group, dict):
            view.groups.append((path, str(group.get("name", "")), group))
            members = group.get("tasks")
            for j, task in enumerate(members if isinstance(members, list) else []):
                _collect_task((*path, "tasks", j), task, len(view.groups) - 1, view)
    for i, task in enumerate(tasks or []):
        path = ("workflow", "tasks", i)
        if isinstance(task, dict):
            view.groups.append((path, f"{task.get('name', '')}-group", {"tasks": [task]}))
            _collect_task(path, task, len(view.groups) - 1, view)


def _collect_task(path: KeyPath, task: Any, group: int, view: _View) -> None:
    if isinstance(task, dict):
        view.tasks.append(_TaskView(path, str(task.get("name", "")), group, task))


def _check_names(raw: dict[str, Any], view: _View) -> None:
    """Names of groups and tasks are one space, without regard to case and `_` or `-`."""
    if len(view.tasks) > _MAX_TASKS:
        what = f"there are {len(view.tasks)} tasks; at most {_MAX_TASKS} are allowed"
        view.findings.add(("workflow",), what, at_key=True)
    taken: dict[str, tuple[str, str]] = {}
    named = [(path, "group", name) for path, name, group in view.groups]
    named += [(task.path, "task", task.name) for task in view.tasks]
    for path, kind, name in sorted(named, key=lambda entry: _sort_key(entry[0])):
        folded = name.lower().replace("_", "-")
        implicit = kind == "group" and path[1] == "tasks"
        if not folded or folded == "-group":
            continue
        if folded in taken:
            other_kind, other = taken[folded]
            same = "the same name" if other == name else f"`{other}`, which counts as the same"
            what = f"the {kind} `{name}` has {same} as a {other_kind}"
            if implicit or (other_kind == "task group"):
                what = f"`{name}` is also the name of the group that a bare task gets"
            view.findings.add((*path, "name"), what, "names of groups and tasks must differ")
        else:
            taken[folded] = ("task group" if implicit else kind, name)
        if folded == "osmo-ctrl":
            view.findings.add((*path, "name"), f"`{name}` is reserved in this format")


def _sort_key(path: KeyPath) -> tuple[Any, ...]:
    return tuple((0, part, "") if isinstance(part, int) else (1, 0, part) for part in path)


def _check_group(path: KeyPath, name: str, group: dict[str, Any], findings: Findings) -> None:
    tasks = [task for task in group.get("tasks") or [] if isinstance(task, dict)]
    if path[1] == "tasks":
        return
    if not isinstance(group.get("tasks"), list):
        return  # the schema says so
    if not tasks:
        findings.add((*path, "tasks"), f"the group `{name}` has no tasks")
        return
    leads = [i for i, task in enumerate(tasks) if task.get("lead") is True]
    if len(tasks) > 1 and not leads:
        what = f"the group `{name}` has {len(tasks)} tasks and no lead"
        why = "the end of the lead is the end of the group"
        first = tasks[0].get("name", "the first")
        findings.add((*path, "tasks"), what, f"add `lead: true` to `{first}`", why=why, at_key=True)
    for i in leads[1:]:
        first = tasks[leads[0]].get("name")
        what = f"the group `{name}` has {len(leads)} leads; `{first}` is one already"
        findings.add((*path, "tasks", i, "lead"), what, "leave `lead` to one task")
    if len(tasks) == 1:
        for key in ("barrier", "ignoreNonleadStatus"):
            if key in group:
                what = f"`{key}` has no effect in a group of one task"
                findings.warn((*path, key), what)


def _check_task(task: _TaskView, view: _View) -> None:
    findings = view.findings
    _check_program(task, findings)
    for i, entry in enumerate(_dicts(task.raw.get("inputs"))):
        _need_one(
            (*task.path, "inputs", i), entry, ("task", "url", "dataset"), "an input", findings
        )
    for i, entry in enumerate(_dicts(task.raw.get("outputs"))):
        kinds = ("url", "dataset", "update_dataset")
        _need_one((*task.path, "outputs", i), entry, kinds, "an output", findings)
    _check_files(task, findings)
    _check_exit_actions(task, findings)
    _check_resource(task, view)
    _check_tokens(task, view)
    for key, why in _NO_EFFECT.items():
        if task.raw.get(key) is not None:
            findings.warn((*task.path, key), f"`{key}` has no effect here", why=why)
    for i, mount in enumerate(task.raw.get("volumeMounts") or []):
        parts = mount.split(":") if isinstance(mount, str) else [""]
        if isinstance(mount, str) and (len(parts) > 2 or not all(parts)):
            what = f"`{mount}` is no mount: SOURCE or SOURCE:DESTINATION"
            findings.add((*task.path, "volumeMounts", i), what)


def _check_program(task: _TaskView, findings: Findings) -> None:
    raw, path = task.raw, task.path
    command, script = raw.get("command"), raw.get("script")
    if command is not None and script is not None:
        what = "a task has `command` or `script`, not both"
        findings.add((*path, "script"), what, at_key=True)
    elif command is None and script is None:
        fix = "command: [bash], or script: train.py"
        findings.add(path, f"the task `{task.name}` needs `command` or `script`", fix, at_key=True)
    elif command == []:
        findings.add((*path, "command"), "`command` is empty", "command: [bash]")
    for key in _TRAINING_KEYS:
        if script is None and raw.get(key) is not None:
            what = f"`{key}` needs `script`: a command runs as it is, on one node"
            findings.add((*path, key), what, at_key=True)


def _dicts(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        return []
    return [entry if isinstance(entry, dict) else {} for entry in value]


def _need_one(
    path: KeyPath, entry: dict[str, Any], kinds: tuple[str, ...], what: str, findings: Findings
) -> None:
    given = [kind for kind in kinds if entry.get(kind) is not None]
    if len(given) != 1 and entry:
        names = ", ".join(f"`{kind}`" for kind in kinds)
        found = " and ".join(f"`{kind}`" for kind in given) or "none of them"
        findings.add(path, f"{what} has exactly one of {names}; this one has {found}")
    nested = entry.get("dataset")
    if isinstance(nested, dict) and entry.get("regex") is not None:
        fix = "put it into `dataset`"
        findings.add((*path, "regex"), "`regex` stands beside `dataset`", fix, at_key=True)


def _check_files(task: _TaskView, findings: Findings) -> None:
    seen: dict[str, int] = {}
    for i, entry in enumerate(_dicts(task.raw.get("files"))):
        path = (*task.path, "files", i)
        given = [key for key in ("contents", "localpath") if entry.get(key) is not None]
        if len(given) != 1 and entry:
            found = "both" if given else "neither"
            what = f"a file has exactly one of `contents` and `localpath`; this one has {found}"
            findings.add(path, what)
        if entry.get("localpath") is not None and entry.get("base64"):
            what = "`base64` speaks of `contents`; a `localpath` is taken as it is"
            findings.add((*path, "base64"), what, at_key=True)
        if entry.get("templated") and entry.get("contents") is not None:
            what = "`templated` speaks of `localpath`; `contents` is a part of the template already"
            findings.warn((*path, "templated"), what)
        name = entry.get("path")
        if not isinstance(name, str):
            continue
        folded = re.sub(r"/+", "/", name)
        if folded in seen:
            what = f"`{name}` appears twice in the task `{task.name}`"
            why = f"files[{seen[folded]}] has the same path"
            findings.add((*path, "path"), what, why=why)
        inside = [f for f in seen if folded.startswith(f"{f}/") or f.startswith(f"{folded}/")]
        if inside:
            what = f"`{name}` and `{inside[0]}` can't both be files: one lies in the other"
            findings.add((*path, "path"), what)
        seen.setdefault(folded, i)


def _check_exit_actions(task: _TaskView, findings: Findings) -> None:
    actions = task.raw.get("exitActions")
    if not isinstance(actions, dict):
        return
    taken: list[tuple[int, int, str]] = []
    for key, value in actions.items():
        path = (*task.path, "exitActions", key)
        if not isinstance(key, str) or key.upper() not in _ACTIONS:
            fix = did_you_mean(str(key).upper(), _ACTIONS, ", ".join(_ACTIONS))
            findings.add(path, f"`{key}` is no exit action", fix, at_key=True)
        for low, high in _ranges(value):
            clash = next((t for t in taken if low <= t[1] and t[0] <= high), None)
            if clash is not None:
                both = f"{max(low, clash[0])}"
                what = f"exit code {both} is in `{clash[2]}` and in `{key}`"
                findings.add(path, what, "give every code one action")
            if low > 255 and not 1000 <= low < 5000:
                what = f"no command ends with {low}: exit codes go to 255"
                findings.warn(
                    path, what, why="1000 and above are ours, e.g. 3001: its agent was lost"
                )
            taken.append((low, high, str(key)))


def _ranges(value: Any) -> Iterator[tuple[int, int]]:
    text = str(value)
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return
    for part in text.split(","):
        low, _, high = part.partition("-")
        if int(low) <= int(high or low):
            yield int(low), int(high or low)


def _check_resource(task: _TaskView, view: _View) -> None:
    if not view.resources:
        name = task.raw.get("resource")
        if name not in (None, "default"):
            what = f"there is no resource `{name}`: the workflow has no `resources`"
            view.findings.add((*task.path, "resource"), what)
        return
    name = task.raw.get("resource", "default")
    if name in view.resources or not isinstance(name, str):
        return
    if "resource" not in task.raw:
        what = f"the task `{task.name}` names no `resource`, and there is no `default`"
        fix = f"resource: {next(iter(view.resources))}, or a resource `default`"
        view.findings.add(task.path, what, fix, at_key=True)
        return
    near = did_you_mean(name, view.resources, f"one of: {', '.join(map(str, view.resources))}")
    view.findings.add((*task.path, "resource"), f"there is no resource `{name}`", near)


def _texts(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts((*path, key), item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _texts((*path, i), item)


def _check_tokens(task: _TaskView, view: _View) -> None:
    for key, value in task.raw.items():
        for path, text in _texts((*task.path, key), value):
            if "{{" not in text:
                continue
            for token in find_tokens(text):
                _check_token(path, token, task, view)


def _check_token(path: KeyPath, token: Token, task: _TaskView, view: _View) -> None:
    findings, argument = view.findings, token.argument or ""
    if path[len(task.path)] == "name":
        findings.add(path, f"the token `{token.text}` is not resolved in a name")
    elif token.kind in ("host", "ip"):
        members = [other.name for other in view.tasks if other.group == task.group]
        if argument in members:
            return
        elsewhere = any(other.name == argument for other in view.tasks)
        what = f"`{token.text}` names no task of this group"
        why = f"`{argument}` is in another group, which runs at another time" if elsewhere else None
        fix = did_you_mean(argument, members, f"its tasks: {', '.join(members[:8])}")
        findings.add(path, what, fix, why=why)
    elif token.kind == "input":
        _check_input_token(path, token, task, findings)


def _check_input_token(path: KeyPath, token: Token, task: _TaskView, findings: Findings) -> None:
    argument = token.argument or ""
    inputs = _dicts(task.raw.get("inputs"))
    names = [str(entry["task"]).rpartition(":")[2] for entry in inputs if entry.get("task")]
    if argument.isdecimal() and int(argument) < len(inputs):
        return
    if argument in names:
        return
    if not inputs:
        what = f"`{token.text}` names an input, but the task `{task.name}` has none"
        findings.add(path, what, "add `inputs:` to the task")
        return
    last = len(inputs) - 1
    known = "0" if last == 0 else f"0 to {last}"
    fix = did_you_mean(argument, names, f"{{{{input:0}}}}; the inputs are {known}")
    findings.add(path, f"`{token.text}` names no input of the task `{task.name}`", fix)


def _check_dependencies(view: _View) -> None:
    group_of = {task.name: task.group for task in view.tasks if task.name}
    edges: dict[int, set[int]] = {i: set() for i in range(len(view.groups))}
    for task in view.tasks:
        for i, entry in enumerate(_dicts(task.raw.get("inputs"))):
            name = entry.get("task")
            if isinstance(name, str) and ":" not in name and "{{" not in name:
                path = (*task.path, "inputs", i, "task")
                _check_dependency(path, name, task, group_of, view)
                if name in group_of and group_of[name] != task.group:
                    edges[task.group].add(group_of[name])
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        cycle = list(reversed(error.args[1]))
        what = f"the groups wait for each other: {' -> '.join(view.groups[i][1] for i in cycle)}"
        why = "a -> b: a reads what b writes"
        view.findings.add((*view.groups[cycle[0]][0], "name"), what, why=why)


def _check_dependency(
    path: KeyPath, name: str, task: _TaskView, group_of: dict[str, int], view: _View
) -> None:
    if name not in group_of:
        fix = did_you_mean(name, group_of, f"the tasks are {', '.join(list(group_of)[:8])}")
        view.findings.add(path, f"there is no task `{name}`", fix)
    elif name == task.name:
        view.findings.add(path, f"the task `{name}` waits for itself")
    elif group_of[name] == task.group:
        what = f"`{name}` is in the same group: it runs at the same time"
        fix = "put it into a group of its own"
        view.findings.add(path, what, fix)
    elif group_of[name] > task.group:
        what = f"`{name}` comes later in the file"
        why = "it runs first here; the reference of this format refuses the file"
        view.findings.warn(path, what, f"move `{name}` up", why=why, at_key=False)
