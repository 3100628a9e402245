"""Which place a command means: the only module that asks for engines, kinds of sites and the job around this shell."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.place import Nowhere, Place

if TYPE_CHECKING:
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.spec.launch import RunRequest
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.views.run_view import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What a command line says of the place.

    Attributes:
        by_slots: Hosts have as many workers as their list says, where the command line says none.
        is_one_of_many: srun may have started the command on each node, as torchrun.
    """

    engine: str | None = None
    hosts: str | None = None
    hostfile: str | None = None
    here: bool = False
    session: str | None = None
    by_slots: bool = False
    is_one_of_many: bool = False


def where_of(request: "RunRequest") -> Where:
    """Return what the request of a run says of its place."""
    return Where(
        engine=request.engine,
        hosts=request.hosts,
        hostfile=request.hostfile,
        here=request.here,
        session=request.session,
        by_slots=request.nproc_per_node is None,
    )


def where_of_words(given: Mapping[str, Any]) -> Where:
    """Return what the words of a command line say of the place."""
    names = ("engine", "hosts", "hostfile", "here")
    return Where(session=given.get("session"), **{name: given[name] for name in names})


def find_place(where: Where, problems: "Problems") -> Place:
    """Return the place that is meant; an engine that takes no jobs, or is none, is noted.

    Raises:
        UsageError: Hosts are named for another kind of engine, or nobody names any; this is a login node.
        NotFoundError: There is no such session.
    """
    from torchmuster.core.cli import options

    if not where.here and not where.is_one_of_many:
        check_alone(os.environ)
    if where.session is not None:
        from torchmuster.multirun.cli.held import Held

        return Held(where.session)
    names_hosts = bool(where.hosts or where.hostfile)
    named = where.engine or ("ssh" if names_hosts else None)
    engine = options.choose_engine(named, here=where.here)
    if engine == "local" and not names_hosts:
        from torchmuster.core.cli.here import Here, InJob

        inside = None if where.here else options.find_allocation()
        return Here() if inside is None else InJob(inside)
    from torchmuster.launcher.cli.ssh import find_ssh_site

    if (hosts := find_ssh_site(engine, where.hosts, where.hostfile)) is not None:
        from torchmuster.launcher.cli.places.hosts import Hosts

        return Hosts(hosts, by_slots=where.by_slots)
    from torchmuster.launcher.cli.places.jobs import AsJob, AsPods
    from torchmuster.launcher.engines.registry import load_dialect

    if (pods := options.find_objects(engine)) is not None:
        return AsPods(*pods)
    site = options.check_engine(engine, problems)
    return AsJob(site, load_dialect(site.kind)) if site is not None else Nowhere()


def check_alone(environment: Mapping[str, str]) -> None:
    """Refuse a command that srun, mpiexec or pbsdsh has started several times; only the first task says so.

    Raises:
        UsageError: Each would start a run of its own.
    """
    from torchmuster.core.model.contract import ATTEMPT_VARIABLE, TASK_VARIABLE
    from torchmuster.core.node.launcher_ranks import is_first_of_many, is_one_of_many
    from torchmuster.errors import UsageError

    if {ATTEMPT_VARIABLE, TASK_VARIABLE} & {*environment} or not is_one_of_many(environment):
        return  # what a worker or a task starts, it starts as a command of its own
    if not is_first_of_many(environment):
        raise SystemExit(UsageError.exit_code)
    raise UsageError(
        "this command was started several times, as one task of many",
        where="srun, mpiexec or pbsdsh",
        why="each would start the workers of all nodes, and the whole training would run that often",
        fix="leave srun, mpiexec or pbsdsh out; --here means one run for each task, on its own node",
    )


def place_again(plan: "RunPlan", view: "RunView") -> tuple[Place, str | None]:
    """Return where an earlier run is started again, and the folder of its snapshots where it has one to link.

    Raises:
        UsageError: It can't be: what it needs is not there.
    """
    snapshots = view.run_dir.snapshots
    if os.path.isfile(view.run_dir.job):
        from torchmuster.launcher.cli.places.jobs import job_again

        return job_again(view.run_dir)
    if plan.job_id is not None:
        return _job_around(plan, view), snapshots
    if plan.engine != "local":
        from torchmuster.launcher.cli.places.hosts import hosts_again

        return hosts_again(plan, view), snapshots
    from torchmuster.core.cli.here import Here

    _check_snapshots(view)
    return Here(), snapshots


def _job_around(plan: "RunPlan", view: "RunView") -> Place:
    """Return the job around us; the one that the run was in has ended, or is this one."""
    from torchmuster.core.cli.here import InJob
    from torchmuster.core.cli.options import find_allocation
    from torchmuster.core.files.layout import short_id
    from torchmuster.errors import UsageError

    if (inside := find_allocation()) is not None:
        return InJob(inside)
    name = short_id(view.run_id)
    what = f"the run {name} used the nodes of job {plan.job_id}, and this shell is not in a job"
    raise UsageError(what, fix=f"in a new job: muster restart {name}")


def _check_snapshots(view: "RunView") -> None:
    """Refuse where what the training has saved is gone: it would begin again at step 0 without a word."""
    from torchmuster.core.files.layout import short_id
    from torchmuster.core.owner.account import find_saved
    from torchmuster.core.owner.create import holds_snapshots
    from torchmuster.errors import UsageError

    saved = find_saved(view.run_dir)
    if saved is not None and not saved.is_seen and not holds_snapshots(saved.folder):
        raise UsageError(
            f"the snapshots of {short_id(view.run_id)} are gone: the last was of step {saved.step}",
            where=saved.folder,
            fix="put them back, or type its command again to start over at step 0",
        )


def show_everywhere(request: "RunRequest", show: "Callable[[RunRequest], int]") -> int:
    """Print for each engine the commands and scripts that it would get; one that can't take it says why.

    Raises:
        UsageError: It is no dry run: a run goes to one place.
    """
    from torchmuster.core.cli.options import my_sites
    from torchmuster.core.engines.schedulers import sees_files
    from torchmuster.core.owner.create import new_run_id
    from torchmuster.errors import ManyErrors, MusterError, UsageError
    from torchmuster.launcher.spec.site import BUILT_IN

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
        try:
            show(replace(request, engine=site.name, here=site.kind == "local"))
        except (MusterError, ManyErrors) as error:
            refused += 1
            for one in error.errors if isinstance(error, ManyErrors) else [error]:
                click.echo(f"# not possible: {one.what}")
        click.echo("")
    return 2 if refused else 0
