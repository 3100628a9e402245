"""Choose the launcher's place for runs that a command means, from sites and the job around it."""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core import plugs
from torchmuster.core.cli.find import Where
from torchmuster.core.cli.place import Place, UnknownPlace
from torchmuster.errors import UsageError
from torchmuster.launcher.cli.sites import my_sites
from torchmuster.launcher.spec.site_files import project_file, user_file

if TYPE_CHECKING:
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.spec.launch import RunRequest
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.engines.allocation import OwnJob
    from torchmuster.launcher.spec.site import Site
    from torchmuster.launcher.views.run_view import RunView


def find_place(where: Where, problems: "Problems") -> Place | None:
    """Return the hosts, scheduler, cluster or surrounding job that is meant; None for this machine.

    Raises:
        UsageError: Hosts are named for another kind of engine, or are missing; or this is a login
            node.
    """
    if not where.here and not where.is_one_of_many:
        check_alone(os.environ)
    if where.session is not None:
        return None
    names_hosts = bool(where.hosts or where.hostfile)
    named = where.engine or ("ssh" if names_hosts else None)
    engine = choose_engine(named, here=where.here)
    if engine == "local" and not names_hosts:
        inside = None if where.here else find_allocation()
        if inside is None:
            return None
        from torchmuster.launcher.cli.jobs import InsideJobPlace

        return InsideJobPlace(inside)
    if (make := plugs.load_other("places", engine)) is not None:
        other: Place = make(where, problems)
        return other
    from torchmuster.launcher.cli.sites import find_ssh_site

    if (hosts := find_ssh_site(engine, where.hosts, where.hostfile)) is not None:
        from torchmuster.launcher.cli.hosts import HostsPlace

        return HostsPlace(hosts, by_slots=where.by_slots)
    site = _find_site(engine, problems)
    return _place_of_jobs(site) if site is not None else UnknownPlace()


def check_alone(environment: Mapping[str, str]) -> None:
    """Refuse a command that srun, mpiexec or pbsdsh started several times; only task 0 says so.

    Raises:
        UsageError: Each task would start its own run.
    """
    from torchmuster.core.model.contract import ATTEMPT_VARIABLE, TASK_VARIABLE
    from torchmuster.launcher.node.launcher_ranks import is_first_of_many, is_one_of_many

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


def _place_of_jobs(site: "Site") -> Place:
    """Return the place for runs of a site with jobs, from another room if they are objects."""
    from torchmuster.launcher.cli.jobs import JobPlace
    from torchmuster.launcher.engines.base import object_dialect
    from torchmuster.launcher.engines.registry import load_dialect

    dialect = load_dialect(site.kind)
    as_objects = (
        plugs.find("job_places", "objects") if object_dialect(dialect) is not None else None
    )
    place: Place = (as_objects or JobPlace)(site, dialect)
    return place


def find_restart_place(plan: "RunPlan", view: "RunView") -> tuple[Place, str | None]:
    """Return where to restart an earlier run, and its folder of snapshots if that can be linked.

    Raises:
        UsageError: It can't be restarted, because something it needs is missing.
    """
    from torchmuster.core.cli.here import Here
    from torchmuster.core.files.layout import short_id

    snapshots, name = view.run_dir.snapshots, short_id(view.run_id)
    if os.path.isfile(view.run_dir.job):
        from torchmuster.launcher.cli.jobs import job_restart_place

        return job_restart_place(view.run_dir)
    if plan.job_id is not None:  # that job has ended, or is the one around us
        from torchmuster.launcher.cli.jobs import InsideJobPlace

        if (inside := find_allocation()) is not None:
            return InsideJobPlace(inside), snapshots
        what = f"the run {name} used the nodes of job {plan.job_id}, and this shell is not in a job"
        raise UsageError(what, fix=f"in a new job: muster restart {name}")
    if plan.engine != "local":
        from torchmuster.launcher.cli.hosts import hosts_restart_place

        return hosts_restart_place(plan, view), snapshots
    _check_snapshots(view)
    return Here(), snapshots


def _check_snapshots(view: "RunView") -> None:
    """Refuse a restart whose snapshots are gone: it would silently start over at step 0."""
    from torchmuster.core.files.layout import short_id
    from torchmuster.core.owner.create import holds_snapshots
    from torchmuster.launcher.views.account import find_saved

    saved = find_saved(view.run_dir)
    if saved is not None and not saved.is_seen and not holds_snapshots(saved.folder):
        raise UsageError(
            f"the snapshots of {short_id(view.run_id)} are gone: the last was of step {saved.step}",
            where=saved.folder,
            fix="put them back, or type its command again to start over at step 0",
        )


def show_everywhere(request: "RunRequest", show: "Callable[[RunRequest], int]") -> int:
    """Print each engine's commands and scripts, or why it can't take the run; return the exit code.

    Raises:
        UsageError: It is not a dry run: a run uses one engine.
    """
    from torchmuster.core.owner.create import new_run_id
    from torchmuster.errors import ManyErrors, MusterError
    from torchmuster.launcher.engines.schedulers import sees_files
    from torchmuster.launcher.spec.site import BUILT_IN

    if not request.dry_run:
        what = "`--on all` works with --dry-run only: a run uses one engine"
        raise UsageError(what, where="--on all", fix="--dry-run, or one of `muster engines`")
    run_id = request.run_id or new_run_id(request.script, request.name)
    request = replace(request, run_id=run_id, name=None)  # the id contains the name
    refused = 0
    for site in my_sites().sites.values():
        if site.origin == BUILT_IN and not sees_files(site.kind):
            continue  # without a section the image is unknown
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


def choose_engine(named: str | None, *, here: bool) -> str:
    """Return the engine: `--on`, else $MUSTER_ON, else the configuration, else this machine.

    Raises:
        UsageError: This is a login node, and nothing says that it is meant.
    """
    if named is not None:
        return named
    if here:
        return "local"
    if os.environ.get("MUSTER_ON"):
        return os.environ["MUSTER_ON"]
    # Checking for the files is cheap; reading them would slow down every start.
    is_configured = user_file(os.environ) or project_file(os.getcwd())
    sites = my_sites() if is_configured else None
    if sites is not None and sites.default_on is not None:
        click.echo(f"muster: --on {sites.default_on}, as [defaults] says", err=True)
        return sites.default_on
    from torchmuster.launcher.engines.schedulers import guard

    names = [site.name for site in sites.configured if site.is_batch] if sites is not None else []
    refusal = guard(os.environ, shutil.which, names)
    if refusal is not None:
        raise refusal
    return "local"


def _find_site(name: str, problems: "Problems") -> "Site | None":
    """Return the site that `--on` names if it takes jobs; else None, and add the problem."""
    try:
        site = my_sites().get(name)
    except UsageError as error:
        problems.found.append(error)
        return None
    if site.is_batch:
        return site
    from torchmuster.launcher.engines.registry import engine_entries

    fix = "muster run --here" if site.kind == "local" else f"muster run or submit --on {name}"
    fix += f"; kinds that do: {', '.join(engine_entries())}"
    problems.add(f"`{name}` takes no jobs: it is of kind {site.kind}", site.origin, fix=fix)
    return None


def find_allocation() -> "OwnJob | None":
    """Return the job around us, if any."""
    from torchmuster.launcher.engines.schedulers import may_be_in_job

    if not may_be_in_job(os.environ):
        return None  # the usual case costs no import
    from torchmuster.launcher.engines.allocation import find_own_job

    return find_own_job()


def engine_names() -> list[str]:
    """Return engine kinds and the names of the user's engines, for completion."""
    import tomllib

    from torchmuster.launcher.engines.registry import engine_entries

    names = ["local", "ssh", *engine_entries()]
    for path in filter(None, (user_file(os.environ), project_file(os.getcwd()))):
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
            engines: Any = tomllib.load(file).get("engines")
            names += engines if isinstance(engines, dict) else []
    return names
