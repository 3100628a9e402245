"""Runs as jobs of a scheduler, which sees our files, and as pods, which bring along what they need."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.ending import follow_job
from torchmuster.core.cli.place import Place, plan_elsewhere, warn
from torchmuster.core.files.layout import RunDir, runs_dir, short_id
from torchmuster.errors import MusterError, UsageError

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Follow, StartSweep
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.spec.launch import JobLimits, RunRequest
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.engines.base import Dialect, ObjectDialect
    from torchmuster.launcher.jobs.jobs import JobAgain
    from torchmuster.launcher.model.job import JobRequest
    from torchmuster.launcher.spec.site import Site
    from torchmuster.multirun.door.messages import SessionSetup
    from torchmuster.workflow.owner.capacity import Machine
    from torchmuster.workflow.plan import WorkflowPlan


class AsJob(Place):
    """A job of a scheduler, which owns its run; Ctrl-C leaves it alone, twice cancels it."""

    is_followed_here = False
    has_own_disks = False  # nobody else sees what its nodes write
    _request: "RunRequest"
    _limits: "JobLimits"

    def __init__(self, site: "Site", dialect: "Dialect") -> None:
        self.name, self.site, self.dialect = site.name, site, dialect

    def fill(self, request: "RunRequest") -> "RunRequest":
        from torchmuster.core.cli.options import nodes_of_site

        detach = request.detach or request.launched  # the job owns its run
        return replace(
            request, detach=detach, nodes=request.nodes or nodes_of_site(self.site) or "1"
        )

    def plan(
        self, request: "RunRequest", run_id: str, limits: "JobLimits", problems: "Problems"
    ) -> "RunPlan | None":
        num_gpus = request.gpus_per_node or self.site.gpus_per_node or 0
        plan = plan_elsewhere(request, run_id, num_gpus, problems)
        self._request, self._limits = request, limits
        if request.take_within is not None and not self.has_own_disks:
            why = "what a job writes is on a disk that this machine sees"
            problems.add("nothing has to be taken out of it", "--take-within", why)
        return None if plan is None or problems.found else self._fit(plan)

    def _fit(self, plan: "RunPlan") -> "RunPlan":
        """Return the plan for the nodes that the site describes."""
        from torchmuster.launcher.engines.sites import with_node_setup

        return with_node_setup(plan, self.site, python_given=self._request.python is not None)

    def _job(self, plan: "RunPlan") -> "JobRequest":
        from torchmuster.launcher.jobs.jobs import make_job

        run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
        return make_job(plan, run_dir, self.site, self._request, self._limits)

    @property
    def _num_more(self) -> int:
        """Return how many further jobs the chain of the run has from its start."""
        from torchmuster.launcher.jobs.jobs import num_resubmits

        return num_resubmits(self.site, self._request) if self.site.resubmit_with == "chain" else 0

    def show(self, plan: "RunPlan") -> None:
        job = self._job(plan)
        path = RunDir(os.path.join(runs_dir(), plan.run_id)).job_script
        click.echo(f"$ {shlex.join(self.dialect.submit_argv(job, path))}\n")
        if self._num_more:
            click.echo(f"and {self._num_more} times more, each job afterany the one before\n")
        click.echo(self.dialect.script(job), nl=False)
        click.echo("nothing was submitted (--dry-run)", err=True)

    def settle(self, plan: "RunPlan") -> "RunPlan":
        from torchmuster.launcher.cli.ship import with_shipped

        plan, self._packed = with_shipped(plan, self._request.ship_env)
        return plan

    def start(self, plan: "RunPlan", run_dir: RunDir, *, detach: bool) -> "Follow | None":
        from torchmuster.launcher.cli.ship import place_archive

        place_archive(plan, self._packed)
        job = self._job(plan)
        warn(self.dialect.unmapped(job))
        return submit(plan, run_dir, job, self.dialect, num_more=self._num_more, detach=detach)

    def look(self) -> list[dict[str, Any]]:
        from torchmuster.launcher.cli.engine_rows import queue_rows

        return queue_rows(self.site)

    def try_out(self, limit_s: float) -> tuple[list[dict[str, Any]], str]:
        from torchmuster.launcher.cli.engine_job import try_job

        note = "the test job's files stay: muster prune removes them"
        return try_job(self, limit_s), note

    def show_workflow(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        from torchmuster.workflow.cli.job_scripts import show_jobs

        del machine
        show_jobs(plan, self.name, as_json=as_json)

    def with_task_setup(self, plan: "WorkflowPlan") -> "WorkflowPlan":
        from torchmuster.launcher.engines.sites import with_task_setup

        return with_task_setup(plan, self.site)

    def submit_workflow(
        self, run_dir: RunDir, plan: "WorkflowPlan", *, detach: bool, as_json: bool
    ) -> int:
        from torchmuster.workflow.cli.workflow import submit_to_scheduler

        return submit_to_scheduler(run_dir, plan, self.site, detach=detach, as_json=as_json)

    def sweep(self, given: dict[str, Any], problems: "Problems", start: "StartSweep") -> int:
        from torchmuster.multirun.cli.sweep_jobs import submit_sweep

        del start  # the array owns itself
        return submit_sweep(given, self.site, problems)

    def settle_session(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        from torchmuster.multirun.cli.session_places import with_setup, with_site

        plan = replace(plan, engine=self.name)
        plan = with_site(plan, self.site, python_given=given["python"] is not None)
        return with_setup(plan, setup)

    def own_session(self, plan: "RunPlan", run_dir: RunDir, given: "Mapping[str, Any]") -> None:
        """Submit the job that owns the session.

        Raises:
            MusterError: It was refused.
        """
        from torchmuster.core.spec.launch import RunRequest, read_job_limits
        from torchmuster.core.spec.problems import Problems
        from torchmuster.launcher.jobs.jobs import make_job, note_refusal, submit_job

        named = ("queue", "account", "cpus_per_node", "gpus_per_node", "mem", "time_limit")
        request = RunRequest(script="session", **{name: given[name] for name in named})
        limits = read_job_limits(request, Problems())
        with note_refusal(run_dir):
            job = make_job(plan, run_dir, self.site, request, limits)
            submit_job(job, run_dir, self.dialect)


class AsPods(AsJob):
    """Pods of a cluster; without a volume the run lives in them."""

    takes_no_environment = "pods have an image"
    no_session = "pods of a session are not made yet"
    has_own_disks = True
    dialect: "ObjectDialect"

    def fill(self, request: "RunRequest") -> "RunRequest":
        if request.take_within is not None:
            keys = {**dict(self.site.own_keys), "take_within": request.take_within}
            self.site = self.site.model_copy(update={"own_keys": tuple(keys.items())})
        return super().fill(request)

    def _fit(self, plan: "RunPlan") -> "RunPlan":
        from torchmuster.kubernetes.cli.pods import fit

        return fit(plan, self._request, self.site)

    def _job(self, plan: "RunPlan") -> "JobRequest":
        from torchmuster.kubernetes.pods.bring import check_code, python_of, settle_place

        check_code(plan)
        job = replace(super()._job(plan), python=python_of(self.site), run_id=plan.run_id)
        return settle_place(job, job.num_nodes)

    def show(self, plan: "RunPlan") -> None:
        from torchmuster.kubernetes.cli.pods import show_manifest
        from torchmuster.kubernetes.pods.bring import shown_files

        show_manifest(replace(self._job(plan), brings=shown_files()), self.dialect)

    def settle(self, plan: "RunPlan") -> "RunPlan":
        from torchmuster.kubernetes.pods.bring import lost_with_pods
        from torchmuster.kubernetes.pods.check import look_at_claims
        from torchmuster.kubernetes.pods.release import words_on_leavers

        self._settled = self._job(plan)
        warn([*look_at_claims(self._settled), *lost_with_pods(self._settled)])
        is_named = self._request.run_id is not None
        if is_named and (text := words_on_leavers(self._settled)) is not None:
            warn([text])
        return plan

    def start(self, plan: "RunPlan", run_dir: RunDir, *, detach: bool) -> "Follow | None":
        from torchmuster.kubernetes.cli.pods import say_what_goes
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

    def check_workflow(self, plan: "WorkflowPlan", *, detach: bool) -> None:
        from torchmuster.kubernetes.cli.submit import check_for_pods

        del detach
        self.site = check_for_pods(plan, self.site)

    def sweep(self, given: dict[str, Any], problems: "Problems", start: "StartSweep") -> int:
        from torchmuster.kubernetes.cli.sweep import submit_to_pods

        del problems
        return submit_to_pods(given, self.site, self.dialect, start)

    def settle_workflow_again(self, old: RunDir) -> None:
        from torchmuster.kubernetes.pods.end import remove_groups

        remove_groups(old)

    def show_workflow(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        from torchmuster.kubernetes.cli.submit import show_pods

        del machine
        show_pods(plan, self.site, self.dialect, as_json=as_json)

    def submit_workflow(
        self, run_dir: RunDir, plan: "WorkflowPlan", *, detach: bool, as_json: bool
    ) -> int:
        from torchmuster.kubernetes.cli.submit import submit_to_pods

        return submit_to_pods(run_dir, plan, self.site, detach=detach, as_json=as_json)


class SameJob(Place):
    """The scheduler of an earlier run, which is asked for the same again."""

    is_followed_here = False

    def __init__(self, old: RunDir, asked: "JobAgain") -> None:
        self._old, self._asked = old, asked

    def start(self, plan: "RunPlan", run_dir: RunDir, *, detach: bool) -> "Follow | None":
        asked = self._asked
        job = asked.renamed(run_dir)
        return submit(plan, run_dir, job, asked.dialect, num_more=asked.num_more, detach=detach)


class SamePods(SameJob):
    """The cluster of an earlier run in pods, on the snapshots of the one before where these have outlived its pods."""

    def settle(self, plan: "RunPlan") -> "RunPlan":
        from torchmuster.kubernetes.pods.again import find_before
        from torchmuster.kubernetes.pods.bring import check_code, settle_place
        from torchmuster.kubernetes.pods.check import look_at_claims
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
        self._before = find_before(self._old, order, self._asked.request)
        check_code(plan)
        job = self._asked.renamed(RunDir(os.path.join(runs_dir(), plan.run_id)))
        self._job = settle_place(replace(job, run_id=plan.run_id), job.num_nodes)
        warn(look_at_claims(self._job))
        return plan

    def start(self, plan: "RunPlan", run_dir: RunDir, *, detach: bool) -> "Follow | None":
        from torchmuster.kubernetes.cli.pods import say_what_goes
        from torchmuster.kubernetes.pods.bring import bring_run

        order = self._order
        job = bring_run(plan, run_dir, self._job, order.warn_s, order.start_limit_s, self._before)
        say_what_goes(job, detach=detach)
        return submit(plan, run_dir, job, self._asked.dialect, num_more=0, detach=detach)


def job_again(old: RunDir) -> tuple[Place, str | None]:
    """Return where a run that was a job is submitted again, and the folder of its snapshots where it is ours to link.

    Raises:
        UsageError: It was found on its cluster: its code, and what it asked for, are where it was submitted.
        MusterError: What it asked for is not in its record.
    """
    from torchmuster.kubernetes.node.order import CODE_FILE
    from torchmuster.kubernetes.pods.reach import is_submitted_here
    from torchmuster.launcher.jobs.jobs import read_request

    pods = os.path.join(old.path, "pods")
    has_code = os.path.exists(os.path.join(pods, CODE_FILE))
    if os.path.isdir(pods) and not is_submitted_here(old) and not has_code:
        raise UsageError(
            f"the run {short_id(os.path.basename(old.path))} was submitted on another machine",
            where=old.path,
            why="its code, and what it asked of the cluster, are there",
            fix="restart it there, or type its command here",
        )
    asked = read_request(old)
    if asked.request.brings:
        return SamePods(old, asked), None
    return SameJob(old, asked), old.snapshots


def submit(
    plan: "RunPlan",
    run_dir: RunDir,
    job: "JobRequest",
    dialect: "Dialect",
    *,
    num_more: int,
    detach: bool,
) -> "Follow | None":
    """Submit the job of a run, and the others of its chain; return what follows it unless `detach`."""
    from torchmuster.core.owner.create import quota_warnings, room_warnings
    from torchmuster.launcher.jobs.jobs import submit_chain, submit_job

    job_id = submit_job(job, run_dir, dialect, lambda text: warn([text]))
    # The job waits in its queue already, so a slow `quota` costs it nothing.
    warn((*room_warnings(run_dir.path), *quota_warnings(run_dir.path)))
    if num_more:
        taken, refusal = submit_chain(job, run_dir, dialect, num_more)
        if taken:
            warn([f"the run may continue in {', '.join(taken)}, one after the other"])
        if refusal is not None:
            what = f"only {len(taken)} of {num_more} further jobs were taken: {refusal.what}"
            warn([f"{what}; after them the run's own job tries to continue"])
    return None if detach else partial(_follow, plan, run_dir, dialect, job_id)


def _follow(
    plan: "RunPlan", run_dir: RunDir, dialect: "Dialect", job_id: str, voice: "TerminalVoice"
) -> "Result | None":
    from torchmuster.core.owner.account import how_to_go_on

    name = short_id(plan.run_id)
    voice.say(f"run {name} is job {job_id} of {dialect.name}; files in {run_dir.path}")

    def fix() -> str:
        return how_to_go_on(run_dir) or f"muster logs {name}"

    result = follow_job(plan, run_dir, dialect, job_id, voice, fix)
    if result is None:
        voice.say(f"the job continues: muster wait {name}")
    return result
