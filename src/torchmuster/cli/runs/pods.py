"""`muster run --on NAME` where NAME is a cluster whose jobs are pods: they bring along what they need."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from torchmuster.cli.runs.job import plan_for_job, submit_and_follow
from torchmuster.errors import MusterError, UsageError
from torchmuster.files.layout import short_id

if TYPE_CHECKING:
    from torchmuster.engines.base import ObjectDialect
    from torchmuster.files.layout import RunDir
    from torchmuster.model.job import JobRequest
    from torchmuster.model.plan import RunPlan
    from torchmuster.owner.jobs.jobs import JobAgain
    from torchmuster.spec.launch import JobLimits, RunRequest
    from torchmuster.spec.problems import Problems
    from torchmuster.spec.sites.site import Site


def submit_to_pods(
    request: "RunRequest",
    run_id: str,
    limits: "JobLimits",
    problems: "Problems",
    site: "Site",
    dialect: "ObjectDialect",
) -> int:
    """Submit a run to a cluster and follow it to its end."""
    from torchmuster.files.layout import RunDir, runs_dir
    from torchmuster.owner.create import create_run_dir
    from torchmuster.owner.jobs.jobs import make_job, note_refusal
    from torchmuster.owner.pods.bring import (
        bring_run,
        check_code,
        python_of,
        settle_place,
        shown_files,
    )
    from torchmuster.owner.pods.check import look_at_claims
    from torchmuster.owner.pods.release import words_on_leavers

    gpus = request.gpus_per_node or site.gpus_per_node or 0
    plan = fit(problems.checked(plan_for_job(request, run_id, gpus, problems)), request, site)
    check_code(plan)
    job = make_job(plan, RunDir(os.path.join(runs_dir(), plan.run_id)), site, request, limits)
    job = replace(job, python=python_of(site), run_id=plan.run_id)
    job = settle_place(job, job.num_nodes)
    if request.dry_run:
        return show_manifest(replace(job, brings=shown_files()), dialect)
    for sentence in look_at_claims(job):
        click.echo(f"muster: {sentence}", err=True)
    if request.run_id is not None and (text := words_on_leavers(job)) is not None:
        click.echo(f"muster: {text}", err=True)
    run_dir = create_run_dir(plan)
    with note_refusal(run_dir):
        warn_s = (site.warn or 0.0) if limits.warn_s is None else limits.warn_s
        limit_s = plan.limits.join_timeout_s if request.join_timeout is not None else None
        job = bring_run(plan, run_dir, job, warn_s, limit_s)
        for sentence in dialect.unmapped(job):
            click.echo(f"muster: {sentence}", err=True)
    say_what_goes(job, detach=request.detach)
    return submit_and_follow(plan, run_dir, job, dialect, num_more=0, detach=request.detach)


def check_origin(old: "RunDir") -> None:
    """Refuse a run that was found on its cluster: what it asked for, and its code, are where it was submitted.

    Raises:
        UsageError: It was submitted on another machine.
    """
    from torchmuster.files import atomic
    from torchmuster.node.pod.order import CODE_FILE

    noted = atomic.read_json(old.job)
    has_request = isinstance(noted, dict) and "request" in noted
    if has_request or os.path.exists(os.path.join(old.path, "pods", CODE_FILE)):
        return
    raise UsageError(
        f"the run {short_id(os.path.basename(old.path))} was submitted on another machine",
        where=old.path,
        why="its code, and what it asked of the cluster, are there",
        fix="restart it there, or type its command here",
    )


def submit_to_pods_again(plan: "RunPlan", old: "RunDir", asked: "JobAgain", *, detach: bool) -> int:
    """Submit a run in pods again, on the snapshots of the one before where these have outlived its pods.

    Raises:
        UsageError: They have not.
        MusterError: What its pods were told is not in its record.
    """
    from torchmuster.engines.base import object_dialect
    from torchmuster.files.layout import RunDir, runs_dir
    from torchmuster.owner.create import create_run_dir
    from torchmuster.owner.jobs.jobs import note_refusal
    from torchmuster.owner.pods.again import find_before
    from torchmuster.owner.pods.bring import bring_run, check_code, settle_place
    from torchmuster.owner.pods.check import look_at_claims
    from torchmuster.owner.pods.reach import pod_order

    order, dialect = pod_order(old), object_dialect(asked.dialect)
    if order is None or dialect is None:
        raise MusterError(
            "the run's record does not tell what its pods were told",
            where=os.path.join(old.path, "pods"),
            fix="type its command again",
        )
    before = find_before(old, order, asked.request)
    check_code(plan)
    job = asked.renamed(old, RunDir(os.path.join(runs_dir(), plan.run_id)))
    job = settle_place(replace(job, run_id=plan.run_id), job.num_nodes)
    for sentence in look_at_claims(job):
        click.echo(f"muster: {sentence}", err=True)
    run_dir = create_run_dir(plan)
    with note_refusal(run_dir):
        job = bring_run(plan, run_dir, job, order.warn_s, order.start_limit_s, before)
    say_what_goes(job, detach=detach)
    return submit_and_follow(plan, run_dir, job, dialect, num_more=0, detach=detach)


def fit(plan: "RunPlan", request: "RunRequest", site: "Site") -> "RunPlan":
    """Return the plan for pods: the image's interpreter, and nodes that come back."""
    from torchmuster.engines.sites import with_node_setup
    from torchmuster.owner.pods.bring import PYTHON

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
    from torchmuster.engines.kubernetes.wishes import keeps_runs

    if detach and not keeps_runs(job):
        click.echo(
            "muster: logs and snapshots live in the pods and go with them: follow the run to its end to have them here,"
            " or keep runs on a volume (`claims` and `home` of the site)",
            err=True,
        )
