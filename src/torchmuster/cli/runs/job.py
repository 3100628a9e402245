"""`muster run --on ENGINE`: a run as a job of a scheduler, and a run inside a job that is there already."""

import os
import shutil
from typing import TYPE_CHECKING

import click

from torchmuster.cli.options import my_sites
from torchmuster.errors import MusterError, UsageError
from torchmuster.spec.sites.files import project_file, user_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchmuster.engines.base import Dialect, ObjectDialect
    from torchmuster.engines.own_job import OwnJob
    from torchmuster.files.layout import RunDir
    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.model.plan import RunPlan
    from torchmuster.model.verdict import Result
    from torchmuster.spec.problems import Problems
    from torchmuster.spec.sites.site import Site


def choose_engine(named: str | None, *, here: bool) -> str:
    """Return where a run goes: `--on`, else $MUSTER_ON, else the configuration, else this machine.

    Raises:
        UsageError: This is a login node, and nobody said that it is meant.
    """
    if named is not None:
        return named
    if here:
        return "local"
    if os.environ.get("MUSTER_ON"):
        return os.environ["MUSTER_ON"]
    # Looking for the files is cheap; reading them would slow every start down.
    is_configured = user_file(os.environ) or project_file(os.getcwd())
    sites = my_sites() if is_configured else None
    if sites is not None and sites.default_on is not None:
        click.echo(f"muster: --on {sites.default_on}, as [defaults] says", err=True)
        return sites.default_on
    from torchmuster.engines.schedulers import guard

    names = [site.name for site in sites.configured if site.is_batch] if sites is not None else []
    refusal = guard(os.environ, shutil.which, names)
    if refusal is not None:
        raise refusal
    return "local"


def find_site(name: str) -> "Site":
    """Return the site that `--on` names, one that takes jobs.

    Raises:
        UsageError: There is none, or it takes no jobs.
    """
    site = my_sites().get(name)
    if not site.is_batch:
        what = f"`{name}` takes no jobs: it is of kind {site.kind}"
        fix = "muster run --here" if site.kind == "local" else "muster run or submit --on " + name
        from torchmuster.engines.registry import engine_entries

        kinds = ", ".join(engine_entries())
        raise UsageError(what, where=site.origin, fix=f"{fix}; kinds that do: {kinds}")
    return site


def nodes_of_site(site: "Site", *, spares: int = 0) -> str | None:
    """Return what the site says of nodes, as `--nodes` has it: all hosts of ssh but the spare ones, None when it says nothing."""
    if site.nodes is None:
        from torchmuster.spec.sites.site import site_hosts

        return str(max(len(site_hosts(site)) - spares, 1)) if site.kind == "ssh" else None
    least, most = site.nodes
    return str(most) if least == most else f"{least}:{most}"


def find_objects(name: str) -> "tuple[Site, ObjectDialect] | None":
    """Return the site of this name and its dialect, where jobs are objects of a cluster's API; None elsewhere."""
    from torchmuster.engines.base import object_dialect
    from torchmuster.engines.registry import load_dialect

    site = my_sites().sites.get(name)
    if site is None or not site.is_batch:
        return None
    dialect = object_dialect(load_dialect(site.kind))
    return (site, dialect) if dialect is not None else None


def check_engine(name: str, problems: "Problems") -> "Site | None":
    """Return the site of an engine that takes jobs; note one that does not exist or takes none."""
    try:
        return find_site(name)
    except UsageError as error:
        problems.found.append(error)
        return None


def follow_job(
    plan: "RunPlan",
    run_dir: "RunDir",
    dialect: "Dialect",
    job_id: str,
    voice: "TerminalVoice",
    fix: "Callable[[], str]",
) -> "Result | None":
    """Show a job to its end and return the result; None when it goes on without us.

    Raises:
        MusterError: It has ended without a result; `fix` says what to do then.
    """
    import asyncio

    from torchmuster.files import atomic
    from torchmuster.files.layout import last_lines
    from torchmuster.model import codec
    from torchmuster.model.states import JobState
    from torchmuster.owner.jobs.batch import JobFollower
    from torchmuster.owner.jobs.jobs import cancelled_before_start

    follower = JobFollower(plan, run_dir, dialect, job_id, voice)
    try:
        result = asyncio.run(follower.follow())
    finally:
        follower.close()
    view = follower.view
    is_cancelled = view is not None and view.state is JobState.CANCELLED
    if result is None and is_cancelled and os.path.exists(run_dir.cancelled):
        result = cancelled_before_start(run_dir)  # it was in the queue: there is no head
        atomic.write_json(run_dir.result, codec.to_plain(result))
    if result is None and view is not None and view.state.is_final:
        told = "\n".join(last_lines(run_dir.job_log, 12))
        silent = f"it has written nothing: its node may not see {run_dir.path}"
        checks = f"muster engines check {plan.engine}  # says what the nodes see"
        raise MusterError(
            f"job {job_id} ended without a result: {view.state.value}",
            where=run_dir.job_log,
            why=told or "\n".join(word for word in (view.reason, silent) if word),
            fix=fix() if told else checks,
        )
    return result


def find_allocation() -> "OwnJob | None":
    """Return the job that we are in; None outside of one."""
    from torchmuster.engines.schedulers import may_be_in_job

    if not may_be_in_job(os.environ):
        return None  # the usual case costs no import
    from torchmuster.engines.own_job import find_own_job

    return find_own_job()
