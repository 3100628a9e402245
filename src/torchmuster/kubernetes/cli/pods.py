"""`muster run --on NAME` where NAME is a cluster whose jobs are pods: they bring along what they need."""

from dataclasses import replace
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.spec.launch import RunRequest
    from torchmuster.launcher.engines.base import ObjectDialect
    from torchmuster.launcher.model.job import JobRequest
    from torchmuster.launcher.spec.site import Site


def fit(plan: "RunPlan", request: "RunRequest", site: "Site") -> "RunPlan":
    """Return the plan for pods: the image's interpreter, and nodes that come back."""
    from torchmuster.kubernetes.pods.bring import PYTHON
    from torchmuster.launcher.engines.sites import with_node_setup

    plan = with_node_setup(plan, site, python_given=request.python is not None)
    if request.python is None and not site.python:
        plan = replace(plan, program=replace(plan.program, python=(PYTHON,)))
    return replace(plan, engine=site.name, nodes_return=True)


def show_manifest(job: "JobRequest", dialect: "ObjectDialect") -> int:
    """Print the manifest, to look at or for `kubectl create --dry-run=server -f -`."""
    import shlex

    argv = dialect.submit_argv(job, "MANIFEST")
    click.echo(f"$ {shlex.join(argv)}", err=True)
    click.echo(dialect.script(job), nl=False)
    click.echo("nothing was submitted (--dry-run); the Secret is shown empty", err=True)
    return 0


def say_what_goes(job: "JobRequest", *, detach: bool) -> None:
    """Say what would be lost: without a volume a run lives in its pods."""
    from torchmuster.kubernetes.engine.wishes import keeps_runs

    if detach and not keeps_runs(job):
        click.echo(
            "muster: logs and snapshots live in the pods and go with them: follow the run to its end to have them here,"
            " or keep runs on a volume (`claims` and `home` of the site)",
            err=True,
        )
