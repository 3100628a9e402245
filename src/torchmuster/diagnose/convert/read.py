"""The request of a group of torchrun tasks as a whole, or why it can't be a training task, for `muster convert`.

Reads the rendered file: the tasks may differ in their rank and in what only the lead does.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.diagnose.convert.shell import (
    LAUNCHER,
    CantConvertError,
    ScriptLaunch,
    read_script,
    read_words,
)
from torchmuster.errors import UsageError
from torchmuster.model.tokens import find_tokens
from torchmuster.spec.problems import KeyPath
from torchmuster.spec.source import Document, show_place

Task = dict[str, Any]
_SHELLS = ("bash", "sh")
_OF_THE_LEAD = frozenset({"outputs", "checkpoint", "kpis", "inputs"})
_COMPARED_APART = frozenset({"name", "lead", "command", "args", "files"})
# Tokens that mean something else when there is one task.
_OF_A_TASK = frozenset({"host", "ip", "rank", "num_tasks", "port"})
_FIELDS = {
    "nodes": "--nnodes",
    "nproc_per_node": "--nproc-per-node",
    "script": "the script",
    "args": "the script's arguments",
    "max_restarts": "--max-restarts",
    "environment": "the environment",
    "folder": "the folder of `cd`",
}


class RefusedError(Exception):
    """Why a group is not converted."""

    def __init__(self, errors: Sequence[UsageError]) -> None:
        super().__init__(errors[0].what)
        self.errors = list(errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunStart:
    """How a task starts torchrun.

    Attributes:
        origin: The path of its text, below the task.
        script_file: Index of the shell script in `files`; None when it is in the command.
    """

    launch: ScriptLaunch
    origin: KeyPath
    script_file: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunGroup:
    """One group of the rendered file: paths and values of its tasks.

    Attributes:
        lead: Index of the lead.
    """

    path: KeyPath
    name: str
    members: tuple[tuple[KeyPath, Task], ...]
    lead: int


@dataclass(slots=True, kw_only=True)
class Reader:
    """Collects the reasons against a conversion in `errors`."""

    document: Document
    text: str
    errors: list[UsageError] = field(default_factory=list)

    def refuse(
        self,
        path: KeyPath,
        what: str,
        *,
        why: str | None = None,
        fix: str | None = None,
        line: int = 0,
    ) -> None:
        """Note one reason; `line` counts from 0 in the text at the path."""
        self.errors.append(UsageError(what, where=self.where(path, line), why=why, fix=fix))

    def where(self, path: KeyPath, line: int = 0) -> str:
        """Return `file:line` of a line of the text at a path."""
        place = self.document.keys.get(path) or self.document.values.get(path)
        value = self.document.values.get(path)
        if place is None or value is None:
            return self.document.where(path).rpartition(":")[0]
        first = self.text.split("\n")[value[0] - 1][value[1] - 1 :]
        number = value[0] + line + 1 if first[:1] in ("|", ">") else place[0]
        row, _ = self.document.locate(number, 1)
        return show_place(self.document.name, (row, None))

    def start(self, path: KeyPath, task: Task) -> TorchrunStart | None:
        """Return how a task starts torchrun; None when that is unknown."""
        origin: KeyPath = ("command",)
        try:
            origin, number, text = _script_of(task)
            launch = read_words(_words(task)) if text is None else read_script(text)
        except CantConvertError as error:
            self.refuse((*path, *origin), error.what, why=error.why, fix=error.fix, line=error.line)
            return None
        return TorchrunStart(launch=launch, origin=origin, script_file=number)

    def agree(self, group: TorchrunGroup) -> TorchrunStart | None:
        """Return the common request of all tasks of the group; None when there are reasons against it."""
        starts: list[TorchrunStart] = []
        for path, task in group.members:
            if not mentions_torchrun(task):
                what = f"the task `{task.get('name')}` of this group does not start torchrun"
                self.refuse(path, what, fix="put it into a group of its own")
            elif (start := self.start(path, task)) is not None:
                starts.append(start)
        if self.errors:
            return None
        lead = starts[group.lead]
        self._check_count(group, lead)
        self._check_ranks(group, starts)
        self._check_tokens(group, lead)
        for index, start in enumerate(starts):
            if index != group.lead:
                self._compare(group, index, start, lead)
        self._check_folders(group, lead)
        return None if self.errors else lead

    def _at_torchrun(
        self, group: TorchrunGroup, index: int, start: TorchrunStart, what: str, **more: Any
    ) -> None:
        path = (*group.members[index][0], *start.origin)
        self.refuse(path, what, line=start.launch.line, **more)

    def _check_count(self, group: TorchrunGroup, lead: TorchrunStart) -> None:
        nodes, num_tasks = lead.launch.nodes, len(group.members)
        match = re.fullmatch(r"(?:\d+:)?(\d+)", nodes)
        if match is None:
            self._at_torchrun(
                group, group.lead, lead, f"`--nnodes {nodes}` is not a valid number of nodes"
            )
        elif int(match[1]) != num_tasks:
            tasks = f"{num_tasks} task{'s' if num_tasks != 1 else ''}"
            what = f"torchrun asks for {match[1]} nodes, and the group `{group.name}` has {tasks}"
            self._at_torchrun(group, group.lead, lead, what, fix="make both numbers the same")

    def _check_ranks(self, group: TorchrunGroup, starts: Sequence[TorchrunStart]) -> None:
        ranks = [start.launch.node_rank for start in starts]
        if all(rank == ranks[0] and rank in (None, "{{rank}}", "{{ rank }}") for rank in ranks):
            return
        if sorted(str(rank) for rank in ranks) != sorted(str(n) for n in range(len(ranks))):
            shown = ", ".join(str(rank) for rank in ranks)
            what = f"the node ranks of the group are {shown}"
            fix = f"--node-rank 0 to {len(ranks) - 1}, each once"
            self._at_torchrun(group, group.lead, starts[group.lead], what, fix=fix)
        elif ranks[group.lead] != "0":
            what = f"the lead has the node rank {ranks[group.lead]}"
            fix = "give `lead: true` to the task with the node rank 0"
            self._at_torchrun(group, group.lead, starts[group.lead], what, fix=fix)

    def _check_tokens(self, group: TorchrunGroup, lead: TorchrunStart) -> None:
        launch = lead.launch
        texts = [launch.script, launch.nproc_per_node, *launch.args, *launch.environment.values()]
        for text in texts:
            for token in find_tokens(text):
                if token.kind in _OF_A_TASK:
                    what = f"`{token.text}` has another meaning when the group is one task"
                    self._at_torchrun(group, group.lead, lead, what)

    def _compare(
        self, group: TorchrunGroup, index: int, start: TorchrunStart, lead: TorchrunStart
    ) -> None:
        path, task = group.members[index]
        lead_task = group.members[group.lead][1]
        for name, shown in _FIELDS.items():
            ours, theirs = getattr(start.launch, name), getattr(lead.launch, name)
            if ours != theirs:
                what = f"`{task['name']}` and `{lead_task['name']}` differ in {shown}"
                why = f"{_short(ours)} here, {_short(theirs)} there"
                self._at_torchrun(group, index, start, what, why=why)
        for key in sorted({*task, *lead_task} - _COMPARED_APART):
            if key in _OF_THE_LEAD and key not in task:
                continue
            if task.get(key) != lead_task.get(key):
                what = f"`{task['name']}` and `{lead_task['name']}` differ in `{key}`"
                self.refuse((*path, key) if key in task else path, what)
        if _other_files(task, start) != _other_files(lead_task, lead):
            what = f"`{task['name']}` and `{lead_task['name']}` have different files"
            self.refuse((*path, "files") if "files" in task else path, what)

    def _check_folders(self, group: TorchrunGroup, lead: TorchrunStart) -> None:
        path = (*group.members[group.lead][0], *lead.origin)
        for line, folder in lead.launch.folders:
            if not is_made(folder, lead.launch.args):
                what = f"nothing would create the folder `{folder}`"
                why = (
                    "muster creates {{output}}, and the folders of files there that arguments name"
                )
                fix = "let the training script create it, and remove the line here"
                self.refuse(path, what, why=why, fix=fix, line=line)


def mentions_torchrun(task: Task) -> bool:
    """Return whether the command of a task, or a file of it, names torchrun."""
    texts = [*_words(task)]
    texts += [str(entry.get("contents", "")) for entry in _entries(task)]
    lines = [line for text in texts for line in text.split("\n")]
    return any(LAUNCHER.search(line) for line in lines if not line.lstrip().startswith("#"))


def find_groups(raw: Mapping[str, Any]) -> list[TorchrunGroup]:
    """Return the groups with a task that names torchrun; a bare task is a group of its own."""
    found: list[TorchrunGroup] = []
    for i, group in enumerate(raw.get("groups") or []):
        path: KeyPath = ("workflow", "groups", i)
        members = tuple(((*path, "tasks", j), task) for j, task in enumerate(group["tasks"]))
        leads = [j for j, (_, task) in enumerate(members) if task.get("lead") is True]
        lead = leads[0] if leads else 0
        found.append(TorchrunGroup(path=path, name=str(group["name"]), members=members, lead=lead))
    for i, task in enumerate(raw.get("tasks") or []):
        path = ("workflow", "tasks", i)
        name = str(task["name"])
        found.append(TorchrunGroup(path=path, name=name, members=((path, task),), lead=0))
    return [
        group
        for group in found
        if any(mentions_torchrun(task) and "script" not in task for _, task in group.members)
    ]


def is_made(folder: str, args: Iterable[str]) -> bool:
    """Return whether a training task creates a folder: its output, or the folder of a file in `args`."""
    wanted = _tidy(folder)
    if wanted == "{{output}}":
        return True
    inside = [_tidy(word.partition("=")[2] if word.startswith("-") else word) for word in args]
    return wanted.startswith("{{output}}/") and any(w.startswith(f"{wanted}/") for w in inside)


def _tidy(path: str) -> str:
    return re.sub(r"\{\{\s*output\s*\}\}", "{{output}}", path).rstrip("/")


def _entries(task: Task) -> list[dict[str, Any]]:
    return [entry for entry in task.get("files") or [] if isinstance(entry, dict)]


def _words(task: Task) -> list[str]:
    return [str(word) for word in [*(task.get("command") or []), *(task.get("args") or [])]]


def _other_files(task: Task, start: TorchrunStart) -> list[Any]:
    return [entry for i, entry in enumerate(_entries(task)) if i != start.script_file]


def _script_of(task: Task) -> tuple[KeyPath, int | None, str | None]:
    """Return the path of the text that starts torchrun, its index in `files`, and the text.

    The text is None for a command without a shell.
    """
    words = _words(task)
    if os.path.basename(words[0]) not in _SHELLS:
        return ("command",), None, None
    index = 1
    while index < len(words) and words[index].startswith("-"):
        flags = words[index][1:]
        if words[index : index + 2] == ["-o", "pipefail"]:
            index += 2
            continue
        if not flags or not set(flags) <= set("eucx"):
            what = f"`{words[0]} {words[index]}` is not a simple call of a script"
            raise CantConvertError(what, fix="command: [bash], with the script in `args`")
        index += 1
        if "c" in flags:
            return _inline(task, words, index)
    if len(words) != index + 1:
        what = "the shell is not called with exactly one script"
        raise CantConvertError(what, fix="write the arguments into the script")
    for number, entry in enumerate(_entries(task)):
        if entry.get("path") == words[index]:
            if entry.get("contents") is None or entry.get("base64"):
                what = f"the text of `{words[index]}` is not in this file"
                raise CantConvertError(what, fix="put it into `contents`")
            return ("files", number, "contents"), number, str(entry["contents"])
    raise CantConvertError(f"the script `{words[index]}` is none of the task's `files`")


def _inline(task: Task, words: Sequence[str], index: int) -> tuple[KeyPath, None, str]:
    if len(words) != index + 1:
        what = "the shell is not called with exactly one text after `-c`"
        raise CantConvertError(what, fix="write everything into the text")
    count = len(task.get("command") or [])
    origin: KeyPath = ("command", index) if index < count else ("args", index - count)
    return origin, None, words[index]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = " ".join(f"{key}={text}" for key, text in value.items())
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    text = f"`{text}`" if text and value is not None else "nothing"
    return text if len(text) <= 70 else f"{text[:66]}...`"


def at(raw: Mapping[str, Any], path: KeyPath) -> Any:
    """Return the value at a path that begins with `workflow`."""
    here: Any = raw
    for part in path[1:]:
        here = here[part]
    return here


def task_at(raw: Mapping[str, Any], group: TorchrunGroup) -> dict[str, Any]:
    """Return the one task of a group."""
    found: dict[str, Any] = at(raw, group.path)
    return found if group.path[1] == "tasks" else found["tasks"][0]


def difference(
    old: Mapping[str, Any], new: Mapping[str, Any], group: TorchrunGroup, start: TorchrunStart
) -> str | None:
    """Return how the new file differs from the intended result."""
    kind, index = str(group.path[1]), group.path[2]
    for key in {*old, *new} - {kind}:
        if old.get(key) != new.get(key):
            return f"`{key}` would change"
    for i, (before, after) in enumerate(zip(old[kind], new[kind], strict=False)):
        if i != index and before != after:
            return f"`{before.get('name')}` would change"
    if len(old[kind]) != len(new[kind]):
        return f"there would be {len(new[kind])} {kind}"
    task, lead, launch = task_at(new, group), group.members[group.lead][1], start.launch
    environment = {**(lead.get("environment") or {}), **launch.environment}
    expected: dict[str, Any] = {
        **{k: v for k, v in lead.items() if k not in ("command", "args", "lead", "files")},
        "nodes": launch.nodes,
        "nproc_per_node": launch.nproc_per_node,
    }
    expected |= {"environment": environment} if environment else {}
    for key, value in expected.items():
        found = task.get(key)
        if (str(found) if isinstance(found, int) else found) != (
            str(value) if isinstance(value, int) else value
        ):
            return f"`{key}` would be `{found}`, not `{value}`"
    entries = _entries(lead)
    if any(entry not in entries for entry in _entries(task)):
        return "`files` would change"
    script = os.path.join(launch.folder or "", launch.script)
    same = [script, *[e.get("localpath") for e in entries if e.get("path") == script]]
    if task.get("script") not in same:
        return f"the script would be `{task.get('script')}`, not `{script}`"
    words = [str(word) for word in task.get("args") or []]
    if words != list(launch.args):
        return f"the arguments would be `{' '.join(words)}`, not `{' '.join(launch.args)}`"
    return None
