"""`muster run --on ENGINE`: a run as a job of a scheduler, and a run inside a job that is there already."""

import os
import shlex
import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from torchmuster.cli.sites import my_sites
from torchmuster.errors import ManyErrors, MusterError, UsageError
from torchmuster.files.layout import short_id
from torchmuster.model.plan import WARN_S
from torchmuster.spec.sites.files import project_file, user_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchmuster.engines.base import Dialect, ObjectDialect
    from torchmuster.engines.own_job import OwnJob
    from torchmuster.files.layout import RunDir
    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.model.job import JobRequest
    from torchmuster.model.plan import RunPlan
    from torchmuster.model.verdict import Result
    from torchmuster.spec.launch import JobLimits, RunRequest
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


def find_hosts(name: str) -> "Site | None":
    """Return the site that `--on` names when it is hosts of ssh; None when it is something else."""
    if name == "local":
        return None
    site = my_sites().sites.get(name)
    return site if site is not None and site.kind == "ssh" else None


def nodes_of_site(site: "Site", *, spares: int = 0) -> str | None:
    """Return what the site says of nodes, as `--nodes` has it: all hosts of ssh but the spare ones, None when it says nothing."""
    if site.nodes is None:
        from torchmuster.spec.sites.site import site_hosts

        return str(max(len(site_hosts(site)) - spares, 1)) if site.kind == "ssh" else None
    least, most = site.nodes
    return str(most) if least == most else f"{least}:{most}"


def nodes_of_engine(name: str) -> str | None:
    """Return what the site of this name says of nodes; None where there is none, which is found out later."""
    if name == "local":
        return None
    site = my_sites().sites.get(name)
    return None if site is None else nodes_of_site(site)


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


def plan_for_job(
    request: "RunRequest", run_id: str, gpus_per_node: int, problems: "Problems"
) -> "RunPlan | None":
    """Return the plan of a run on other nodes: their GPUs are what the job asks for."""
    from torchmuster.spec.launch import plan_run

    gpus = [str(index) for index in range(gpus_per_node)]
    plan = plan_run(request, run_id, gpus, problems, simulated=False)
    return replace(plan, stdin_rank=None) if plan is not None else None


def submit_run(
    request: "RunRequest", run_id: str, limits: "JobLimits", problems: "Problems"
) -> int:
    """Submit a run and follow it to its end; Ctrl-C leaves it alone, twice cancels it."""
    from torchmuster.cli.runs.ship import place_archive, with_shipped
    from torchmuster.engines.registry import load_dialect
    from torchmuster.engines.sites import with_node_setup
    from torchmuster.files.layout import RunDir, runs_dir
    from torchmuster.owner.create import create_run_dir
    from torchmuster.owner.jobs.jobs import make_job, note_refusal, num_resubmits

    site = check_engine(request.engine or "", problems)
    gpus_per_node = request.gpus_per_node or (site.gpus_per_node if site else 0) or 0
    plan = problems.checked(plan_for_job(request, run_id, gpus_per_node, problems))
    if site is None:
        raise ManyErrors(problems.found)
    plan = with_node_setup(plan, site, python_given=request.python is not None)
    dialect = load_dialect(site.kind)
    num_more = num_resubmits(site, request) if site.resubmit_with == "chain" else 0
    if request.dry_run:
        run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
        job = make_job(plan, run_dir, site, request, limits)
        click.echo(f"$ {shlex.join(dialect.submit_argv(job, run_dir.job_script))}\n")
        if num_more:
            click.echo(f"and {num_more} times more, each job afterany the one before\n")
        click.echo(dialect.script(job), nl=False)
        click.echo("nothing was submitted (--dry-run)", err=True)
        return 0
    plan, packed = with_shipped(plan, request.ship_env)
    run_dir = create_run_dir(plan)
    place_archive(plan, packed)
    with note_refusal(run_dir):
        job = make_job(plan, run_dir, site, request, limits)
        for sentence in dialect.unmapped(job):
            click.echo(f"muster: {sentence}", err=True)
    return submit_and_follow(plan, run_dir, job, dialect, num_more=num_more, detach=request.detach)


def submit_and_follow(
    plan: "RunPlan",
    run_dir: "RunDir",
    job: "JobRequest",
    dialect: "Dialect",
    *,
    num_more: int,
    detach: bool,
) -> int:
    """Submit the job of a run, and the others of its chain; follow it unless `detach`."""
    from torchmuster.cli.ending import follow_run, print_id
    from torchmuster.owner.jobs.jobs import note_refusal, submit_job

    def say(text: str) -> None:
        click.echo(f"muster: {text}", err=True)

    with note_refusal(run_dir):
        job_id = submit_job(job, run_dir, dialect, say)
    _say_room(run_dir.path)
    if num_more:
        _submit_more(job, run_dir, dialect, num_more)
    if detach:
        return print_id(plan.run_id)
    follow = partial(_follow, plan, run_dir, dialect, job_id)
    return follow_run(plan, run_dir, follow)


def _submit_more(job: "JobRequest", run_dir: "RunDir", dialect: "Dialect", num_more: int) -> None:
    """Submit the other links of a chain, and say what became of it."""
    from torchmuster.owner.jobs.jobs import submit_chain

    taken, refusal = submit_chain(job, run_dir, dialect, num_more)
    if taken:
        click.echo(
            f"muster: the run may continue in {', '.join(taken)}, one after the other", err=True
        )
    if refusal is not None:
        what = f"only {len(taken)} of {num_more} further jobs were taken: {refusal.what}"
        click.echo(f"muster: {what}; after them the run's own job tries to continue", err=True)


def _say_room(path: str) -> None:
    """Say what will soon be short there; the job waits in its queue already, so a slow `quota` costs it nothing."""
    from torchmuster.owner.room import quota_warnings, room_warnings

    for warning in (*room_warnings(path), *quota_warnings(path)):
        click.echo(f"muster: {warning}", err=True)


def _follow(
    plan: "RunPlan", run_dir: "RunDir", dialect: "Dialect", job_id: str, voice: "TerminalVoice"
) -> "Result | None":
    from torchmuster.owner.views.account import how_to_go_on

    name = short_id(plan.run_id)
    voice.say(f"run {name} is job {job_id} of {dialect.name}; files in {run_dir.path}")

    def fix() -> str:
        return how_to_go_on(run_dir) or f"muster logs {name}"

    result = follow_job(plan, run_dir, dialect, job_id, voice, fix)
    if result is None:
        voice.say(f"the job continues: muster wait {name}")
    return result


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

    from torchmuster.files.tail import last_lines
    from torchmuster.owner.jobs.batch import JobFollower

    follower = JobFollower(plan, run_dir, dialect, job_id, voice)
    try:
        result = asyncio.run(follower.follow())
    finally:
        follower.close()
    view = follower.view
    if result is None and view is not None and view.state.is_final:
        raise MusterError(
            f"job {job_id} ended without a result: {view.state.value}",
            where=run_dir.job_log,
            why="\n".join(last_lines(run_dir.job_log, 12)) or view.reason,
            fix=fix(),
        )
    return result


def find_allocation() -> "OwnJob | None":
    """Return the job that we are in; None outside of one."""
    from torchmuster.engines.schedulers import may_be_in_job

    if not may_be_in_job(os.environ):
        return None  # the usual case costs no import
    from torchmuster.engines.own_job import find_own_job

    return find_own_job()


def run_inside(
    request: "RunRequest",
    run_id: str,
    inside: "OwnJob",
    limits: "JobLimits",
    problems: "Problems",
) -> int:
    """Run on the nodes of the job that we are in, or show what would be started there."""
    from torchmuster.diagnose.facts.gpus import visible_gpus

    if request.detach:
        problems.found.append(no_background())
    gpus = visible_gpus()  # those of one node; the others have their own
    plan = problems.checked(plan_for_job(request, run_id, len(gpus), problems))
    warn_s = WARN_S if limits.warn_s is None else limits.warn_s
    return run_in_allocation(
        plan, inside, warn_s, ship_env=request.ship_env, dry_run=request.dry_run
    )


def no_background() -> UsageError:
    """Return the refusal of `--detach` in a job."""
    return UsageError(
        "`--detach` can't be used inside a job",
        where="--detach",
        why="the run lives in this step of the job and ends with it",
        fix="leave it out and end the line with ` &`; a job script then needs `wait` as its last line",
    )


def run_in_allocation(
    plan: "RunPlan",
    inside: "OwnJob",
    warn_s: float,
    snapshots: str | None = None,
    ship_env: str | None = None,
    *,
    dry_run: bool = False,
) -> int:
    """Run on the nodes of the job that we are in, on the snapshots of an earlier run where it has any.

    Raises:
        UsageError: The job has fewer nodes than asked for.
    """
    from torchmuster.cli.ending import follow_run, shown_here
    from torchmuster.cli.runs.ship import place_archive, with_shipped
    from torchmuster.engines.allocation import AllocationEngine
    from torchmuster.owner.create import create_run_dir, link_snapshots
    from torchmuster.owner.jobs.inside import make_deadline, note_the_end, own_run_inside

    job = inside.from_here() or (inside if dry_run else None)
    if job is None:
        return _run_on_first_node(inside)
    job_id, engine_name, num_nodes = job.allocation.job_id, job.dialect.name, len(job.nodes)
    if num_nodes < plan.min_nodes + plan.spares:
        asked = f"{plan.min_nodes} nodes" + (f" and {plan.spares} spare" if plan.spares else "")
        fix = f"--nodes {max(num_nodes - plan.spares, 1)}"
        raise UsageError(
            f"{asked} are asked for, the job has {num_nodes}",
            where=f"job {job_id} of {engine_name}",
            fix=f"{fix}, or --here for simulated nodes on this one",
        )
    job = job.with_nodes(job.nodes[: plan.num_places]).with_launcher()
    plan = replace(plan, node_names=job.node_names, engine=engine_name, job_id=job_id)
    if dry_run:
        from torchmuster.cli.runs.dry_run import show_here

        return show_here(plan, job)
    plan, packed = with_shipped(shown_here(plan), ship_env)
    run_dir = create_run_dir(plan)
    place_archive(plan, packed)
    if snapshots is not None:
        link_snapshots(run_dir, snapshots)
    engine = AllocationEngine(plan, run_dir, job)

    def follow(voice: "TerminalVoice") -> "Result":
        where = f"inside job {job_id} of {engine_name}"
        voice.say(f"run {short_id(plan.run_id)} {where}, on {', '.join(plan.node_names)}")
        if plan.preflight in ("long", "only"):
            note_the_end(job)
        return own_run_inside(engine, voice, make_deadline(job, warn_s=warn_s))

    return follow_run(plan, run_dir, follow)


def _run_on_first_node(job: "OwnJob") -> int:
    """Type the same command on the first node of the job; its output comes here."""
    import sys

    from torchmuster import proc

    node, job_id = job.nodes[0], job.allocation.job_id
    click.echo(f"muster: this is not a node of job {job_id}: run on {node.name}", err=True)
    command = (sys.executable, "-m", "torchmuster", *sys.argv[1:])
    child = proc.start(job.argv(node, command), cwd=os.getcwd())
    while True:
        try:
            status = child.wait(3600.0)
        except KeyboardInterrupt:
            child.send_signal(2)
            continue
        if status is not None:
            return 128 - status if status < 0 else status
