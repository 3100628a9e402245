"""The hints for errors in a table of `muster.toml`."""

from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import BaseModel

from torchmuster.spec.explain import FileFormat, hint_for_key
from torchmuster.spec.problems import FileProblems, KeyPath, show_path
from torchmuster.spec.scalars import kind_of

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
    """Return the table; None if there are errors, which are added to `findings` at `path` and below."""
    if not isinstance(raw, dict):
        fix = f"[{show_path(path)}] on a line of its own, keys below it"
        findings.add(path, f"expected a table, found {kind_of(raw)}", fix)
        return None
    return toml_format(model.model_fields).read(model, raw, path, findings, context)


def toml_format(known: Collection[str]) -> FileFormat:
    """Return how hints are written where these keys are known."""
    allowed = f"allowed here: {', '.join(known)}"
    return FileFormat(
        missing='{} = "..."',
        unknown=lambda path: hint_for_key(str(path[-1]), known, _OTHER_WORDS, allowed),
    )
