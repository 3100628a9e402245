"""What the schema finds wrong with a table of `muster.toml`, in our words; pydantic's own never reach a user."""

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from torchmuster.spec.findings import FileProblems, KeyPath, did_you_mean, show_path
from torchmuster.spec.scalars import kind_of, shown

_Keys = TypeVar("_Keys", bound=BaseModel)
# What people write, and what it is called here.
_OTHER_WORDS = {
    "walltime": "time",
    "time_limit": "time",
    "modules": "setup",
    "module": "setup",
    "type": "kind",
    "engine": "kind",
    "host": "hosts",
    "env": "environment",
    "select": "chunk",
    "resources": "chunk",
    "sbatch": "directives",
    "pbs": "directives",
    "extra": "directives",
    "gpus": "gpus_per_node",
    "cpus": "cpus_per_node",
    "ncpus": "cpus_per_node",
    "tmpdir": "scratch",
    "username": "user",
    "machinefile": "hostfile",
}


def read_table(
    model: type[_Keys], raw: Any, path: KeyPath, findings: FileProblems, context: Any = None
) -> _Keys | None:
    """Return the table; None with the reasons in `findings`, at `path` and below."""
    if not isinstance(raw, dict):
        fix = f"[{show_path(path)}] on a line of its own, keys below it"
        findings.add(path, f"expected a table, found {kind_of(raw)}", fix)
        return None
    try:
        return model.model_validate(raw, context=context)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            _take_problem(problem, model, path, findings)
        return None


def unknown_key(path: KeyPath, known: Any, findings: FileProblems) -> None:
    """Note a key that nobody knows, with what was meant."""
    key, parent = str(path[-1]), show_path(path[:-1]) or "this file"
    names = list(known)
    other = _OTHER_WORDS.get(key.lower())
    fix: str | None = f"did you mean `{other}`?" if other in names else None
    fix = fix or did_you_mean(key, names, f"allowed here: {', '.join(names)}")
    findings.add(path, f"unknown key {shown(key)} in {parent}", fix, at_key=True)


def _take_problem(
    problem: Any, model: type[BaseModel], path: KeyPath, findings: FileProblems
) -> None:
    """Put pydantic's finding into our words."""
    here: KeyPath = (*path, *problem["loc"])
    kind, found = problem["type"], problem["input"]
    if kind == "muster":
        findings.add(here, problem["ctx"]["what"], problem["ctx"].get("fix"))
    elif kind == "extra_forbidden":
        unknown_key(here, model.model_fields, findings)
    elif kind == "missing":
        what = f"`{here[-1]}` is missing in {show_path(path)}"
        findings.add(path, what, f'{here[-1]} = "..."', at_key=True)
    elif kind == "literal_error":
        names = re.findall(r"'(\w+)'", problem["ctx"]["expected"])
        fix = did_you_mean(found, names) if isinstance(found, str) else None
        allowed = ", ".join(f"`{name}`" for name in names)
        findings.add(here, f"{kind_of(found)} is not one of {allowed}", fix)
    else:
        findings.add(here, f"this value does not fit, found {kind_of(found)}")
