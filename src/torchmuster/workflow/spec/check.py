"""Check the rules of a workflow file that its schema can't express, such as references.

The checks read plain YAML values and skip values of the wrong type, which `schema` reports. So a
file with a wrong type still gets its other problems reported at the same time.
"""

import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.model.text import did_you_mean, few_of
from torchmuster.core.spec.problems import KeyPath
from torchmuster.launcher.spec.scalars import FileProblems, kind_of, split_ranges, truth_of
from torchmuster.workflow.tokens import Token, find_tokens

# References: to resources, tasks of the same group, inputs, and groups that run earlier.


NO_MAP: dict[str, Any] = {}  # replaces an entry that should be a map


@dataclass(slots=True)
class FileTask:
    """One task as plain YAML values; `group` is the index of its group."""

    path: KeyPath
    name: str
    group: int
    raw: dict[str, Any]


@dataclass(slots=True)
class FileView:
    """The valid tasks, groups and resources of a file, by name."""

    findings: FileProblems
    tasks: list[FileTask] = field(default_factory=list)
    groups: list[tuple[KeyPath, str, dict[str, Any]]] = field(default_factory=list)
    resources: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    group_of: dict[str, int] = field(default_factory=dict)
    members: dict[int, dict[str, None]] = field(default_factory=dict)

    def add_task(self, path: KeyPath, raw: Any, group: int) -> None:
        """Add a task, unless it is no map, and index it by name and group."""
        if isinstance(raw, dict):
            task = FileTask(path, _name_of(raw), group, raw)
            self.tasks.append(task)
            if task.name:
                self.group_of[task.name] = group
            self.members.setdefault(group, {})[task.name] = None


def map_entries(task: FileTask, key: str) -> list[dict[str, Any]]:
    """Return the entries of a list; NO_MAP replaces those that are not maps, to keep indices."""
    return [entry if isinstance(entry, dict) else NO_MAP for entry in _list_of(task.raw, key)]


def _list_of(raw: dict[str, Any], key: str) -> list[Any]:
    value = raw.get(key)
    return value if isinstance(value, list) else []


def check_resource(task: FileTask, view: FileView) -> None:
    """Add a problem if the task's resource does not exist."""
    name = task.raw.get("resource", "default")
    if not isinstance(name, str):
        return  # the schema reports it
    view.used.add(name)
    if name in view.resources or (name == "default" and not view.resources):
        return
    path = (*task.path, "resource")
    if "resource" not in task.raw:
        what = f"the task `{task.name}` names no `resource`, and there is no `default`"
        fix = f"resource: {next(iter(view.resources))}, or a resource `default`"
        view.findings.add(task.path, what, fix, at_key=True)
    elif not view.resources:
        what = f"there is no resource `{name}`: the workflow has no `resources`"
        view.findings.add(path, what, f"leave `resource` out, or add resources: {{{name}: ...}}")
    else:
        names = [str(key) for key in view.resources]
        near = did_you_mean(name, names, f"one of: {few_of(names, 8)}")
        view.findings.add(path, f"there is no resource `{name}`", near)


def warn_unused_resources(view: FileView) -> None:
    """Add a warning for each resource that no task names."""
    for name in view.resources:
        if name not in view.used and view.tasks:
            path = ("workflow", "resources", name)
            what = f"no task uses the resource `{name}`"
            view.findings.warn(path, what, f"resource: {name}, in a task")


def texts(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield every string in a nested value, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts((*path, key), item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from texts((*path, i), item)


def check_tokens(task: FileTask, view: FileView) -> None:
    """Add a problem for each token that can't be resolved."""
    for key, value in task.raw.items():
        if key == "name":
            continue  # the schema reports it
        for path, text in texts((*task.path, key), value):
            if "{{" not in text:
                continue
            for token in find_tokens(text):
                _check_token(path, token, task, view)


def _check_token(path: KeyPath, token: Token, task: FileTask, view: FileView) -> None:
    findings, argument = view.findings, token.argument or ""
    if token.kind in ("host", "ip"):
        members = view.members[task.group]
        if argument in members:
            return
        elsewhere = argument in view.group_of
        what = f"`{token.text}` names no task of this group"
        why = f"`{argument}` is in another group, which runs at another time" if elsewhere else None
        fix = did_you_mean(argument, members, f"its tasks: {few_of(members, 8)}")
        findings.add(path, what, fix, why=why)
    elif token.kind == "input":
        _check_input_token(path, token, task, findings)


def _check_input_token(path: KeyPath, token: Token, task: FileTask, findings: FileProblems) -> None:
    argument = token.argument or ""
    inputs = map_entries(task, "inputs")
    given = [entry["task"] for entry in inputs if isinstance(entry.get("task"), str)]
    names = [name.rpartition(":")[2] for name in given]
    if re.fullmatch(r"[0-9]{1,6}", argument) and int(argument) < len(inputs):
        return
    if argument in names:
        return
    if not inputs:
        what = f"`{token.text}` names an input, but the task `{task.name}` has none"
        findings.add(path, what, "add `inputs:` to the task")
        return
    last = f"{{{{input:{len(inputs) - 1}}}}}"
    known = f"its one input is {last}" if len(inputs) == 1 else f"{{{{input:0}}}} to {last}"
    fix = did_you_mean(argument, names, known)
    findings.add(path, f"`{token.text}` names no input of the task `{task.name}`", fix)


def check_dependencies(view: FileView) -> None:
    """Add problems for inputs that no other group provides and for cycles; warn of wrong order."""
    group_of = view.group_of
    edges: dict[int, set[int]] = {i: set() for i in range(len(view.groups))}
    for task in view.tasks:
        for i, entry in enumerate(map_entries(task, "inputs")):
            name = entry.get("task")
            if isinstance(name, str) and ":" not in name and "{{" not in name:
                _check_dependency((*task.path, "inputs", i, "task"), name, task, view)
                if name in group_of and group_of[name] != task.group:
                    edges[task.group].add(group_of[name])
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        cycle = list(reversed(error.args[1]))
        what = f"the groups wait for each other: {' -> '.join(view.groups[i][1] for i in cycle)}"
        why = "a -> b: a reads what b writes"
        view.findings.add((*view.groups[cycle[0]][0], "name"), what, why=why)


def _check_dependency(path: KeyPath, name: str, task: FileTask, view: FileView) -> None:
    group_of = view.group_of
    if name not in group_of:
        fix = did_you_mean(name, group_of, f"the tasks are {few_of(group_of, 8)}")
        view.findings.add(path, f"there is no task `{name}`", fix)
    elif name == task.name:
        what = f"the task `{name}` waits for itself"
        view.findings.add(path, what, "an input comes from another group")
    elif group_of[name] == task.group:
        what = f"`{name}` is in the same group: it runs at the same time"
        view.findings.add(path, what, "put it into a group of its own")
    elif group_of[name] > task.group:
        what = f"`{name}` comes later in the file"
        why = "muster runs it first; OSMO, the reference of this format, refuses the file"
        view.findings.warn(path, what, f"move `{name}` up", why=why, at_key=False)


_LABEL_KEY = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_MAX_TASKS = 20_000
_MAX_DEPTH = 64  # of a file's path; deeper levels are not compared
_ACTIONS = ("COMPLETE", "FAIL", "RESCHEDULE", "RESTART")
_TRAINING_KEYS = ("nodes", "nproc_per_node", "max_restarts")
_NO_EFFECT = {
    "downloadType": "inputs are always complete before a command starts",
    "cacheSize": "inputs are not cached",
    "kpis": "muster does not collect them",
    "backend": "the engine is chosen with --on",
    "resources": "`resource` names an entry of `workflow.resources`",
    "privileged": "a task has the rights of the user who started it",
    "hostNetwork": "--task-network says which network tasks have",
    "volumeMounts": "without --container a task uses this machine's folders",
}
_CLUSTER = "the engine chooses the nodes, and the local engine has only this machine"
_RESOURCE_NO_EFFECT = dict.fromkeys(("platform", "nodesExcluded", "topology"), _CLUSTER)
_DATASET_INPUT_NO_EFFECT = {
    "path": "the whole dataset is fetched; `regex` selects files",
    "metadata": "metadata are set when a dataset is written",
    "labels": "labels are set when a dataset is written",
}


def check_workflow(raw: Any, findings: FileProblems) -> None:
    """Add every problem of the structure of `workflow:` to `findings`."""
    if not isinstance(raw, dict):
        findings.add(("workflow",), f"expected a map, found {kind_of(raw)}")
        return
    view = FileView(findings)
    _check_top(raw, view)
    _collect(raw, view)
    _check_names(raw, view)
    for path, name, group in view.groups:
        _check_group(path, name, group, findings)
    for task in view.tasks:
        _check_task(task, view)
    check_dependencies(view)
    warn_unused_resources(view)


def _check_top(raw: dict[str, Any], view: FileView) -> None:
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
    for key in ("labels", "resources", "timeout"):
        for path, text in texts((*top, key), raw.get(key)):
            for token in find_tokens(text)[:1]:
                what = f"the token `{token.text}` is not resolved here"
                findings.add(path, what, why="tokens have a value inside tasks only")
    for name, resource in view.resources.items():
        if isinstance(resource, dict):
            _warn_no_effect((*top, "resources", name), resource, _RESOURCE_NO_EFFECT, findings)


def _warn_no_effect(
    path: KeyPath, raw: dict[Any, Any], reasons: dict[str, str], findings: FileProblems
) -> None:
    for key, why in reasons.items():
        if raw.get(key) not in (None, False, [], {}) and key not in findings.with_effect:
            findings.warn((*path, key), f"`{key}` has no effect here", why=why)


def _check_labels(path: KeyPath, labels: dict[Any, Any], findings: FileProblems) -> None:
    if len(labels) > 16:
        findings.add(path, f"there are {len(labels)} labels; at most 16 are allowed", at_key=True)
    allowed = "letters, digits, `-`, `_` and `.` between, at most 63"
    for key, value in labels.items():
        if not isinstance(key, str) or not is_label_key(key):
            what = f"{kind_of(key)} can't be the key of a label"
            findings.add((*path, key), what, allowed, at_key=True)
        if isinstance(value, str) and find_tokens(value):
            continue  # `_check_top` reports these tokens
        if not isinstance(value, str) or not is_label_value(value):
            is_small = isinstance(value, int) and abs(value) < 10**9
            short = isinstance(value, bool | float) or is_small
            quoted = f'"{str(value).lower()}"' if short else None
            what = f"a label can't have this value: {kind_of(value)}"
            findings.add((*path, key), what, quoted or allowed)


def is_label_key(text: str) -> bool:
    """Return whether a text is valid as the key of a label."""
    return _LABEL_KEY.fullmatch(text) is not None


def is_label_value(text: str) -> bool:
    """Return whether a text is valid as the value of a label."""
    return _LABEL_VALUE.fullmatch(text) is not None


def _collect(raw: dict[str, Any], view: FileView) -> None:
    for i, group in enumerate(_list_of(raw, "groups")):
        path: KeyPath = ("workflow", "groups", i)
        if isinstance(group, dict):
            view.groups.append((path, _name_of(group), group))
            for j, task in enumerate(_list_of(group, "tasks")):
                view.add_task((*path, "tasks", j), task, len(view.groups) - 1)
    for i, task in enumerate(_list_of(raw, "tasks")):
        path = ("workflow", "tasks", i)
        if isinstance(task, dict):
            view.groups.append((path, f"{_name_of(task)}-group", {"tasks": [task]}))
            view.add_task(path, task, len(view.groups) - 1)


def _name_of(raw: dict[str, Any]) -> str:
    name = raw.get("name")
    return name if isinstance(name, str) else ""


def _check_names(raw: dict[str, Any], view: FileView) -> None:
    """Check that group and task names are unique; case is ignored, `_` equals `-`."""
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
            _add_name_clash(path, (kind, name), taken[folded], view.findings)
        else:
            taken[folded] = ("task group" if implicit else kind, name)
        if folded == "osmo-ctrl":
            what = f"`{name}` is reserved in this format"
            view.findings.add((*path, "name"), what, "another name")


def _add_name_clash(
    path: KeyPath, this: tuple[str, str], other: tuple[str, str], findings: FileProblems
) -> None:
    kind, name = this
    other_kind, other_name = other
    implicit = kind == "group" and path[1] == "tasks"
    if implicit and other_kind == "task group":
        return  # the two task names clash, and that is reported
    fix = "names of groups and tasks must differ"
    if implicit or other_kind == "task group":
        what = f"`{name}` is also the name of the group that a bare task gets"
    elif name == other_name:
        again = "another" if kind == other_kind else "a"
        what = f"the {kind} `{name}` has the same name as {again} {other_kind}"
    else:
        what = f"the {kind} `{name}` and the {other_kind} `{other_name}` have the same name"
        fix = f"{fix}, in more than case, `_` and `-`"
    findings.add((*path, "name"), what, fix)


def _sort_key(path: KeyPath) -> tuple[Any, ...]:
    return tuple((0, part, "") if isinstance(part, int) else (1, 0, part) for part in path)


def _check_group(path: KeyPath, name: str, group: dict[str, Any], findings: FileProblems) -> None:
    if path[1] == "tasks" or not isinstance(group.get("tasks"), list):
        return  # a bare task, or the schema reports it
    tasks = [task for task in group["tasks"] if isinstance(task, dict)]
    if not tasks:
        if not group["tasks"]:
            findings.add((*path, "tasks"), f"the group `{name}` has no tasks")
        return
    leads = [i for i, task in enumerate(tasks) if truth_of(task.get("lead"))]
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


def _check_task(task: FileTask, view: FileView) -> None:
    findings = view.findings
    _check_program(task, findings)
    for i, entry in enumerate(map_entries(task, "inputs")):
        path: KeyPath = (*task.path, "inputs", i)
        _check_exactly_one(path, entry, ("task", "url", "dataset"), "an input", findings)
        if isinstance(entry.get("dataset"), dict):
            reasons = _DATASET_INPUT_NO_EFFECT
            _warn_no_effect((*path, "dataset"), entry["dataset"], reasons, findings)
    for i, entry in enumerate(map_entries(task, "outputs")):
        path = (*task.path, "outputs", i)
        _check_exactly_one(path, entry, ("url", "dataset", "update_dataset"), "an output", findings)
        if isinstance(entry.get("dataset"), dict):
            reasons = {"localpath": "an output comes from the task; `path` selects a part of it"}
            _warn_no_effect((*path, "dataset"), entry["dataset"], reasons, findings)
    _check_files(task, findings)
    _check_exit_actions(task, findings)
    check_resource(task, view)
    check_tokens(task, view)
    off = [key for key in ("privileged", "hostNetwork") if truth_of(task.raw.get(key)) is not True]
    reasons = {key: why for key, why in _NO_EFFECT.items() if key not in off}
    _warn_no_effect(task.path, task.raw, reasons, findings)
    for i, mount in enumerate(_list_of(task.raw, "volumeMounts")):
        parts = mount.split(":") if isinstance(mount, str) else []
        if len(parts) > 2 or not all(parts):
            what = f"`{mount}` is not a valid mount: SOURCE or SOURCE:DESTINATION"
            findings.add((*task.path, "volumeMounts", i), what)


def _check_program(task: FileTask, findings: FileProblems) -> None:
    raw, path = task.raw, task.path
    command, script = raw.get("command"), raw.get("script")
    if command is not None and script is not None:
        what = "a task has `command` or `script`, not both"
        fix = "leave one out; `script` is started by muster, one process per GPU"
        findings.add((*path, "script"), what, fix, at_key=True)
    elif command is None and script is None:
        fix = "command: [bash], or script: train.py"
        findings.add(path, f"the task `{task.name}` needs `command` or `script`", fix, at_key=True)
    elif command == []:
        findings.add((*path, "command"), "`command` is empty", "command: [bash]")
    for key in _TRAINING_KEYS:
        if script is None and raw.get(key) is not None:
            what = f"`{key}` needs `script`: a command runs as it is, on one node"
            findings.add((*path, key), what, "script: train.py", at_key=True)


def _check_exactly_one(
    path: KeyPath, entry: dict[str, Any], kinds: tuple[str, ...], what: str, findings: FileProblems
) -> None:
    if entry is NO_MAP:
        return  # the schema reports it
    given = [kind for kind in kinds if entry.get(kind) is not None]
    names = ", ".join(f"`{kind}`" for kind in kinds)
    if len(given) > 1:
        found = " and ".join(f"`{kind}`" for kind in given)
        findings.add(path, f"{what} has exactly one of {names}; this one has {found}")
    elif not given and not any(did_you_mean(str(key), kinds) for key in entry):
        findings.add(path, f"{what} has exactly one of {names}; this one has none of them")
    nested = next((kind for kind in ("dataset", "update_dataset") if entry.get(kind)), None)
    if nested is not None and entry.get("regex") is not None:
        fix = "put it into `dataset`" if nested == "dataset" else "`paths` selects the files"
        findings.add((*path, "regex"), f"`regex` is next to `{nested}`", fix, at_key=True)


def _check_files(task: FileTask, findings: FileProblems) -> None:
    files = _Files(task.name)
    for i, entry in enumerate(map_entries(task, "files")):
        path = (*task.path, "files", i)
        _check_exactly_one(path, entry, ("contents", "localpath"), "a file", findings)
        if entry.get("localpath") is not None and entry.get("base64"):
            what = "`base64` applies to `contents`; a `localpath` is used unchanged"
            findings.add((*path, "base64"), what, at_key=True)
        if entry.get("templated") and entry.get("contents") is not None:
            what = "`templated` applies to `localpath`; `contents` is part of the template already"
            findings.warn((*path, "templated"), what)
        name = entry.get("path")
        if isinstance(name, str) and name.strip("/") and len(name) <= 4096:
            _check_file_path((*path, "path"), re.sub(r"/(\.?/)+", "/", name), i, files, findings)


@dataclass(slots=True)
class _Files:
    """The files of one task (path -> index), and the folders that they need (path -> file)."""

    task: str
    found: dict[str, int] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)


def _check_file_path(
    path: KeyPath, name: str, index: int, files: _Files, findings: FileProblems
) -> None:
    """Check that no two files have the same path, and that none is inside another."""
    if name in files.found:
        what = f"`{name}` appears twice in the task `{files.task}`"
        findings.add(path, what, why=f"files[{files.found[name]}] has the same path")
    parts = name.rstrip("/").split("/")[:_MAX_DEPTH]
    above = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
    other = files.folders.get(name) or next((f for f in above if f in files.found), None)
    if other is not None:
        what = f"`{name}` and `{other}` can't both be files: one is inside the other"
        findings.add(path, what)
    for folder in above:
        files.folders.setdefault(folder, name)
    files.found.setdefault(name, index)


def _check_exit_actions(task: FileTask, findings: FileProblems) -> None:
    actions = task.raw.get("exitActions")
    if not isinstance(actions, dict):
        return
    taken: list[tuple[int, int, str]] = []
    named: dict[str, str] = {}
    for key, value in actions.items():
        path = (*task.path, "exitActions", key)
        action = key.upper() if isinstance(key, str) else ""
        if action not in _ACTIONS:
            fix = did_you_mean(action, _ACTIONS, f"one of {', '.join(_ACTIONS)}")
            findings.add(path, f"{kind_of(key)} is not an exit action", fix, at_key=True)
        elif action in named:
            what = f"`{key}` and `{named[action]}` are the same exit action"
            findings.add(path, what, "write their codes with a comma: 1,2", at_key=True)
        named.setdefault(action, str(key))
        _check_codes(path, str(key), value, taken, findings)


def _check_codes(
    path: KeyPath, key: str, value: Any, taken: list[tuple[int, int, str]], findings: FileProblems
) -> None:
    """Check that every exit code has one action; `taken` holds the ranges of earlier actions."""
    is_number = isinstance(value, int) and 0 <= value < 10**9
    for _, low, high in split_ranges(str(value) if is_number or isinstance(value, str) else ""):
        clash = next((t for t in taken if low <= t[1] and t[0] <= high), None)
        if clash is not None:
            is_twice = clash[2] == key
            where = f"occurs twice in `{key}`" if is_twice else f"is in `{clash[2]}` and in `{key}`"
            what = f"exit code {max(low, clash[0])} {where}"
            findings.add(path, what, "give every code one action")
        if low > 255 and not 1000 <= low < 5000:
            what = f"no command ends with {low}: exit codes go to 255"
            why = "1000 and above are muster's own, e.g. 3001: the agent was lost"
            findings.warn(path, what, why=why)
        taken.append((low, high, key))
