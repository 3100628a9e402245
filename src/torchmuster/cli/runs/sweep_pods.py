"""`muster sweep --on NAME` where NAME is a cluster whose jobs are pods: one Job, whose pods are the slots."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.errors import UsageError
from torchmuster.files.layout import short_id

if TYPE_CHECKING:
    from torchmuster.engines.base import ObjectDialect
    from torchmuster.files.layout import RunDir
    from torchmuster.model.job import JobRequest
    from torchmuster.owner.views.sweep_view import SweepView
    from torchmuster.spec.launch import RunRequest
    from torchmuster.spec.problems import Problems
    from torchmuster.spec.sites.site import Site
    from torchmuster.spec.sweep_plan import SweepPlan

MOST_PODS = 32  # without --slots: each costs a start and its own import of torch


def submit_to_pods(given: dict[str, Any], site: "Site", dialect: "ObjectDialect") -> int:
    """Submit a sweep to a cluster and follow it to its end; Ctrl-C leaves it alone, twice cancels it."""
    from torchmuster.cli.runs.pods import show_manifest
    from torchmuster.owner.create import create_sweep_dir
    from torchmuster.owner.jobs.jobs import note_refusal
    from torchmuster.owner.pods.bring import check_code, shown_files
    from torchmuster.owner.pods.check import look_at_claims
    from torchmuster.owner.pods.sweep.bring import bring_sweep
    from torchmuster.owner.sweep.stop_rules import check_rule
    from torchmuster.spec.problems import Problems

    plan, job = _plan(given, site, Problems())
    check_code(plan.run)
    if given["dry_run"]:
        names = (*shown_files(), ("sweep.json", ""))
        return show_manifest(replace(job, brings=names), dialect)
    if plan.stop is not None:
        check_rule(plan.stop)  # before anything is made
    for sentence in look_at_claims(job):
        click.echo(f"muster: {sentence}", err=True)
    run_dir = create_sweep_dir(plan)
    with note_refusal(run_dir):
        job = bring_sweep(plan, run_dir, job)
        for sentence in dialect.unmapped(job):
            click.echo(f"muster: {sentence}", err=True)
    return _submit(plan, run_dir, job, dialect, detach=given["detach"])


def _plan(
    given: dict[str, Any], site: "Site", problems: "Problems"
) -> "tuple[SweepPlan, JobRequest]":
    """Return the sweep and the Job for it: a pod for each slot, with a GPU for each worker where the site has any."""
    import os

    from torchmuster.cli.runs.pods import fit
    from torchmuster.cli.runs.sweep_words import plan_sweep, sweep_request
    from torchmuster.files.layout import RunDir, runs_dir
    from torchmuster.owner.jobs.jobs import make_job
    from torchmuster.owner.pods.bring import python_of, settle_place
    from torchmuster.spec.launch import read_job_limits

    request = sweep_request(given)
    limits = read_job_limits(request, problems)
    if given["time_limit"] is not None:
        fix = "leave it out; `--stop` ends members early, `muster cancel` all of them"
        what = "`--time` is for sweeps whose members are jobs"
        problems.add(what, "--time", "the pods of a sweep run until all members have ended", fix)
    if given["per_gpu"] > 1:
        fix = "--slots is the number of pods"
        problems.add("a pod has its GPUs for itself", "--per-gpu", "a slot is a pod", fix)
    num_gpus = request.gpus_per_node or _gpus_of_pod(request, site)
    words = {**given, "per_gpu": 1}
    gpus = [str(n) for n in range(num_gpus)]
    plan = plan_sweep(words, replace(request, gpus_per_node=num_gpus), gpus, problems, is_job=True)
    slots = plan.slots if given["slots"] is not None else min(plan.slots, MOST_PODS)
    plan = replace(plan, slots=slots, run=fit(plan.run, request, site))
    run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
    job = make_job(plan.run, run_dir, site, replace(request, gpus_per_node=num_gpus), limits)
    pods = replace(job.chunks[0], num_nodes=slots, gpus=num_gpus)
    # No time limit of the site: it is that of one training, and this Job is all of them.
    job = replace(
        job, chunks=(pods,), python=python_of(site), run_id=plan.run_id, time_limit_s=None
    )
    return plan, settle_place(job, job.num_nodes)


def _gpus_of_pod(request: "RunRequest", site: "Site") -> int:
    wanted = request.nproc_per_node
    workers = int(wanted) if wanted is not None and wanted.isdecimal() else site.gpus_per_node or 0
    return min(site.gpus_per_node or 0, workers)


def submit_again(view: "SweepView", run_dir: "RunDir", *, detach: bool) -> int:
    """Submit the members of a sweep that have not succeeded once more, as one Job."""
    from torchmuster.engines.base import object_dialect
    from torchmuster.owner.jobs.jobs import note_refusal, read_request
    from torchmuster.owner.pods.sweep.bring import bring_sweep, job_again, rewrite_plan

    before = read_request(run_dir)
    dialect = object_dialect(before.dialect)
    if dialect is None:
        raise UsageError("the sweep was no Job of a cluster", where=run_dir.job)
    job = job_again(view, run_dir, before.request)
    plan = rewrite_plan(view.plan, run_dir, job.num_nodes)
    with note_refusal(run_dir):
        job = bring_sweep(plan, run_dir, job)
    return _submit(plan, run_dir, job, dialect, detach=detach)


def _submit(
    plan: "SweepPlan",
    run_dir: "RunDir",
    job: "JobRequest",
    dialect: "ObjectDialect",
    *,
    detach: bool,
) -> int:
    from torchmuster.cli.ending import GOES_ON, print_id
    from torchmuster.cli.runs.job import follow_job
    from torchmuster.cli.runs.pods import say_what_goes
    from torchmuster.cli.runs.sweep_words import say_end
    from torchmuster.cli.status_line import StatusLine, wanted
    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.owner.jobs.jobs import note_refusal, submit_job
    from torchmuster.owner.views.sweep_view import view_sweep

    say_what_goes(job, detach=detach)
    with note_refusal(run_dir):
        job_id = submit_job(job, run_dir, dialect)
    if detach:
        return print_id(plan.run_id)
    voice = TerminalVoice()
    voice.start()
    status = StatusLine(voice, run_dir, wanted())
    status.start()
    name = short_id(plan.run_id)
    try:
        pods = f"{plan.slots} pod{'s' if plan.slots != 1 else ''}"
        voice.say(f"sweep {name} is job {job_id} of {pods}; muster status {name}")
        fix = f"muster restart {name} runs the members that have not succeeded"
        result = follow_job(plan.run, run_dir, dialect, job_id, voice, lambda: fix)
        status.close()
        if result is None:
            voice.say(f"the sweep continues: muster wait {name}")
            return GOES_ON
        say_end(view_sweep(run_dir, is_alive=False), result, voice)
        return result.exit_code
    finally:
        status.close()
        voice.flush(5.0)
