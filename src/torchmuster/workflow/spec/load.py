"""Load a workflow file into a plan, and report every problem at its line of the user's text.

read -> render -> parse -> check (structure, schema) -> plan

The format splits by lines: a section begins at a `key:` in the first column. So muster can read
`default-values:` before it renders the rest, and a `key:` in the first column is never part of a
text. To render, the file is split into sections, its runtime tokens are hidden, a child process runs
Jinja, and the tokens are put back. A text without Jinja is not rendered. Every line of the result
is mapped to its original line, so that later messages name the line in the user's own file.
"""

import importlib.util
import json
import os
import re
import secrets
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core import proc
from torchmuster.core.model import codec
from torchmuster.core.model.text import did_you_mean, report_of_error
from torchmuster.core.plainfile import open_plain
from torchmuster.core.spec.problems import Problems, near_file, parse_set_env
from torchmuster.errors import ManyErrors, MusterError, UsageError
from torchmuster.launcher.spec.scalars import FileProblem, FileProblems, show_path
from torchmuster.workflow.plan import GroupPlan, WorkflowPlan
from torchmuster.workflow.spec import schema
from torchmuster.workflow.spec.check import check_workflow, is_label_key, is_label_value
from torchmuster.workflow.spec.compile import CompileContext, LocalDataset, plan_groups
from torchmuster.workflow.spec.sandbox import pack
from torchmuster.workflow.spec.source import (
    MAX_BYTES,
    Default,
    Document,
    Position,
    Source,
    check_name,
    default_values,
    parse_set_strings,
    parse_sets,
    parse_yaml,
)
from torchmuster.workflow.tokens import ARGUMENT_KINDS, BARE_KINDS, OUR_BARE_KINDS

KNOWN = ("workflow", "default-values", "version")
# Keys of the level below, which a fragment of a file has at its top level.
_BELOW = ("groups", "tasks", "name", "resources", "timeout", "labels", "pool")
_MAX_REPORTED = 20  # problems of one kind
_KEY = re.compile(r"""(["']?)([A-Za-z_][\w.-]*)\1[ \t]*:(?=[ \t\r]|$)""")
_BLOCK = re.compile(r"[|>][-+0-9]{0,2}[ \t]*(#.*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One top-level key and the lines up to the next.

    Attributes:
        line: The line of its key, from 1.
    """

    name: str
    line: int
    text: str


def split_sections(source: Source, problems: Problems) -> dict[str, Section]:
    """Return the known sections; report unknown and repeated keys as problems."""
    lines = to_lines(source.text)
    starts = _key_lines(lines)
    _check_preface(source, lines[: starts[0] if starts else len(lines)], problems)
    found: dict[str, Section] = {}
    unknown: list[tuple[str, int]] = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=False):
        name = _name(lines[start])
        if name not in KNOWN:
            unknown.append((name, start))
        elif name in found and len(problems.found) < _MAX_REPORTED:
            what = f"the top-level key `{name}` occurs twice"
            why = f"the first one is in line {found[name].line}"
            problems.add(what, f"{source.path}:{start + 1}", why, _indent_fix(lines, start))
        elif name not in found:
            text = "\n".join(lines[start:end])
            found[name] = Section(name=name, line=start + 1, text=text)
    if "workflow" in found:
        _report_unknown(source, lines, unknown, problems)
    else:
        _report_missing(source, lines, unknown, problems)
    return found


def to_lines(text: str) -> list[str]:
    """Return the lines as Jinja and YAML count them; a final newline begins no line."""
    lines = re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff"))
    return lines[:-1] if not lines[-1] else lines


def _name(line: str) -> str:
    match = _KEY.match(line)
    return match[2] if match else ""


def _key_lines(lines: Sequence[str]) -> list[int]:
    """Return the indices of lines that begin a section; skip unknown keys in `{#...#}`."""
    last_end = max((index for index, line in enumerate(lines) if "#}" in line), default=-1)
    found: list[int] = []
    is_comment = False
    for index, line in enumerate(lines):
        if _KEY.match(line) and (not is_comment or _name(line) in KNOWN):
            found.append(index)
        opened, closed = line.rfind("{#"), line.rfind("#}")
        if opened != closed:
            is_comment = opened > closed and index < last_end
    return found


def _check_preface(source: Source, lines: Sequence[str], problems: Problems) -> None:
    for index, line in enumerate(lines):
        text = line.strip()
        if not text or text.startswith(("#", "%YAML")) or text == "---":
            continue
        if text.startswith("{#") and text.endswith("#}"):
            continue
        what = "text before the first section would be dropped"
        fix = "move it below `workflow:`"
        if "{%" in text:
            why = "Jinja sees only the text below `workflow:`, so a `{% set %}` here has no effect"
            problems.add(what, f"{source.path}:{index + 1}", why, fix)
        elif any(_KEY.match(line) for line in to_lines(source.text)):
            why = f"`{text[:60]}` does not belong to any key"
            problems.add(what, f"{source.path}:{index + 1}", why, fix)
        return


def _report_unknown(
    source: Source, lines: Sequence[str], unknown: Sequence[tuple[str, int]], problems: Problems
) -> None:
    for name, start in unknown[:_MAX_REPORTED]:
        fix = _indent_fix(lines, start) or did_you_mean(name, KNOWN)
        if fix is None and name in _BELOW:
            fix = f"indent `{name}:` to put it under `workflow:`"
        why = f"the top-level keys are {', '.join(KNOWN)}"
        what = f"`{name}` is not a top-level key"
        problems.add(what, f"{source.path}:{start + 1}:1", why, fix)


def _report_missing(
    source: Source, lines: Sequence[str], unknown: Sequence[tuple[str, int]], problems: Problems
) -> None:
    names = [name for name, _ in unknown]
    inner = [name for name in names if name in _BELOW]
    if inner:
        where = f"{source.path}:{dict(reversed(unknown))[inner[0]] + 1}"
        missing = "put it under `workflow:`"
        if "name" not in names:
            missing += " with a `name:`"
        shown = " and ".join(f"`{name}:`" for name in inner[:3])
        verb = "is" if len(inner) == 1 else "are"
        what = f"{shown} {verb} at the top level, and there is no `workflow:`"
        problems.add(what, where, "this is a part of a workflow file", missing)
        return
    _report_unknown(source, lines, unknown, problems)
    near = any(did_you_mean(name, ["workflow"]) for name in names[:_MAX_REPORTED])
    if not near:
        fix = "workflow:\n  name: my-run\n  tasks: ..."
        if source.path.endswith(".py"):
            fix = f"muster run {source.path}"
        problems.add("there is no top-level key `workflow:`", source.path, fix=fix)


def _indent_fix(lines: Sequence[str], start: int) -> str | None:
    """Return a hint to indent a key that seems to belong to the text block above it."""
    for index in range(start - 1, max(-1, start - 200), -1):
        line = lines[index]
        if line[:1] in ("", " ", "\t") and _BLOCK.search(line):
            return f"indent it: the text that begins in line {index + 1} ends where a line is not"
        if _KEY.match(line) and _name(line) in KNOWN:
            return None
    return None


# Rendering.

CPU_S = 0.5
# Compiling takes 0.15 ms for each expression, so a long file gets more time.
_CPU_PER_MARK_S, _MAX_CPU_S = 0.0003, 2.5
MEMORY_BYTES = 256 * 1024 * 1024
# The limit of CPU time ends a template first, since it only computes; this is for a busy machine.
_WALL_S = 20.0
_BOOT = "import sys; sys.path += sys.argv[1:]; from torchmuster.workflow.spec import sandbox; sandbox.main()"
_RAW = "{% raw %} and {% endraw %} around the text, or a file of its own (`localpath`)"

_WITH_ARGUMENT = re.compile(
    r"(\{\{[ \t]*(?:input|host|ip|port)[ \t]*:)"
    r"((?:[^{}\n]|\{\{[^{}\n]{1,200}\}\}){1,256})(\}\})"
)
_BARE = re.compile(r"\{\{([ \t]*)(output|workflow_id|uuid|rank|num_tasks|port|attempt)([ \t]*)\}\}")
# Statements that assign names inside the template.
_ASSIGNS = re.compile(
    r"\{%[-+]?[ \t]*(?:for[ \t]+(?P<loop>[^%\n]{1,200}?)[ \t]+in\b|set[ \t]+(?P<set>[^=%\n]{1,200})"
    r"|with[ \t]+(?P<with>[^%\n]{1,200})|(?:macro|call|import|from)\b(?P<more>[^%\n]{1,200}))"
)


class _CutTokenError(Exception):
    """The template changed the placeholder of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The section `workflow:` as YAML text that still contains runtime tokens.

    Attributes:
        text: The YAML; its first line is the key `workflow:`.
        workflow_lines: The file's line, from 1, of each line of `text`.
        template: The original lines of the file.
        warnings: Warnings about lines that have no effect, or an unexpected one.
        unused: A warning for each value that the template does not use, by the value's name.
        values: The template's values, by name.
        is_template: Whether the text contains Jinja.
    """

    text: str
    workflow_lines: tuple[int, ...]
    template: tuple[str, ...]
    warnings: tuple[UsageError, ...]
    unused: Mapping[str, UsageError]
    values: Mapping[str, Any]
    is_template: bool

    def locate(self, line: int, column: int) -> Position:
        """Return the (line, column) in the file of a position in `text`.

        The column is None when rendering changed the line before that column.
        """
        index = min(max(line, 1), len(self.workflow_lines)) - 1
        origin = self.workflow_lines[index]
        before = self.text.split("\n")[index][: column - 1] if self.is_template else ""
        written = self.template[origin - 1] if origin <= len(self.template) else ""
        same = not self.is_template or written.startswith(before)
        return origin, column if same else None


def render_file(
    source: Source, sets: Mapping[str, Any], set_strings: Mapping[str, Any], problems: Problems
) -> Rendered | None:
    """Render the workflow to YAML text; return None when there are problems.

    Values come from `default-values:`, `sets` and `set_strings`; later ones win.
    """
    if len(source.text) > MAX_BYTES or len(source.text.encode("utf-8", "replace")) > MAX_BYTES:
        what = f"the file is larger than {MAX_BYTES // 1024**2} MiB"
        problems.add(what, source.path, fix="move large contents to files (`localpath`)")
        return None
    before = len(problems.found)
    sections = split_sections(source, problems)
    warnings = Problems()
    _check_version(source, sections.get("version"), warnings)
    defaults: list[Default] = []
    if values := sections.get("default-values"):
        defaults = default_values(values.text, source.path, values.line, problems)
    workflow = sections.get("workflow")
    if workflow is None or len(problems.found) > before:
        return None
    given = {default.name: default.value for default in defaults} | {**sets, **set_strings}
    _check_names(source, defaults, given, warnings)
    job = _Rendering(source=source, section=workflow, values=given)
    found = job.render(problems)
    if found is None:
        return None
    text, lines, used = found
    unused = _find_unused([*sets, *set_strings], used, given)
    for default in defaults:
        if not {default.name} & {*used, *sets, *set_strings} and not check_name(default.name):
            what = f"the template never uses the default value `{default.name}`"
            unused[default.name] = UsageError(what, where=f"{source.path}:{default.line}")
    return Rendered(
        text=text,
        workflow_lines=lines,
        template=tuple(to_lines(source.text)),
        warnings=tuple(warnings.found),
        unused=unused,
        values=given,
        is_template=job.is_template,
    )


def protect_tokens(text: str, variables: frozenset[str]) -> tuple[str, Callable[[str], str]]:
    """Hide runtime tokens from Jinja; return the new text and a function that restores them.

    Placeholders consist of digits, so filters that change letters leave them alone.

    Args:
        text: A template.
        variables: Names that have a value in the template. A token of such a name is hidden only
            where the format itself requires it (`{{output}}` without spaces).
    """
    nonce = "".join(secrets.choice("123456789") for _ in range(24))
    hidden: list[str] = []

    def hide(written: str) -> str:
        hidden.append(written)
        return f"{nonce}{len(hidden) - 1:07d}"

    def hide_bare(match: re.Match[str]) -> str:
        is_exact = match[2] in BARE_KINDS and not match[1] and not match[3]
        return hide(match[0]) if is_exact or match[2] not in variables else match[0]

    def hide_braces(match: re.Match[str]) -> str:
        if "{{" in match[2]:  # Jinja computes the name of the task
            return hide(match[1]) + match[2] + hide(match[3])
        return hide(match[0]) if match[2].strip() else match[0]

    def restore_match(match: re.Match[str]) -> str:
        index = int(match[1] or len(hidden))
        if index >= len(hidden):  # a filter or a slice has changed the placeholder
            raise _CutTokenError
        return hidden[index]

    def restore(rendered: str) -> str:
        return re.sub(nonce + r"(\d{7})?", restore_match, rendered)

    return _WITH_ARGUMENT.sub(hide_braces, _BARE.sub(hide_bare, text)), restore


def cpu_limit_s(text: str) -> float:
    """Return the limit on the template's CPU time, in seconds."""
    num_marks = text.count("{{") + text.count("{%")
    return min(CPU_S + _CPU_PER_MARK_S * num_marks, _MAX_CPU_S)


@dataclass(slots=True, kw_only=True)
class _Rendering:
    source: Source
    section: Section
    values: dict[str, Any]
    is_template: bool = False

    def render(self, problems: Problems) -> tuple[str, tuple[int, ...], frozenset[str]] | None:
        """Return the text, the file's line of each of its lines, and the names that it looks up."""
        variables = frozenset(self.values) | _assigned(self.section.text)
        hidden, restore = protect_tokens(self.section.text, variables)
        first = self.section.line
        if not any(mark in hidden for mark in ("{{", "{%", "{#")):
            text = restore(hidden)
            return text, tuple(range(first, first + text.count("\n") + 1)), frozenset()
        self.is_template = True
        answer = _ask_child(hidden, self.values)
        if "error" in answer:
            self._explain(answer, problems)
            return None
        try:
            text = restore(answer["text"])
        except _CutTokenError:
            fix = "write the token outside of Jinja's expressions and filters"
            problems.add("the template cuts a runtime token", self._where(None), fix=fix)
            return None
        lines = tuple(line + first - 1 for line in answer["lines"])
        return text, lines, frozenset(answer["undeclared"])

    def _explain(self, answer: Mapping[str, Any], problems: Problems) -> None:
        error = answer["error"]
        if missing := answer.get("undefined"):
            for name, line in missing:
                self._explain_undefined(name, line, problems)
            return
        message, kind = error["message"], error["kind"]
        what, fix = _SENTENCES[kind]
        why = message or None
        if kind == "time":
            why = f"the limit is {cpu_limit_s(self.section.text):.1f} s of CPU time"
        line = self._line(error["line"])
        if kind == "syntax" and re.search(r"\{\{[ \t]*(input|host|ip)\b", line):
            fix = "a token is written `{{input:0}}` or `{{host:TASK}}`"
        elif kind == "syntax" and (word := re.search(r"\{\{[ \t]*(\w+)[ \t]*:", line)):
            fix = did_you_mean(word[1], ARGUMENT_KINDS, fix)
        problems.add(what, self._where(error["line"]), why, fix)

    def _explain_undefined(self, name: str, number: int | None, problems: Problems) -> None:
        line = self._line(number)
        why = None
        if name in BARE_KINDS | OUR_BARE_KINDS:
            why = f"`{name}` is a token: it has a value only when the task runs"
            problems.add(
                f"`{name}` can't be part of a Jinja expression",
                self._where(number),
                why,
                f"write `{{{{{name}}}}}` alone, or give the name a value in `default-values`",
            )
            return
        if re.search(r"(^|\s)#.*" + re.escape(name), line):
            why = "it is in a YAML comment, but Jinja reads comments too"
        fix = did_you_mean(name, [*self.values, *BARE_KINDS, *OUR_BARE_KINDS]) or (
            f"--set {name}=..., or a value in `default-values`; for `{{{{` in a script: {_RAW}"
        )
        problems.add(f"the name `{name}` has no value", self._where(number), why, fix)

    def _line(self, number: int | None) -> str:
        lines = self.section.text.split("\n")
        return lines[number - 1] if number and number <= len(lines) else ""

    def _where(self, number: int | None) -> str:
        if number is None:
            return self.source.path
        return f"{self.source.path}:{number + self.section.line - 1}"


_SENTENCES = {
    "undefined": ("the template uses a value that does not exist", None),
    "time": ("the template takes too much time", "make its loops shorter"),
    "memory": (f"the template needs more than {MEMORY_BYTES // 1024**2} MiB", "make it smaller"),
    "size": (f"the template makes more than {MAX_BYTES // 1024**2} MiB of text", "make it smaller"),
    "syntax": ("this is not Jinja", f"when it is meant for a script: {_RAW}"),
    "refused": ("the template does something that is not allowed here", None),
    "depth": ("the template is nested too deeply", "make it simpler"),
    "failed": ("the template can't be rendered", None),
}


def _ask_child(text: str, values: Mapping[str, Any]) -> dict[str, Any]:
    request = {
        "text": text,
        "values": pack(dict(values)),
        "nonce": "".join(secrets.choice("123456789") for _ in range(24)) + "m",
        "cpu_s": cpu_limit_s(text),
        "memory_bytes": MEMORY_BYTES,
        "max_bytes": MAX_BYTES,
    }
    done = proc.ask(_child_argv(), json.dumps(request).encode(), _WALL_S)
    if done.status == 0:
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    kind = "time" if done.status is None or done.status < 0 else "failed"
    last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:300]
    if "MemoryError" in last:
        kind = "memory"
    if "TooLongError" in last:  # raised in the middle of one long operation
        kind, last = "time", ""
    return {"error": {"kind": kind, "line": None, "message": last}}


def _child_argv() -> list[str]:
    """Return the child's command; `-I -S` ignores user site, working directory and `.pth` files."""
    folders = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))]
    for package in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(os.path.dirname(os.path.dirname(spec.origin)))
    return [sys.executable, "-I", "-S", "-c", _BOOT, *dict.fromkeys(folders)]


def _assigned(text: str) -> frozenset[str]:
    """Return names that the template assigns by loops, `set`, `with` or macros; may miss some."""
    found: set[str] = set()
    for match in _ASSIGNS.finditer(text):
        for part in match.groups():
            found.update(re.findall(r"\w+", part or ""))
    return frozenset(found)


def _check_version(source: Source, section: Section | None, warnings: Problems) -> None:
    value = section.text.partition(":")[2].split("#")[0].strip().strip("'\"") if section else "2"
    if section and value != "2":
        what = f"`version: {value[:40]}` has no effect"
        warnings.add(what, f"{source.path}:{section.line}", fix="version: 2")


def _check_names(
    source: Source, defaults: Sequence[Default], given: Mapping[str, Any], warnings: Problems
) -> None:
    for default in defaults:
        if why := check_name(default.name):
            what = f"the default value `{default.name}` can't be used in the template"
            warnings.add(what, f"{source.path}:{default.line}", why)
    exact = [name for name in given if name in BARE_KINDS]
    ours = [name for name in given if name in OUR_BARE_KINDS]
    names = [*exact, *ours]
    if not names:
        return
    meanings = [
        f"`{{{{{name}}}}}` remains the token, `{{{{ {name} }}}}` is the value" for name in exact
    ] + [f"`{{{{{name}}}}}` is the value" for name in ours]
    lines = {default.name: default.line for default in defaults}
    where = f"{source.path}:{lines[names[0]]}" if names[0] in lines else f"--set {names[0]}=..."
    shown = ", ".join(f"`{name}`" for name in names)
    what = f"{shown} {'is' if len(names) == 1 else 'are'} also the name of a token"
    warnings.add(what, where, "; ".join(meanings))


def _find_unused(
    names: Sequence[str], used: frozenset[str], given: Mapping[str, Any]
) -> dict[str, UsageError]:
    found: dict[str, UsageError] = {}
    for name in dict.fromkeys(names):
        if name not in used:
            fix = did_you_mean(name, sorted((used | frozenset(given)) - {name}))
            what = f"the template never uses `{name}`"
            found[name] = UsageError(what, where=f"--set {name}=...", fix=fix)
    return found


def render_text(source: Source, values: Mapping[str, Any], problems: Problems) -> str:
    """Render a separate text, e.g. a `localpath` file; tokens remain."""
    section = Section(name="text", line=1, text=source.text)
    found = _Rendering(source=source, section=section, values=dict(values)).render(problems)
    return found[0] if found is not None else ""


_MAX_SHOWN = 200  # errors of one file


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The command-line arguments: a file, and assignments such as `n_nodes=4`.

    Attributes:
        with_effect: Keys that have an effect with this engine or container.
    """

    path: str
    sets: Sequence[str] = ()
    set_strings: Sequence[str] = ()
    set_env: Sequence[str] = ()
    labels: Sequence[str] = ()
    with_effect: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class LoadedWorkflow:
    """A workflow file as far as it could be parsed, with its errors and warnings."""

    source: Source
    name: str = ""
    rendered_text: str = ""
    groups: tuple[GroupPlan, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    template_words: set[str] = field(default_factory=set)
    pool: str | None = None
    local_datasets: list[LocalDataset] = field(default_factory=list)
    errors: list[UsageError] = field(default_factory=list)
    warnings: list[MusterError] = field(default_factory=list)

    def as_plain(self) -> dict[str, Any]:
        """Return the JSON value that `muster validate --json` prints."""
        return {
            "valid": not self.errors,
            "errors": [codec.to_plain(report_of_error(error)) for error in self.errors],
            "warnings": [codec.to_plain(report_of_error(warning)) for warning in self.warnings],
            "groups": {group.name: [task.name for task in group.tasks] for group in self.groups},
        }


def read_source(path: str) -> Source:
    """Read the text of a workflow file.

    Raises:
        UsageError: The file can't be read, is not UTF-8 text or is too large.
    """
    try:
        if os.path.isdir(path):
            fix = f"name a file in it: {os.path.join(path, 'train.yaml')}"
            raise UsageError("the workflow file is a directory", where=path, fix=fix)
        with open_plain(path, or_descriptor=True) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        what = "the workflow file does not exist"
        if not isinstance(error, FileNotFoundError):
            what = "the workflow file can't be read"
        near = near_file(path, suffixes=(".yaml", ".yml"))
        raise UsageError(what, where=path, why=error.strerror, fix=near) from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"the workflow file is larger than {MAX_BYTES >> 20} MiB", where=path)
    try:
        return Source(path=path, text=data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        why = f"byte {data[error.start]:#04x} at position {error.start} is not valid UTF-8"
        what = "the workflow file is not UTF-8 text"
        raise UsageError(what, where=f"{path}:{line}", why=why) from error


def list_values(path: str) -> list[Default]:
    """Return the names of `default-values:` with their help.

    Raises:
        UsageError: The file can't be read or parsed; this is the first problem.
    """
    source = read_source(path)
    problems = Problems()
    found = split_sections(source, problems).get("default-values")
    if found is None:
        return []
    values = default_values(found.text, path, found.line, problems)
    if problems.found and not values:
        raise problems.found[0]
    return values


def render_workflow(options: LoadOptions) -> tuple[str, list[MusterError]]:
    """Render the template; return its text and warnings.

    Raises:
        ManyErrors: The template has problems.
    """
    loaded = LoadedWorkflow(source=read_source(options.path))
    rendered = _render(options, loaded)
    if rendered is None:
        raise ManyErrors(loaded.errors)
    return rendered.text, _notices(rendered, frozenset())


def load_workflow(options: LoadOptions) -> LoadedWorkflow:
    """Read and check a workflow file; the result holds its problems.

    Raises:
        UsageError: The file can't be read at all.
    """
    loaded = LoadedWorkflow(source=read_source(options.path))
    rendered = _render(options, loaded)
    problems = Problems()
    loaded.variables = parse_set_env(options.set_env, problems)
    loaded.labels = _labels(options.labels, problems)
    loaded.errors += problems.found
    if rendered is None:
        return loaded
    loaded.rendered_text = rendered.text
    loaded.warnings = _notices(rendered, frozenset())
    try:
        document = parse_yaml(rendered.text, options.path, rendered.locate)
    except UsageError as error:
        loaded.errors.append(error)
        return loaded
    twice = list(document.twice)
    findings = FileProblems(with_effect=options.with_effect)
    raw = document.value.get("workflow") if isinstance(document.value, dict) else None
    check_workflow(raw, findings)
    workflow = schema.validate(raw, findings)
    if workflow is not None:
        _compile_workflow(workflow, options, rendered, loaded, findings)
    loaded.warnings = [*twice, *_notices(rendered, loaded.template_words)]
    errors = _in_order(findings.errors, document)
    loaded.errors += errors[:_MAX_SHOWN]
    if len(errors) > _MAX_SHOWN:
        what = f"there are {len(errors) - _MAX_SHOWN} more problems"
        loaded.errors.append(UsageError(what, where=options.path, fix="fix these first"))
    loaded.warnings += _in_order(findings.warnings, document)
    return loaded


def plan_workflow(loaded: LoadedWorkflow, run_id: str, **options: Any) -> WorkflowPlan:
    """Return the plan of one run of an error-free file; `options` are further plan fields."""
    return WorkflowPlan(
        run_id=run_id,
        name=loaded.name,
        groups=loaded.groups,
        spec_path=os.path.abspath(loaded.source.path),
        python=(sys.executable,),
        cwd=os.path.dirname(os.path.abspath(loaded.source.path)),
        labels=loaded.labels,
        pool=loaded.pool,
        uuid=uuid.uuid4().hex,
        **options,
    )


def _render(options: LoadOptions, loaded: LoadedWorkflow) -> Rendered | None:
    problems = Problems()
    sets = parse_sets(options.sets, problems)
    texts = parse_set_strings(options.set_strings, problems)
    rendered = None
    if not problems.found:
        rendered = render_file(loaded.source, sets, texts, problems)
    loaded.errors += problems.found
    return rendered if not problems.found else None


def _notices(rendered: Rendered, words: AbstractSet[str]) -> list[MusterError]:
    """Return the template's warnings, except about values that local templates use (`words`)."""
    unused = [error for name, error in rendered.unused.items() if name not in words]
    return [*rendered.warnings, *unused]


def _compile_workflow(
    workflow: schema.Workflow,
    options: LoadOptions,
    rendered: Rendered,
    loaded: LoadedWorkflow,
    findings: FileProblems,
) -> None:
    loaded.name = workflow.name
    loaded.pool = workflow.pool
    loaded.labels = {**workflow.labels, **loaded.labels}
    folder = os.path.dirname(os.path.abspath(options.path))

    def template(text: str, path: str) -> str:
        loaded.template_words.update(re.findall(r"\w+", text))
        inner = Problems()
        filled = render_text(Source(path=path, text=text), rendered.values, inner)
        loaded.errors += inner.found
        return filled

    around = CompileContext(
        folder=folder, findings=findings, template=template, environment=loaded.variables
    )
    loaded.groups = plan_groups(workflow, around)
    loaded.local_datasets = around.local_datasets


def _labels(words: Sequence[str], problems: Problems) -> dict[str, str]:
    labels: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        fix = "--label team=vision"
        if not equals:
            problems.add(f"the label `{word}` has no value", f"--label {word}", fix=fix)
        elif not is_label_key(key):
            problems.add(f"`{key}` can't be the key of a label", f"--label {word}", fix=fix)
        elif not is_label_value(value):
            problems.add(f"`{value}` can't be the value of a label", f"--label {word}", fix=fix)
        else:
            labels[key] = value
    return labels


def _in_order(found: list[FileProblem], document: Document) -> list[UsageError]:
    """Return findings as errors in file order, without duplicates."""
    unique = {(f.path, f.what): f for f in found}

    def key(finding: FileProblem) -> tuple[int, int]:
        line, column = document.position(finding.path, at_key=finding.at_key)
        return line, column or 0

    return [
        one.as_error(f"{document.where(one.path, at_key=one.at_key)} {show_path(one.path)}")
        for one in sorted(unique.values(), key=key)
    ]
