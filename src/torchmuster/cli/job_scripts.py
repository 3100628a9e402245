"""`muster submit FILE --dry-run --on slurm`: the commands and scripts that a scheduler would get."""

import json
import os
import shlex
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from torchmuster.engines.base import Dialect
    from torchmuster.engines.workflow_jobs import GroupJob
    from torchmuster.model.workflow import WorkflowPlan

ALL = "all"


def can_show(engine: str) -> bool:
    """Say whether there are job scripts for what `--on` names."""
    from torchmuster.engines.registry import engine_entries

    return engine == ALL or engine in engine_entries()


def show_jobs(plan: "WorkflowPlan", engine: str, *, as_json: bool) -> None:
    """Print, for each engine, the submit commands and whole scripts of all groups."""
    from torchmuster.engines.registry import engine_entries, load_dialect

    names = list(engine_entries()) if engine == ALL else [engine]
    dialects = [load_dialect(name) for name in names]
    if as_json:
        shown = [entry for dialect in dialects for entry in _as_plain(plan, dialect)]
        click.echo(json.dumps(shown, indent=1))
        return
    for dialect in dialects:
        click.echo(render_jobs(plan, dialect), nl=False)
    click.echo("nothing was submitted (--dry-run)", err=True)


def render_jobs(plan: "WorkflowPlan", dialect: "Dialect") -> str:
    """Return what would be submitted: a shell text with its scripts behind it."""
    from torchmuster.engines.workflow_jobs import job_variables

    variables = job_variables(plan)
    jobs = _jobs(plan, dialect)
    lines = [f"# {dialect.name}: {len(jobs)} job{'s' if len(jobs) != 1 else ''}"]
    for group in jobs:
        words = " ".join(_shown(word) for word in _submit(group, dialect, plan))
        lines.append(f"{variables[group.group]}=$({words})")
    for group in jobs:
        lines += ["", f"# ---- {_script_name(group)}"]
        lines += [f"# not mapped: {sentence}" for sentence in group.warnings]
        lines.append(dialect.script(group.job).rstrip("\n"))
    return "\n".join([*lines, "", ""])


def _jobs(plan: "WorkflowPlan", dialect: "Dialect") -> "tuple[GroupJob, ...]":
    from torchmuster.engines.workflow_jobs import JobOptions, job_variables, plan_jobs
    from torchmuster.files.layout import RunDir, runs_dir

    run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    options = JobOptions(
        run_dir=run_dir.path,
        group_main=os.path.join(package, "agent", "group_main.py"),
        log_of=lambda name: os.path.join(run_dir.group(name).path, "job.log"),
    )
    shown = {group: f"${variable}" for group, variable in job_variables(plan).items()}
    return plan_jobs(plan, dialect, options, shown)


def _submit(group: "GroupJob", dialect: "Dialect", plan: "WorkflowPlan") -> list[str]:
    return dialect.submit_argv(group.job, _script_name(group))


def _script_name(group: "GroupJob") -> str:
    return f"{group.group}.sh"


def _shown(word: str) -> str:
    """Quote a word for the eye: variables of other jobs stay variables."""
    return f'"{word}"' if "$JOB_" in word else shlex.quote(word)


def _as_plain(plan: "WorkflowPlan", dialect: "Dialect") -> list[dict[str, Any]]:
    return [
        {
            "engine": dialect.name,
            "group": group.group,
            "submit": _submit(group, dialect, plan),
            "script": dialect.script(group.job),
            "not_mapped": list(group.warnings),
            "node_tasks": list(group.node_tasks),
        }
        for group in _jobs(plan, dialect)
    ]
