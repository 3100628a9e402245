"""Pods as a place for runs, and what workflows and sweeps need of a cluster."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.place import warn
from torchmuster.core.files.layout import RunDir, runs_dir, short_id
from torchmuster.errors import MusterError, UsageError
from torchmuster.launcher.cli.jobs import JobPlace, ResubmittedJob, submit
from torchmuster.multirun.cli.places import StartSweep, SweepCell
from torchmuster.workflow.cli.places import AsJobs

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Follow
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.spec.launch import RunRequest
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.engines.base import ObjectDialect
    from torchmuster.launcher.model.job import JobRequest
    from torchmuster.launcher.spec.site import Site
    from torchmuster.multirun.sweep.plan import SweepPlan
    from torchmuster.workflow.owner.capacity import Machine
    from torchmuster.workflow.plan import WorkflowPlan


# `muster sweep --on NAME` on a cluster: one Job, whose pods are the members.


# `muster run --on NAME` on a cluster: the pods bring along what they need.


def fit(plan: "RunPlan", request: "RunRequest", site: "Site") -> "RunPlan":
    """Return the plan for pods: with the image's interpreter, and with nodes that come back."""
    from torchmuster.kubernetes.pods.bring import PYTHON
    from torchmuster.launcher.engines.sites import with_node_setup

    plan = with_node_setup(plan, site, python_given=request.python is not None)
    if request.python is None and not site.python:
        plan = replace(plan, program=replace(plan.program, python=(PYTHON,)))
    return replace(plan, engine=site.name, nodes_return=True)


def show_manifest(job: "JobRequest", dialect: "ObjectDialect") -> int:
    """Print the manifest for reading, or for `kubectl create --dry-run=server -f -`."""
    import shlex

    argv = dialect.submit_argv(job, "MANIFEST")
    click.echo(f"$ {shlex.join(argv)}", err=True)
    click.echo(dialect.script(job), nl=False)
    click.echo("nothing was submitted (--dry-run); the Secret is shown empty", err=True)
    return 0


def say_what_goes(job: "JobRequest", *, detach: bool) -> None:
    """Warn about what a detached run without a volume loses with its pods."""
    from torchmuster.kubernetes.engine.wishes import keeps_runs

    if detach and not keeps_runs(job):
        click.echo(
            "muster: logs and snapshots live in the pods and go with them: follow the run to its end to have them here,"
            " or keep runs on a volume (`claims` and `home` of the site)",
            err=True,
        )


MOST_PODS = 32  # at a time, without --slots


def submit_to_pods(
    given: dict[str, Any], site: "Site", dialect: "ObjectDialect", own: Callable[..., int]
) -> int:
    """Submit a sweep to a cluster and follow it to its end; Ctrl-C detaches, twice cancels it.

    Args:
        given: The options of the command line.
        site: The cluster.
        dialect: The dialect of the cluster.
        own: Owns a prepared sweep here, if its members are runs in several pods, which this machine
            submits.
    """
    from torchmuster.core.spec.problems import Problems
    from torchmuster.kubernetes.engine.wishes import keeps_runs
    from torchmuster.kubernetes.pods.bring import check_code, lost_with_pods, shown_files
    from torchmuster.kubernetes.pods.check import check_claims
    from torchmuster.kubernetes.pods.members import array_of, submit_pods
    from torchmuster.kubernetes.pods.sweep_runs import note_request
    from torchmuster.launcher.jobs.jobs import note_refusal
    from torchmuster.multirun.cli.sweep_jobs import check_stop_rule, follow_unless
    from torchmuster.multirun.sweep.members import create_sweep_dir
    from torchmuster.multirun.sweep.metric import check_rule

    problems = Problems()
    is_of_runs = given["nodes"] > 1
    if not is_of_runs:
        check_stop_rule(given, problems)
    plan, job = _plan(given, site, problems)
    check_code(plan.run)
    if given["dry_run"]:
        shown = job if is_of_runs else array_of(plan, job, len(plan.members), 0)
        more = () if is_of_runs else (("sweep.json", ""),)
        return show_manifest(replace(shown, brings=(*shown_files(), *more)), dialect)
    if plan.stop is not None:
        check_rule(plan.stop)  # before anything is made
    for sentence in (*check_claims(job), *lost_with_pods(job), *dialect.unmapped(job)):
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
    """Return the sweep and what one member requests: one GPU per worker, if the site has GPUs."""
    from torchmuster.core.files.layout import RunDir, runs_dir
    from torchmuster.core.model.plan import Tee
    from torchmuster.core.spec.launch import read_job_limits
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
    # For a pod that ended before anybody looked, only the output of rank 0 is left.
    run = replace(fit(plan.run, request, site), tee=Tee.RANK_0)
    plan = replace(plan, slots=slots, run=run)
    job = make_job(run, RunDir(os.path.join(runs_dir(), plan.run_id)), site, request, limits)
    job = replace(job, python=python_of(site), run_id=plan.run_id)
    return plan, settle_place(job, job.num_nodes)


def _gpus_of_pod(request: "RunRequest", site: "Site") -> int:
    wanted = request.nproc_per_node
    workers = int(wanted) if wanted is not None and wanted.isdecimal() else site.gpus_per_node or 0
    return min(site.gpus_per_node or 0, workers)


class PodsPlace(JobPlace):
    """Pods of a cluster as a place for runs; without a volume the run lives in the pods."""

    kind = "pods"
    takes_no_environment = "pods have an image"
    has_own_disks = True
    dialect: "ObjectDialect"

    def fill(self, request: "RunRequest") -> "RunRequest":
        if request.take_within is not None:
            keys = {**dict(self.site.own_keys), "take_within": request.take_within}
            self.site = self.site.model_copy(update={"own_keys": tuple(keys.items())})
        return super().fill(request)

    def _fit(self, plan: "RunPlan") -> "RunPlan":
        return fit(plan, self._request, self.site)

    def _job(self, plan: "RunPlan") -> "JobRequest":
        from torchmuster.kubernetes.pods.bring import check_code, python_of, settle_place

        check_code(plan)
        job = replace(super()._job(plan), python=python_of(self.site), run_id=plan.run_id)
        return settle_place(job, job.num_nodes)

    def show(self, plan: "RunPlan") -> None:
        from torchmuster.kubernetes.pods.bring import shown_files

        show_manifest(replace(self._job(plan), brings=shown_files()), self.dialect)

    def settle(self, plan: "RunPlan") -> "RunPlan":
        from torchmuster.kubernetes.pods.bring import lost_with_pods
        from torchmuster.kubernetes.pods.check import check_claims
        from torchmuster.kubernetes.pods.release import warn_of_leaving_pods

        self._settled = self._job(plan)
        warn([*check_claims(self._settled), *lost_with_pods(self._settled)])
        is_named = self._request.run_id is not None
        if is_named and (text := warn_of_leaving_pods(self._settled)) is not None:
            warn([text])
        return plan

    def start(self, plan: "RunPlan", run_dir: RunDir, *, detach: bool) -> "Follow | None":
        from torchmuster.kubernetes.pods.bring import bring_run

        request, warn_s = self._request, self._limits.warn_s
        warn_s = (self.site.warn or 0.0) if warn_s is None else warn_s
        limit_s = plan.limits.join_timeout_s if request.join_timeout is not None else None
        job = bring_run(plan, run_dir, self._settled, warn_s, limit_s)
        warn(self.dialect.unmapped(job))
        say_what_goes(job, detach=detach)
        return submit(plan, run_dir, job, self.dialect, num_more=0, detach=detach)

    def look(self) -> list[dict[str, Any]]:
        from torchmuster.kubernetes.cli.check import cluster_rows

        return cluster_rows(self.site)

    def try_out(self, limit_s: float) -> tuple[list[dict[str, Any]], str]:
        from torchmuster.kubernetes.cli.check import try_pods

        note = (
            "nothing is left on the cluster; the run's files stay here: muster prune removes them"
        )
        return try_pods(self.site, limit_s), note


class SamePods(ResubmittedJob):
    """The cluster of an earlier run in pods; resumes from snapshots that have outlived the pods."""

    def settle(self, plan: "RunPlan") -> "RunPlan":
        from torchmuster.kubernetes.pods.again import find_earlier_run
        from torchmuster.kubernetes.pods.bring import check_code, settle_place
        from torchmuster.kubernetes.pods.check import check_claims
        from torchmuster.kubernetes.pods.reach import pod_order
        from torchmuster.launcher.engines.base import object_dialect

        order = pod_order(self._old)
        if order is None or object_dialect(self._asked.dialect) is None:
            raise MusterError(
                "the run's record does not tell what its pods were told",
                where=os.path.join(self._old.path, "pods"),
                fix="type its command again",
            )
        self._order = order
        self._before = find_earlier_run(self._old, order, self._asked.request)
        check_code(plan)
        job = self._asked.renamed(RunDir(os.path.join(runs_dir(), plan.run_id)))
        self._job = settle_place(replace(job, run_id=plan.run_id), job.num_nodes)
        warn(check_claims(self._job))
        return plan

    def start(self, plan: "RunPlan", run_dir: RunDir, *, detach: bool) -> "Follow | None":
        from torchmuster.kubernetes.pods.bring import bring_run

        order = self._order
        job = bring_run(plan, run_dir, self._job, order.warn_s, order.start_limit_s, self._before)
        say_what_goes(job, detach=detach)
        return submit(plan, run_dir, job, self._asked.dialect, num_more=0, detach=detach)


def pods_again(old: RunDir) -> SamePods:
    """Return the place for runs for restarting a run that was in pods.

    Raises:
        UsageError: The run was submitted on another machine, which has its code and its request.
        MusterError: The record lacks the request.
    """
    from torchmuster.kubernetes.node.order import CODE_FILE
    from torchmuster.kubernetes.pods.reach import is_submitted_here
    from torchmuster.launcher.jobs.jobs import read_request

    has_code = os.path.exists(os.path.join(old.path, "pods", CODE_FILE))
    if not is_submitted_here(old) and not has_code:
        raise UsageError(
            f"the run {short_id(os.path.basename(old.path))} was submitted on another machine",
            where=old.path,
            why="its code, and what it asked of the cluster, are there",
            fix="restart it there, or type its command here",
        )
    return SamePods(old, read_request(old))


class GroupsInPods(AsJobs):
    """A workflow whose groups are Jobs of a cluster."""

    def check(self, plan: "WorkflowPlan", *, detach: bool) -> None:
        from torchmuster.kubernetes.cli.submit import check_for_pods

        del detach
        self.place.site = check_for_pods(plan, self.place.site)

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        from torchmuster.kubernetes.cli.submit import show_pods

        del machine
        show_pods(plan, self.place.site, self.place.dialect, as_json=as_json)

    def submit(self, run_dir: RunDir, plan: "WorkflowPlan", *, detach: bool) -> int:
        from torchmuster.kubernetes.cli.submit import submit_to_pods

        return submit_to_pods(run_dir, plan, self.place.site, detach=detach)

    def settle_again(self, old: RunDir) -> None:
        from torchmuster.kubernetes.pods.end import remove_groups

        remove_groups(old)


class SweepInPods(SweepCell):
    """A sweep whose members are the pods of one Job."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        del problems
        return submit_to_pods(given, self.place.site, self.place.dialect, start)
