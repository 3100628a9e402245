"""`muster convert`: groups of torchrun tasks become one task with `nodes`, `nproc_per_node` and `script`.

From text to text. Both texts are rendered and compared: nothing is guessed.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from torchmuster.diagnose.convert.edits import (
    Draft,
    Loop,
    TaskEdit,
    TextLine,
    as_number,
    as_scalar,
    find_loops,
    first_round,
    list_lines,
    used_names,
    without_unused_values,
)
from torchmuster.diagnose.convert.read import (
    Reader,
    RefusedError,
    TorchrunGroup,
    TorchrunStart,
    at,
    difference,
    find_groups,
    task_at,
)
from torchmuster.diagnose.convert.shell import CantConvertError, ScriptLaunch
from torchmuster.errors import ManyErrors, UsageError
from torchmuster.spec.problems import FileProblems, KeyPath, Problems
from torchmuster.spec.source import Document, Source, parse_yaml
from torchmuster.spec.workflow import schema
from torchmuster.spec.workflow.check import check_workflow
from torchmuster.spec.workflow.sections import to_lines
from torchmuster.spec.workflow.template import render_file

_NAME = re.compile(r"(name:\s*)(?:\{\{.*?\}\}|[^#{])*?(\s*(?:#.*)?)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A converted file.

    Attributes:
        text: The new text; the old one where nothing was converted.
        converted: The names of the groups that became one task.
        notes: Notes for the user, one sentence each.
        refusals: Why other groups stay as they are.
    """

    text: str
    converted: tuple[str, ...]
    notes: tuple[str, ...]
    refusals: tuple[UsageError, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    document: Document
    text: str
    raw: dict[str, Any]
    values: dict[str, Any]


def convert_workflow(
    source: Source, sets: Mapping[str, Any], set_strings: Mapping[str, Any]
) -> Conversion:
    """Return the short form of a workflow file.

    Args:
        source: The file.
        sets: Values for the template.
        set_strings: The same, as texts.

    Raises:
        ManyErrors: The file is not valid.
    """
    values = {**sets, **set_strings}
    groups = find_groups(_view(source, values).raw)
    current, notes = source, list[str]()
    converted, refusals = list[str](), list[UsageError]()
    # From the end on: so the lines of what is still to come keep their numbers.
    for group in reversed(groups):
        try:
            change = _Change(source=current, view=_view(current, values), name=group.name)
            current = change.apply(values)
        except RefusedError as error:
            refusals = [*error.errors, *refusals]
            continue
        converted.insert(0, group.name)
        notes = [*change.notes, *notes]
    if converted:
        current, gone = without_unused_values(source, current)
        notes += gone
    if not groups:
        refusals.append(UsageError("no task of this file starts torchrun", where=source.path))
    return Conversion(
        text=current.text,
        converted=tuple(converted),
        notes=tuple(notes),
        refusals=tuple(refusals),
    )


def _view(source: Source, values: Mapping[str, Any]) -> _View:
    problems = Problems()
    rendered = render_file(source, values, {}, problems)
    if rendered is None:
        raise ManyErrors(problems.found)
    document = parse_yaml(rendered.text, source.path, rendered.locate)
    raw = document.value.get("workflow") if isinstance(document.value, dict) else None
    findings = FileProblems()
    check_workflow(raw, findings)
    errors = [f.as_error(document.where(f.path, at_key=f.at_key)) for f in findings.errors]
    try:
        schema.Workflow.model_validate(raw)
    except ValidationError as error:
        fix = f"muster validate {source.path}"
        what = f"{error.error_count()} values of the file are not valid"
        errors.append(UsageError(what, where=source.path, fix=fix))
    if errors or not isinstance(raw, dict):
        raise ManyErrors(errors)
    return _View(document=document, text=rendered.text, raw=raw, values=dict(rendered.values))


@dataclass(slots=True, kw_only=True)
class _Change:
    source: Source
    view: _View
    name: str
    notes: list[str] = field(default_factory=list)
    _variables: dict[str, int] = field(default_factory=dict)
    _counted: set[str] = field(default_factory=set)

    def apply(self, values: Mapping[str, Any]) -> Source:
        """Return the file with the group as one task.

        Raises:
            RefusedError: It can't be one.
        """
        group = next(g for g in find_groups(self.view.raw) if g.name == self.name)
        reader = Reader(document=self.view.document, text=self.view.text)
        start = reader.agree(group)
        if start is None:
            raise RefusedError(reader.errors)
        try:
            draft, path = self._one_task(group)
            lines, nodes = self._short_form(draft, path, group, start)
        except CantConvertError as error:
            raise self._refusal(error.what, error.line, error.why, error.fix) from error
        newline = "\r\n" if "\r\n" in self.source.text else "\n"
        text = "\n".join(line.text for line in lines).replace("\n", newline)
        text += newline if self.source.text.endswith("\n") else ""
        new = replace(self.source, text=text)
        self._verify(new, group, start, values, nodes)
        return new

    def _refusal(
        self, what: str, line: int, why: str | None = None, fix: str | None = None
    ) -> RefusedError:
        where = f"{self.source.path}:{line}"
        return RefusedError([UsageError(what, where=where, why=why, fix=fix)])

    def _line_of(self, path: KeyPath) -> int:
        return self.view.document.position(path)[0]

    def _one_task(self, group: TorchrunGroup) -> tuple[Draft, KeyPath]:
        """Return the file with only the lead in the group, and the lead's path."""
        lines = [TextLine(number=i + 1, text=t) for i, t in enumerate(to_lines(self.source.text))]
        rows = {path: self._line_of(path) for path, _ in group.members}
        lead_row = rows[group.members[group.lead][0]]
        loops = [loop for loop in find_loops(lines) if any(_holds(loop, r) for r in rows.values())]
        for loop in loops:
            self._check_loop(loop, group, rows)
            self._counted |= set(used_names([lines[loop.start]]))
        kept: list[TextLine] = []
        starts = {loop.start: loop for loop in loops}
        index = 0
        while index < len(lines):
            begun = starts.get(index)
            if begun is None:
                kept.append(lines[index])
                index += 1
                continue
            if _holds(begun, lead_row):
                kept += first_round(lines, begun)
                self._variables[begun.name] = begun.first or 0
            index = begun.end + 1
        in_loops = {row for row in rows.values() if any(_holds(loop, row) for loop in loops)}
        for row in sorted({*rows.values()} - in_loops - {lead_row}, reverse=True):
            draft = Draft(self.source.path, kept)
            gone = draft.item(_path_at(draft, row, len(group.members[0][0])))
            stop = gone.stop
            while stop < len(kept) and not kept[stop].text.strip():
                stop += 1
            kept = [*kept[: gone.start], *kept[stop:]]
        draft = Draft(self.source.path, kept)
        return draft, _path_at(draft, lead_row, len(group.members[0][0]))

    def _check_loop(self, loop: Loop, group: TorchrunGroup, rows: Mapping[KeyPath, int]) -> None:
        inside = [path for path, row in rows.items() if _holds(loop, row)]
        for path in self.view.document.values:
            is_other = len(path) == len(inside[0]) and path[-2] == "tasks" and path not in rows
            if is_other and _holds(loop, self._line_of(path)):
                what = "this loop makes tasks of several groups"
                raise CantConvertError(what, loop.start + 1)
        lead = group.members[group.lead][0]
        if lead in inside and inside[0] != lead:
            what = "the lead does not come from the first iteration of this loop"
            raise CantConvertError(what, loop.start + 1)
        if lead in inside and loop.first is None:
            what = "this loop does not count with `range`"
            raise CantConvertError(what, loop.start + 1, "{% for item in range(n_nodes) %}")

    def _short_form(
        self, draft: Draft, path: KeyPath, group: TorchrunGroup, start: TorchrunStart
    ) -> tuple[list[TextLine], str]:
        """Return the lines with the short form, and the text of its `nodes`."""
        task = _restored(draft.value(path), draft)
        number = draft.lines[draft.index(path)].number
        reader = Reader(document=draft.document, text="\n".join(li.text for li in draft.lines))
        written = reader.start(path, task)
        if written is None:
            error = reader.errors[0]
            raise CantConvertError(error.what, number, error.fix, error.why)
        launch = written.launch
        edit = TaskEdit(draft=draft, path=path)
        script, dropped = _script_key(launch, start.launch, task, written, number)
        for key in ("command", "args", "lead"):
            edit.drop_key(key)
        if dropped:
            edit.drop_files(dropped)
        edit.added = [
            f"nodes: {as_number(launch.nodes)}",
            f"nproc_per_node: {as_number(launch.nproc_per_node)}",
            f"script: {as_scalar(script)}",
        ]
        edit.added += list_lines("args", launch.args) if launch.args else []
        edit.added += (
            [] if launch.max_restarts is None else [f"max_restarts: {launch.max_restarts}"]
        )
        edit.add_environment(launch.environment, number)
        self._settle_variables(edit, group)
        self._write_notes(group, start, task)
        return edit.apply("command"), launch.nodes

    def _settle_variables(self, edit: TaskEdit, group: TorchrunGroup) -> None:
        """Replace the variable of the removed loop by its first value, or refuse its use."""
        draft = edit.draft
        name_row = draft.index((*edit.path, "name"))
        for index in draft.item(edit.path):
            text = edit.renamed.get(index, draft.lines[index].text)
            if index in edit.gone:
                continue
            for name, value in self._variables.items():
                if index == name_row and _uses(text, name):
                    lead = group.members[group.lead][1]["name"]
                    text = _NAME.sub(rf"\g<1>{lead}\g<2>", text)
                text = re.sub(rf"\{{\{{\s*{name}\s*\}}\}}", str(value), text)
                if _uses(text, name) or _uses(text, "loop"):
                    what = f"`{name}` of the loop is used in `{text.strip()}`"
                    raise CantConvertError(what, draft.lines[index].number)
            edit.renamed[index] = text
        for line in edit.added:
            for name in (*self._variables, *(["loop"] if self._variables else [])):
                if _uses(line, name):
                    what = f"`{name}` of the loop is used in `{line}`"
                    raise CantConvertError(what, draft.lines[name_row].number)

    def _write_notes(
        self, group: TorchrunGroup, start: TorchrunStart, task: Mapping[str, Any]
    ) -> None:
        launch, lead = start.launch, task["name"]
        if "{{" in str(lead):
            lead = group.members[group.lead][1]["name"]
        say = self.notes.append
        nodes = "1 node" if launch.nodes == "1" else f"{launch.nodes} nodes"
        say(f"the group `{group.name}` is one task, `{lead}`, on {nodes}")
        folders = [f for _, f in launch.folders if "/" in f]
        if folders:
            say(f"{', '.join(folders)}: muster makes it, because an argument names a file in it")
        if launch.max_restarts is None:
            say("a failed worker is restarted up to 3 times; torchrun did not: max_restarts: 0")
        if launch.barriers:
            say("the barrier is removed: a training task waits for all its nodes by itself")
        say("training runs in the folder of the workflow file: relative paths start there")
        shown = [text for _, text in launch.dropped if not text.startswith(("set ", "cd "))]
        if shown:
            say(f"lines that only print are removed: {'; '.join(shown[:4])}")
        for key in ("outputs", "checkpoint"):
            if sum(key in member for _, member in group.members) > 1:
                say(f"`{key}` was in every task and now happens once")

    def _verify(
        self,
        new: Source,
        group: TorchrunGroup,
        start: TorchrunStart,
        values: Mapping[str, Any],
        nodes: str,
    ) -> None:
        """Compare the rendered old and new text."""
        line = self._line_of(group.members[group.lead][0])
        try:
            after = _view(new, values)
        except (ManyErrors, UsageError) as error:
            found = error.errors[0] if isinstance(error, ManyErrors) else error
            what = f"the short form of `{group.name}` would not be valid"
            raise self._refusal(what, line, found.what, found.fix) from error
        problem = difference(self.view.raw, after.raw, group, start)
        if problem is not None:
            what = f"the short form of `{group.name}` would not be equivalent"
            raise self._refusal(what, line, problem)
        for name in sorted(self._counted | set(used_names([TextLine(number=0, text=nodes)]))):
            if type(self.view.values.get(name)) is int:
                self._verify_count(new, group, {**values, name: self.view.values[name] + 1}, name)

    def _verify_count(
        self, new: Source, group: TorchrunGroup, values: Mapping[str, Any], name: str
    ) -> None:
        """Compare the number of nodes with that of tasks after increasing a value by one."""
        line = self._line_of(group.members[group.lead][0])
        what = f"the number of nodes of `{group.name}` would not always be its number of tasks"
        shown = f"{name}={values[name]}"
        try:
            old_tasks = at(_view(self.source, values).raw, group.path)["tasks"]
            new_nodes = str(task_at(_view(new, values).raw, group)["nodes"])
        except (ManyErrors, UsageError) as error:
            found = error.errors[0] if isinstance(error, ManyErrors) else error
            raise self._refusal(what, line, f"with {shown}: {found.what}") from error
        if new_nodes.rpartition(":")[2] != str(len(old_tasks)):
            why = f"with {shown} there are {len(old_tasks)} tasks and {new_nodes} nodes"
            raise self._refusal(what, line, why)


def _holds(loop: Loop, row: int) -> bool:
    return loop.start < row - 1 < loop.end


def _path_at(draft: Draft, row: int, length: int) -> KeyPath:
    for path in draft.document.values:
        is_task = len(path) == length and isinstance(path[-1], int) and path[-2] == "tasks"
        if is_task and draft.lines[draft.index(path)].number == row:
            return path
    what = "the task that begins here can't be found without the template"
    raise CantConvertError(what, row, "write the tasks of the group without conditions around them")


def _restored(value: Any, draft: Draft) -> Any:
    if isinstance(value, str):
        return draft.restore(value)
    if isinstance(value, list):
        return [_restored(item, draft) for item in value]
    if isinstance(value, dict):
        return {key: _restored(item, draft) for key, item in value.items()}
    return value


def _uses(text: str, name: str) -> bool:
    parts = re.findall(r"\{\{.*?\}\}|\{%.*?%\}", text)
    return any(re.search(rf"\b{name}\b", part) for part in parts)


def _script_key(
    launch: ScriptLaunch,
    rendered: ScriptLaunch,
    task: Mapping[str, Any],
    written: TorchrunStart,
    number: int,
) -> tuple[str, list[int]]:
    """Return the value of `script`, and the entries of `files` that are no longer needed."""
    entries = task.get("files") or []
    dropped = [] if written.script_file is None else [written.script_file]
    barriers = [path for _, path in launch.barriers]
    dropped += [i for i, entry in enumerate(entries) if entry.get("path") in barriers]
    script = os.path.join(launch.folder or "", launch.script)
    found = [i for i, entry in enumerate(entries) if entry.get("path") == script]
    rest = [entry for i, entry in enumerate(entries) if i not in {*dropped, *found}]
    for entry in rest:
        if not str(entry.get("path", "")).startswith(("/", "{{")):
            what = f"the file `{entry.get('path')}` is in the working directory of its task"
            why = "a training task runs in the folder of the workflow file"
            raise CantConvertError(what, number, "give it an absolute path, e.g. in /tmp", why)
    if found:
        entry = entries[found[0]]
        local = entry.get("localpath")
        if local and not rest and not entry.get("templated") and not str(local).startswith("~"):
            return str(local), [*dropped, *found]
    if script.startswith(("/", "{{")):
        return script, dropped
    what = f"the file does not say where the script `{script}` is"
    raise CantConvertError(what, number, "give its absolute path, or add it to `files`")
