"""From the path of a workflow file to its plan, with every problem at its place in the user's own text.

read -> render -> parse -> check (structure, schema) -> plan
"""

import os
import re
import uuid
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torchmuster.errors import ManyErrors, MusterError, UsageError
from torchmuster.model import codec
from torchmuster.model.display.text import report_of_error
from torchmuster.model.workflow import GroupPlan, WorkflowPlan
from torchmuster.plainfile import open_plain
from torchmuster.spec.problems import (
    FileProblem,
    FileProblems,
    Problems,
    near_file,
    show_path,
)
from torchmuster.spec.source import MAX_BYTES, Document, Source, parse_yaml
from torchmuster.spec.values import (
    Default,
    default_values,
    parse_set_env,
    parse_set_strings,
    parse_sets,
)
from torchmuster.spec.workflow import schema
from torchmuster.spec.workflow.check import check_workflow, is_label_key, is_label_value
from torchmuster.spec.workflow.compile import CompileContext, LocalDataset, plan_groups
from torchmuster.spec.workflow.explain import validate
from torchmuster.spec.workflow.sections import split_sections
from torchmuster.spec.workflow.template import Rendered, render_file, render_text

_MAX_SHOWN = 200  # errors of one file


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The arguments of the command line: a file, and words such as `n_nodes=4`.

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
    """A workflow file, as far as it could be parsed."""

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
        """Return what `muster validate --json` prints."""
        return {
            "valid": not self.errors,
            "errors": [_plain(error) for error in self.errors],
            "warnings": [_plain(warning) for warning in self.warnings],
            "groups": {group.name: [task.name for task in group.tasks] for group in self.groups},
        }


def _plain(error: MusterError) -> Any:
    return codec.to_plain(report_of_error(error))


def read_source(path: str) -> Source:
    """Return the text of a workflow file.

    Raises:
        UsageError: It can't be read, is not text or is too large.
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
        raise UsageError(
            what, where=path, why=error.strerror, fix=near_file(path, suffixes=(".yaml", ".yml"))
        ) from error
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
        UsageError: The file can't be read or parsed; only the first problem.
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
    """Return the text that the template renders to, and warnings.

    Raises:
        UsageError: The first problem of the template.
    """
    loaded = LoadedWorkflow(source=read_source(options.path))
    rendered = _render(options, loaded)
    if rendered is None:
        raise ManyErrors(loaded.errors)
    return rendered.text, _notices(rendered, frozenset())


def load_workflow(options: LoadOptions) -> LoadedWorkflow:
    """Read and check a workflow file; its problems are in the result.

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
    workflow = validate(raw, findings)
    if workflow is not None:
        _take_workflow(workflow, options, rendered, loaded, findings)
    loaded.warnings = [*twice, *_notices(rendered, loaded.template_words)]
    ordered = _in_order(findings.errors, document)
    loaded.errors += [_as_error(finding, document) for finding in ordered[:_MAX_SHOWN]]
    if len(ordered) > _MAX_SHOWN:
        what = f"there are {len(ordered) - _MAX_SHOWN} more problems"
        loaded.errors.append(UsageError(what, where=options.path, fix="fix these first"))
    loaded.warnings += [
        _as_error(finding, document) for finding in _in_order(findings.warnings, document)
    ]
    return loaded


def plan_workflow(loaded: LoadedWorkflow, run_id: str, **options: Any) -> WorkflowPlan:
    """Return the plan of one run of a file without errors; `options` are further fields of it."""
    import sys

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
    """Return the template's warnings, except for values that a local template uses in `words`."""
    unused = [error for name, error in rendered.unused.items() if name not in words]
    return [*rendered.warnings, *unused]


def _take_workflow(
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


def _in_order(found: list[FileProblem], document: Document) -> list[FileProblem]:
    """Return findings in the order of the file, without repetitions."""
    unique = {(f.path, f.what): f for f in found}

    def key(finding: FileProblem) -> tuple[int, int]:
        line, column = document.position(finding.path, at_key=finding.at_key)
        return line, column or 0

    return sorted(unique.values(), key=key)


def _as_error(finding: FileProblem, document: Document) -> UsageError:
    place = document.where(finding.path, at_key=finding.at_key)
    return finding.as_error(f"{place} {show_path(finding.path)}")
