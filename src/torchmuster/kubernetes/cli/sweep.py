"""`muster sweep --on NAME` where NAME is a cluster whose jobs are pods: one Job, whose pods are the members."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from torchmuster.core.spec.launch import RunRequest
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.engines.base import ObjectDialect
    from torchmuster.launcher.model.job import JobRequest
    from torchmuster.launcher.spec.site import Site
    from torchmuster.multirun.sweep.plan import SweepPlan

MOST_PODS = 32  # at a time, without --slots


def submit_to_pods(
    given: dict[str, Any], site: "Site", dialect: "ObjectDialect", own: Callable[..., int]
) -> int:
    """Submit a sweep to a cluster and follow it to its end; Ctrl-C leaves it alone, twice cancels it.

    Args:
        given: The words of the command line.
        site: The cluster.
        dialect: The cluster's.
        own: Owns a prepared sweep here: one whose members are runs in several pods, which this machine submits.
    """
    from torchmuster.core.spec.problems import Problems
    from torchmuster.kubernetes.cli.pods import say_what_goes, show_manifest
    from torchmuster.kubernetes.engine.wishes import keeps_runs
    from torchmuster.kubernetes.pods.bring import check_code, lost_with_pods, shown_files
    from torchmuster.kubernetes.pods.check import look_at_claims
    from torchmuster.kubernetes.pods.members import array_of, submit_pods
    from torchmuster.kubernetes.pods.sweep_runs import note_request
    from torchmuster.launcher.jobs.jobs import note_refusal
    from torchmuster.multirun.cli.sweep_jobs import check_follower, follow_unless
    from torchmuster.multirun.sweep.create import create_sweep_dir
    from torchmuster.multirun.sweep.stop_rules import check_rule

    problems = Problems()
    is_of_runs = given["nodes"] > 1
    if not is_of_runs:
        check_follower(given, problems)
    plan, job = _plan(given, site, problems)
    check_code(plan.run)
    if given["dry_run"]:
        shown = job if is_of_runs else array_of(plan, job, len(plan.members), 0)
        more = () if is_of_runs else (("sweep.json", ""),)
        return show_manifest(replace(shown, brings=(*shown_files(), *more)), dialect)
    if plan.stop is not None:
        check_rule(plan.stop)  # before anything is made
    for sentence in (*look_at_claims(job), *lost_with_pods(job), *dialect.unmapped(job)):
        click.echo(f"muster: {sentence}", err=True)
    run_dir = create_sweep_dir(plan)
    if is_of_runs:
        note_request(run_dir, job)
        if given["detach"]:
            text = "a process of this machine submits the members: it has to stay until they have ended"
            click.echo(f"muster: {text}", err=True)
        return own(plan, run_dir)
    with note_refusal(run_dir):
        job_id = submit_pods(plan, run_dir, job, range(len(plan.members)), detach=given["detach"])
    say_what_goes(job, detach=given["detach"])
    if not given["detach"] and not keeps_runs(job):
        text = "a member waits for nobody: files that it makes come while this process follows it, or go with its pod"
        click.echo(f"muster: {text}", err=True)
    return follow_unless(plan, run_dir, [job_id], site.name, detach=given["detach"])


def _plan(
    given: dict[str, Any], site: "Site", problems: "Problems"
) -> "tuple[SweepPlan, JobRequest]":
    """Return the sweep and what one member asks of the cluster: a GPU for each worker where the site has any."""
    from torchmuster.core.files.layout import RunDir, runs_dir
    from torchmuster.core.model.plan import Tee
    from torchmuster.core.spec.launch import read_job_limits
    from torchmuster.kubernetes.cli.pods import fit
    from torchmuster.kubernetes.pods.bring import python_of, settle_place
    from torchmuster.launcher.jobs.jobs import make_job
    from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request

    request = sweep_request(given, in_pods=True)
    limits = read_job_limits(request, problems)
    if given["per_gpu"] > 1:
        fix = "--slots is the number of pods that run at a time"
        problems.add("a pod has its GPUs for itself", "--per-gpu", "a member is a pod", fix)
    num_gpus = request.gpus_per_node or _gpus_of_pod(request, site)
    request = replace(request, gpus_per_node=num_gpus)
    gpus = [str(n) for n in range(num_gpus)]
    plan = plan_sweep({**given, "per_gpu": 1}, request, gpus, problems, is_job=True)
    most = max(1, MOST_PODS // given["nodes"])
    slots = plan.slots if given["slots"] is not None else min(plan.slots, most)
    # What rank 0 prints is all that is left of a pod that has ended before anybody looked.
    run = replace(fit(plan.run, request, site), tee=Tee.RANK_0)
    plan = replace(plan, slots=slots, run=run)
    job = make_job(run, RunDir(os.path.join(runs_dir(), plan.run_id)), site, request, limits)
    job = replace(job, python=python_of(site), run_id=plan.run_id)
    return plan, settle_place(job, job.num_nodes)


def _gpus_of_pod(request: "RunRequest", site: "Site") -> int:
    wanted = request.nproc_per_node
    workers = int(wanted) if wanted is not None and wanted.isdecimal() else site.gpus_per_node or 0
    return min(site.gpus_per_node or 0, workers)
