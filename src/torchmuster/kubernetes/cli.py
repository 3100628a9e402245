"""Pods as a place for runs, workflows and sweeps, and what `muster engines check` says of them."""

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.place import row, warn
from torchmuster.core.files.layout import RunDir, runs_dir, short_id
from torchmuster.errors import ManyErrors, MissingRecordError, MusterError, UsageError
from torchmuster.launcher.cli.jobs import JobPlace, ResubmittedJob, submit
from torchmuster.multirun.cli.places import StartSweep, SweepCell
from torchmuster.workflow.cli.places import AsJobs

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Follow
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.spec.launch import RunRequest
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.engines.base import ObjectDialect
    from torchmuster.launcher.model.job import JobRequest
    from torchmuster.launcher.spec.site import Site
    from torchmuster.multirun.sweep.plan import SweepPlan
    from torchmuster.workflow.owner.capacity import Machine
    from torchmuster.workflow.plan import WorkflowPlan
    from torchmuster.workflow.record import WorkflowResult

_MOST_PODS = 32  # at a time, without --slots
_NODES = 2  # of a check


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
    argv = dialect.submit_argv(job, "MANIFEST")
    click.echo(f"$ {shlex.join(argv)}", err=True)
    click.echo(dialect.script(job), nl=False)
    click.echo("nothing was submitted (--dry-run); the Secret is shown empty", err=True)
    return 0


def say_what_goes(job: "JobRequest", *, detach: bool) -> None:
    """Warn about what a detached run without a volume loses with its pods."""
    from torchmuster.kubernetes.engine.manifest import keeps_runs

    if detach and not keeps_runs(job):
        click.echo(
            "muster: logs and snapshots live in the pods and go with them: follow the run to its end to have them here,"
            " or keep runs on a volume (`claims` and `home` of the site)",
            err=True,
        )


def _submit_sweep(
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
    from torchmuster.kubernetes.engine.manifest import keeps_runs
    from torchmuster.kubernetes.pods.bring import check_code, lost_with_pods, shown_files
    from torchmuster.kubernetes.pods.check import check_claims
    from torchmuster.kubernetes.pods.members import array_of, note_request, submit_pods
    from torchmuster.launcher.jobs.jobs import note_refusal
    from torchmuster.multirun.cli.sweep_jobs import check_stop_rule, follow_unless
    from torchmuster.multirun.sweep.members import create_sweep_dir
    from torchmuster.multirun.sweep.metric import check_rule

    problems = Problems()
    is_of_runs = given["nodes"] > 1
    if not is_of_runs:
        check_stop_rule(given, problems)
    plan, job = _plan(given, site, problems)
    check_code(plan.run.program)
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
    most = max(1, _MOST_PODS // given["nodes"])
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

        check_code(plan.program)
        job = replace(super()._job(plan), python=python_of(self.site), run_id=plan.run_id)
        return settle_place(job, job.num_nodes)

    def show(self, plan: "RunPlan") -> None:
        from torchmuster.kubernetes.pods.bring import shown_files

        show_manifest(replace(self._job(plan), brings=shown_files()), self.dialect)

    def settle(self, plan: "RunPlan") -> "RunPlan":
        from torchmuster.kubernetes.pods.bring import lost_with_pods
        from torchmuster.kubernetes.pods.check import check_claims
        from torchmuster.kubernetes.pods.losses import warn_of_leaving_pods

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

        from torchmuster.kubernetes.pods.check import check_cluster

        found = check_cluster(dict(self.site.own_keys), self.site.queue_name)
        return [row(one.check, ok=one.ok, found=one.words) for one in found]

    def try_out(self, limit_s: float) -> tuple[list[dict[str, Any]], str]:

        note = (
            "nothing is left on the cluster; the run's files stay here: muster prune removes them"
        )
        return try_pods(self.site, limit_s), note


class SamePods(ResubmittedJob):
    """The cluster of an earlier run in pods; resumes from snapshots that have outlived the pods."""

    def settle(self, plan: "RunPlan") -> "RunPlan":
        from torchmuster.kubernetes.pods.bring import check_code, find_earlier_run, settle_place
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
        check_code(plan.program)
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
        """Refuse what pods can't do, before anything exists; settle the place of the site.

        Raises:
            ManyErrors: Pods can't run the workflow; lists every reason.
            EngineError: There is no cluster.
        """
        from torchmuster.kubernetes.pods.bring import lost_with_pods, settle_site
        from torchmuster.kubernetes.pods.bring_group import (
            find_unsupported,
            jobset_warning,
            makes_sets,
            plan_group,
            pod_kinds,
            warnings_of_group,
        )
        from torchmuster.kubernetes.pods.check import check_claims

        del detach
        site = self.place.site
        if found := find_unsupported(plan, site):
            raise ManyErrors(found)
        keys = dict(site.own_keys)
        warnings: dict[str, None] = {}
        for group in plan.groups:
            if group.name not in plan.reused:
                plan_group(plan, group, site)
                warnings |= dict.fromkeys(warnings_of_group(group, keys))
        kinds = {group.name: len(pod_kinds(group)) for group in plan.groups}
        several = {name: number for name, number in kinds.items() if number > 1}
        settled = settle_site(site, has_kinds=bool(several))
        if several and site.queue_name is not None and not makes_sets(settled):
            warnings[jobset_warning(several)] = None
        begin = (group for group in plan.groups if group.name not in plan.reused)
        jobs = [job for group in begin for job in plan_group(plan, group, settled).jobs]
        for job in sorted(jobs, key=lambda job: job.num_nodes)[-1:]:  # all have the same volumes
            warnings |= dict.fromkeys((*check_claims(job), *lost_with_pods(job)))
        for warning in warnings:
            click.echo(f"muster: {warning}", err=True)
        self.place.site = settled

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        """Print the manifests of all groups, for `kubectl create --dry-run=server -f -`."""
        from torchmuster.kubernetes.pods.bring import shown_files
        from torchmuster.kubernetes.pods.bring_group import plan_group

        del machine
        objects = []
        for group in plan.groups:
            pods = plan_group(plan, group, self.place.site)
            for number, job in enumerate(pods.jobs):
                shown = replace(job, brings=() if number else shown_files())
                objects += json.loads(self.place.dialect.script(shown))["items"]
            if not as_json:
                for task, nodes in pods.nodes.tasks.items():
                    click.echo(f"# {task}: {', '.join(node.name for node in nodes)}", err=True)
        click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1))
        click.echo("nothing was submitted (--dry-run); Secrets are shown empty", err=True)

    def submit(self, run_dir: RunDir, plan: "WorkflowPlan", *, detach: bool) -> int:
        """Run a prepared workflow; follow it to its end or leave it in the background."""
        from torchmuster.core.cli.ending import follow_run, leave_in_background
        from torchmuster.core.files import atomic
        from torchmuster.workflow.cli.places import say_end

        site = self.place.site
        atomic.write_json(run_dir.site, {"site": site.name, "keys": dict(site.own_keys)})
        if detach:
            return leave_in_background(run_dir, plan.run_id)

        def follow(voice: "TerminalVoice") -> "WorkflowResult":
            from torchmuster.kubernetes.pods.group import PodPlaces
            from torchmuster.workflow.owner.workflow import own_workflow

            logs = os.path.join(run_dir.path, "logs")
            voice.say(f"run {short_id(plan.run_id)} on {site.name}; logs in {logs}")
            return own_workflow(run_dir, voice, elsewhere=PodPlaces(run_dir, site, voice.say))

        return follow_run(plan, run_dir, follow, say=say_end)

    def settle_again(self, old: RunDir) -> None:
        from torchmuster.kubernetes.pods.end import remove_groups

        remove_groups(old)


class SweepInPods(SweepCell):
    """A sweep whose members are the pods of one Job."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        del problems
        return _submit_sweep(given, self.place.site, self.place.dialect, start)


def try_pods(site: "Site", timeout_s: float) -> list[dict[str, Any]]:
    """Run a probe in two pods as `muster run` does, and return what they found, as rows."""
    from torchmuster.core import proc
    from torchmuster.core.owner.create import new_run_id
    from torchmuster.core.owner.record import read_result
    from torchmuster.kubernetes.pods import probe
    from torchmuster.kubernetes.pods.bring import REACH_RULE, may_reach, place_of_keys

    run_dir = RunDir(os.path.join(runs_dir(), new_run_id("check")))
    own = dict(site.own_keys)
    folders = [line.split(":")[1] for line in own.get("claims", "").split("\n") if ":" in line]
    with tempfile.TemporaryDirectory(prefix="muster-check-") as folder:
        shutil.copy(probe.__file__, os.path.join(folder, "probe.py"))
        for path in _settings(site):
            shutil.copy(path, os.path.join(folder, "muster.toml"))
        words = ["run", "--on", site.name, "--nodes", str(_NODES), "--nproc-per-node", "1"]
        words += ["--max-restarts", "0", "--start", "fresh", "--tee", "none"]
        # The check needs no files, and a user without access to pods can't fetch them.
        can_reach = may_reach(dict(zip(("context", "namespace"), place_of_keys(own), strict=True)))
        words += [] if can_reach else ["--take-within", "0s"]
        words += ["--run-id", os.path.basename(run_dir.path), "probe.py", *folders]
        argv = [sys.executable, "-m", "torchmuster", *words]
        click.echo(f"muster: {_NODES} pods are tried, files in {run_dir.path}", err=True)
        said = proc.ask(["env", "-C", folder, *argv], b"", timeout_s)
        if said.status is None:
            name = os.path.basename(run_dir.path)
            proc.ask([sys.executable, "-m", "torchmuster", "cancel", name], b"", 60.0)
            said_last = f"not done after {timeout_s:g} s: cancelled{_last_of(said.stderr)}"
            return [row("test pods", ok=False, found=said_last)]
    result = read_result(run_dir)
    if result is not None and result.exit_code == MissingRecordError.exit_code and not can_reach:
        words_of = f"both ran to their end; what they found is not told without {REACH_RULE}"
        return [row("test pods", ok=None, found=words_of)]
    found = _findings(run_dir)
    if result is None or result.exit_code or len(found) < _NODES:
        return [row("test pods", ok=False, found=_why_not(result, said.stderr))]
    return pod_rows(found)


def _last_of(stderr: bytes) -> str:
    """Return the last line of output: what the pods or their queue wait for."""
    lines = stderr.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"; {last.removeprefix('muster: ')}" if last else ""


def _settings(site: "Site") -> list[str]:
    """Return the file of the site's section, unless it is the user's own, which is always found."""
    path = site.origin.partition(":")[0]
    return [path] if path.endswith("muster.toml") and os.path.isfile(path) else []


def _findings(run_dir: "RunDir") -> list[dict[str, Any]]:
    found = []
    for rank in range(_NODES):
        try:
            with open(run_dir.rank_log(0, rank)) as log:
                lines = [line for line in log if line.startswith("{")]
            found.append(json.loads(lines[-1]))
        except (OSError, ValueError, IndexError):
            continue
    return found


def _why_not(result: "Result | None", stderr: bytes) -> str:
    if result is not None and result.report is not None:
        hint = (result.report.hint,) if result.report.hint else ()
        return ". ".join([result.report.error, *result.report.because[:3], *hint])
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return ". ".join(lines[-4:]) or "the run left no result"


def pod_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the probes of all pods found, as rows."""
    first = found[0]
    nodes = ", ".join(f"{one['host']} on {one['node'] or 'a node'}" for one in found)
    rows = [row("test pods", ok=True, found=nodes)]
    python = f"{first['python']}: {first['python_version']}, {first['cpus']} CPUs"
    rows.append(row("python", ok=True, found=f"{python}, {first['processor']}"))
    if "torch" in first:
        rows.append(row("torch", ok=True, found=f"{first['torch']}, {first['gpus']} GPUs"))
    else:
        rows.append(row("torch", ok=False, found=str(first.get("torch_error"))))
    for one in found:
        for other, how in one["reached"].items():
            rows.append(row(f"{one['host']} to {other}", ok=how["ok"], found=how["words"]))
        for path, how in one["folders"].items():
            rows.append(row(f"{path} in {one['host']}", ok=how["ok"], found=how["words"]))
    return rows


def first_section() -> str:
    """Return the section of a first `muster.toml` for the clusters of kubectl's configuration."""
    from torchmuster.kubernetes.pods.bring import place_of_keys
    from torchmuster.kubernetes.pods.check import contexts, nodes_of, offers_of, queues_of

    lines = ["", "[engines.kube]", 'kind = "kubernetes"']
    try:
        names, current = contexts()
        context, namespace = place_of_keys({})
    except MusterError as error:
        return "\n".join([*lines, f"# no context could be read: {error.what}", ""])
    lines.append(f"context = {json.dumps(context)}")
    lines += [f"#   {name}" for name in names if name != current]
    lines.append(f"namespace = {json.dumps(namespace)}")
    lines.append('# image = "REGISTRY/NAME:TAG"   # with Python 3.11 or later, and your torch')
    try:
        queues = queues_of(context, namespace)
        lines.append(f"queue = {json.dumps(queues[0])}" if len(queues) == 1 else '# queue = "NAME"')
        lines += [f"#   {name}" for name in queues]
    except MusterError:
        lines.append("# queue: no LocalQueue of Kueue could be listed")
    try:
        nodes = nodes_of(context)
        for name, count in sorted(offers_of(nodes).items()):
            lines.append(f"# gpu_resource = {json.dumps(name)}   # {count} on {len(nodes)} nodes")
    except MusterError:
        lines.append('# gpu_resource = "nvidia.com/gpu"   # nodes could not be listed')
    lines += ["# gpus_per_node = 8", '# memory = "64Gi"', '# shm = "16Gi"']
    lines.append(
        '# claims = ["NAME:/home"]   # kubectl get pvc; with home = "/home/muster" runs outlive their pods'
    )
    return "\n".join(lines) + "\n"
