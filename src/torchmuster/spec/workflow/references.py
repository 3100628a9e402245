"""References in a workflow file: resources, tasks of the same group, inputs, groups that run earlier."""

import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torchmuster.model.display.text import did_you_mean, few_of
from torchmuster.model.tokens import Token, find_tokens
from torchmuster.spec.problems import FileProblems, KeyPath

NO_MAP: dict[str, Any] = {}  # stands for an entry that should be a map


@dataclass(slots=True)
class FileTask:
    """One task as plain values; `group` is the index of its group."""

    path: KeyPath
    name: str
    group: int
    raw: dict[str, Any]


@dataclass(slots=True)
class FileView:
    """The names in the file, as far as they are valid."""

    findings: FileProblems
    tasks: list[FileTask] = field(default_factory=list)
    groups: list[tuple[KeyPath, str, dict[str, Any]]] = field(default_factory=list)
    resources: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    group_of: dict[str, int] = field(default_factory=dict)
    members: dict[int, dict[str, None]] = field(default_factory=dict)

    def add_task(self, task: FileTask) -> None:
        """Add a task."""
        self.tasks.append(task)
        if task.name:
            self.group_of[task.name] = task.group
        self.members.setdefault(task.group, {})[task.name] = None


def dicts(value: Any) -> list[dict[str, Any]]:
    """Return the entries of a list, with NO_MAP for entries that are not maps, so that indices are kept."""
    if not isinstance(value, list):
        return []
    return [entry if isinstance(entry, dict) else NO_MAP for entry in value]


def check_resource(task: FileTask, view: FileView) -> None:
    """Add a problem when the task's resource does not exist."""
    name = task.raw.get("resource", "default")
    if not isinstance(name, str):
        return  # the schema says so
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
            what = f"no task uses the resource `{name}`"
            fix = f"resource: {name}, in a task"
            view.findings.warn(("workflow", "resources", name), what, fix)


def texts(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text below a value, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts((*path, key), item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from texts((*path, i), item)


def check_tokens(task: FileTask, view: FileView) -> None:
    """Add a problem for each token that can't get a value."""
    for key, value in task.raw.items():
        if key == "name":
            continue  # the schema says so
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
    inputs = dicts(task.raw.get("inputs"))
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
    """Add a problem for each input that no earlier group provides, and for cycles."""
    group_of = view.group_of
    edges: dict[int, set[int]] = {i: set() for i in range(len(view.groups))}
    for task in view.tasks:
        for i, entry in enumerate(dicts(task.raw.get("inputs"))):
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
    path: KeyPath, name: str, task: FileTask, group_of: dict[str, int], view: FileView
) -> None:
    if name not in group_of:
        fix = did_you_mean(name, group_of, f"the tasks are {few_of(group_of, 8)}")
        view.findings.add(path, f"there is no task `{name}`", fix)
    elif name == task.name:
        what = f"the task `{name}` waits for itself"
        view.findings.add(path, what, "an input comes from another group")
    elif group_of[name] == task.group:
        what = f"`{name}` is in the same group: it runs at the same time"
        fix = "put it into a group of its own"
        view.findings.add(path, what, fix)
    elif group_of[name] > task.group:
        what = f"`{name}` comes later in the file"
        why = "muster runs it first; OSMO, the reference of this format, refuses the file"
        view.findings.warn(path, what, f"move `{name}` up", why=why, at_key=False)
