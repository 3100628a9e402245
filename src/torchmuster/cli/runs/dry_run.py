"""`muster run --dry-run`: what would be started, here and on every engine that `--on all` stands for."""

import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from torchmuster.errors import ManyErrors, MusterError, UsageError

if TYPE_CHECKING:
    from torchmuster.engines.own_job import OwnJob
    from torchmuster.model.plan import RunPlan
    from torchmuster.spec.launch import RunRequest

ALL = "all"


def show_everywhere(request: "RunRequest", show: "Callable[[RunRequest], int]") -> int:
    """Print for each engine the commands and scripts that it would get; one that can't take it says why.

    Raises:
        UsageError: It is no dry run: a run goes to one place.
    """
    from torchmuster.cli.sites import my_sites
    from torchmuster.engines.schedulers import sees_files
    from torchmuster.owner.create import new_run_id
    from torchmuster.spec.sites.site import BUILT_IN

    if not request.dry_run:
        what = "`--on all` works with --dry-run only: a run uses one engine"
        raise UsageError(what, where="--on all", fix="--dry-run, or one of `muster engines`")
    run_id = request.run_id or new_run_id(request.script, request.name)
    request = replace(request, run_id=run_id, name=None)  # the name is part of the id now
    refused = 0
    for site in my_sites().sites.values():
        if site.origin == BUILT_IN and not sees_files(site.kind):
            continue  # without a section nobody knows the image
        title = site.name if site.name == site.kind else f"{site.name} ({site.kind})"
        click.echo(f"# ======== {title}")
        here = site.kind == "local"
        try:
            show(replace(request, engine=site.name, here=here))
        except MusterError as error:
            refused += 1
            click.echo(f"# not possible: {error.what}")
        except ManyErrors as many:
            refused += 1
            for one in many.errors:
                click.echo(f"# not possible: {one.what}")
        click.echo("")
    return 2 if refused else 0


def show_here(plan: "RunPlan", job: "OwnJob | None" = None) -> int:
    """Print the commands of the agents that a run on this machine, or in the job around us, would start."""
    from torchmuster.engines.local import agent_argv
    from torchmuster.files.layout import RunDir, runs_dir
    from torchmuster.node.options import AgentOrder

    run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
    host = "127.0.0.1" if job is None else job.node_names[0]
    for place in range(plan.num_places if job is None else len(job.nodes)):
        # The port is the one that is free then.
        order = AgentOrder(run_dir=run_dir.path, place=place, head=(f"{host}:0",))
        argv = agent_argv(order)
        if job is not None and place > 0:
            argv = job.argv(job.nodes[place], argv)
        spare = "  # spare" if place >= plan.max_nodes else ""
        click.echo(f"$ {shlex.join(argv)}{spare}")
    words = shlex.join([*plan.program.python, *plan.program.display()])
    num_workers = sum(plan.num_workers(place) for place in range(plan.max_nodes))
    click.echo(f"\n# {num_workers} worker{'s' if num_workers != 1 else ''}: {words}")
    click.echo("nothing was started (--dry-run)", err=True)
    return 0
