"""`muster submit FILE --dry-run --on slurm`: show what a scheduler would get."""

import json
import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from torchmuster.errors import UsageError
from torchmuster.launcher.cli.sites import my_sites
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.engines.schedulers import sees_files

if TYPE_CHECKING:
    from torchmuster.launcher.engines.base import Dialect
    from torchmuster.launcher.spec.site import Site
    from torchmuster.workflow.jobs import GroupJob
    from torchmuster.workflow.plan import WorkflowPlan

ALL = "all"


def show_jobs(plan: "WorkflowPlan", engine: str, *, as_json: bool) -> None:
    """Print the submit commands and whole scripts of all groups, for each chosen site.

    Raises:
        UsageError: The site has no job scripts, or does not exist.
    """
    sites = my_sites()
    chosen = list(sites.sites.values()) if engine == ALL else [sites.get(engine)]
    with_scripts = [site for site in chosen if site.is_batch and sees_files(site.kind)]
    targets = [ScriptTarget(site, load_dialect(site.kind)) for site in with_scripts]
    if not targets:
        what = f"`{engine}` takes no job scripts: it is of kind {chosen[0].kind}"
        raise UsageError(what, where=chosen[0].origin, fix="leave --dry-run out")
    if as_json:
        shown = [entry for target in targets for entry in _as_plain(plan, target)]
        click.echo(json.dumps(shown, indent=1))
        return
    for target in targets:
        click.echo(render_jobs(plan, target), nl=False)
    for site in chosen:
        if site.kind == "ssh":
            click.echo(f"{site.name} (ssh) has no job scripts", err=True)
    click.echo("nothing was submitted (--dry-run)", err=True)


@dataclass(frozen=True, slots=True)
class ScriptTarget:
    """A site and the dialect of its scheduler."""

    site: "Site"
    dialect: "Dialect"

    @property
    def title(self) -> str:
        """Return the site's name, with its scheduler's if that differs."""
        if self.site.name == self.site.kind:
            return self.site.name
        return f"{self.site.name} ({self.site.kind})"


def render_jobs(plan: "WorkflowPlan", target: ScriptTarget) -> str:
    """Return the submit commands as a shell text, followed by the job scripts."""
    from torchmuster.workflow.jobs import job_variables

    dialect = target.dialect
    variables = job_variables(plan)
    jobs = _jobs(plan, target)
    lines = [f"# {target.title}: {len(jobs)} job{'s' if len(jobs) != 1 else ''}"]
    for group in jobs:
        words = " ".join(_shown(word) for word in _submit(group, dialect, plan))
        lines.append(f"{variables[group.group]}=$({words})")
    for group in jobs:
        lines += ["", f"# ---- {_script_name(group)}"]
        lines += [f"# not mapped: {sentence}" for sentence in group.warnings]
        lines.append(dialect.script(group.job).rstrip("\n"))
    return "\n".join([*lines, "", ""])


def _jobs(plan: "WorkflowPlan", target: ScriptTarget) -> "tuple[GroupJob, ...]":
    from torchmuster.core.files.layout import RunDir, runs_dir
    from torchmuster.launcher.engines.sites import job_of_site
    from torchmuster.workflow.jobs import job_variables, plan_jobs

    run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
    shown = {group: f"${variable}" for group, variable in job_variables(plan).items()}
    return plan_jobs(plan, target.dialect, run_dir, job_of_site(target.site), shown)


def _submit(group: "GroupJob", dialect: "Dialect", plan: "WorkflowPlan") -> list[str]:
    return dialect.submit_argv(group.job, _script_name(group))


def _script_name(group: "GroupJob") -> str:
    return f"{group.group}.sh"


def _shown(word: str) -> str:
    """Quote a word for display; variables of other jobs stay variables."""
    return f'"{word}"' if "$JOB_" in word else shlex.quote(word)


def _as_plain(plan: "WorkflowPlan", target: ScriptTarget) -> list[dict[str, Any]]:
    dialect = target.dialect
    return [
        {
            "engine": dialect.name,
            "site": target.site.name,
            "group": group.group,
            "submit": _submit(group, dialect, plan),
            "script": dialect.script(group.job),
            "not_mapped": list(group.warnings),
            "node_tasks": list(group.node_tasks),
        }
        for group in _jobs(plan, target)
    ]
