"""Runs as jobs of a scheduler that sees our files, and on the nodes of the job around us."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core import plugs, proc
from torchmuster.core.cli.here import show_agents
from torchmuster.core.cli.place import Place, plan_elsewhere, too_few, warn
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, last_lines, runs_dir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.plan import WARN_S
from torchmuster.core.node.kernel import visible_gpus
from torchmuster.core.owner.create import LOW_FREE_BYTES, LOW_INODES, nearest_folder, room_warnings
from torchmuster.errors import MusterError, UsageError
from torchmuster.launcher.cli.ship import link_parcel, with_shipped
from torchmuster.launcher.cli.sites import nodes_of_site
from torchmuster.launcher.engines.sites import with_node_setup
from torchmuster.launcher.model.job import JobState
from torchmuster.launcher.views.account import how_to_go_on
from torchmuster.launcher.views.elsewhere import is_elsewhere

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Follow
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.spec.launch import JobLimits, RunRequest
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.engines.allocation import OwnJob
    from torchmuster.launcher.engines.base import Dialect
    from torchmuster.launcher.jobs.jobs import RecordedRequest
    from torchmuster.launcher.model.job import JobRequest
    from torchmuster.launcher.spec.site import Site


class JobPlace(Place):
    """A job of a scheduler, which owns its run; Ctrl-C leaves it alone, a second one cancels it."""

    kind = "job"
    is_followed_here = False
    has_own_disks = False  # True where only the nodes see what they write
    _request: "RunRequest"
    _limits: "JobLimits"

    def __init__(self, site: "Site", dialect: "Dialect") -> None:
        self.name, self.site, self.dialect = site.name, site, dialect

    def fill(self, request: "RunRequest") -> "RunRequest":

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
        """Adapt the plan to the nodes that the site describes."""
        return with_node_setup(plan, self.site, python_given=self._request.python is not None)

    def _job(self, plan: "RunPlan") -> "JobRequest":

        run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
        from torchmuster.launcher.jobs.jobs import make_job

        return make_job(plan, run_dir, self.site, self._request, self._limits)

    @property
    def _num_more(self) -> int:
        """How many further jobs the run's chain has from its start."""
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

        plan, self._packed = with_shipped(plan, self._request.ship_env)
        return plan

    def start(self, plan: "RunPlan", run_dir: RunDir, *, detach: bool) -> "Follow | None":

        link_parcel(plan, self._packed)
        job = self._job(plan)
        warn(self.dialect.unmapped(job))
        return submit(plan, run_dir, job, self.dialect, num_more=self._num_more, detach=detach)

    def look(self) -> list[dict[str, Any]]:

        from torchmuster.launcher.cli.engines import queue_rows

        return queue_rows(self.site)

    def try_out(self, limit_s: float) -> tuple[list[dict[str, Any]], str]:

        from torchmuster.launcher.cli.engine_job import try_job

        note = "the test job's files stay: muster prune removes them"
        return try_job(self, limit_s), note


class ResubmittedJob(Place):
    """The scheduler of an earlier run, for the same request again."""

    is_followed_here = False

    def __init__(self, old: RunDir, asked: "RecordedRequest") -> None:
        self._old, self._asked = old, asked

    def start(self, plan: "RunPlan", run_dir: RunDir, *, detach: bool) -> "Follow | None":
        asked = self._asked
        job = asked.renamed(run_dir)
        return submit(plan, run_dir, job, asked.dialect, num_more=asked.num_more, detach=detach)


def job_restart_place(old: RunDir) -> tuple[Place, str | None]:
    """Return where to resubmit a run that was a job, and its folder of snapshots if linkable.

    Raises:
        MusterError: Its request is not in its record, or is on another machine.
    """
    if is_elsewhere(old):
        again: Callable[[RunDir], Place] | None = plugs.find("job_places", "again")
        if again is None:
            raise MusterError("runs in pods can't be started again here", where=old.path)
        return again(old), None
    from torchmuster.launcher.jobs.jobs import read_request

    return ResubmittedJob(old, read_request(old)), old.snapshots


def submit(
    plan: "RunPlan",
    run_dir: RunDir,
    job: "JobRequest",
    dialect: "Dialect",
    *,
    num_more: int,
    detach: bool,
) -> "Follow | None":
    """Submit the job of a run and its chain; return the follower unless `detach`."""
    from torchmuster.launcher.jobs.jobs import submit_chain, submit_job

    job_id = submit_job(job, run_dir, dialect, lambda text: warn([text]))
    # The job is queued already, so a slow `quota` does not delay it.
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
    """Follow a job to its end and return the result; None if it continues without us.

    Raises:
        MusterError: It ended without a result.
    """
    import asyncio

    from torchmuster.launcher.jobs.batch import JobFollower
    from torchmuster.launcher.jobs.jobs import cancelled_before_start

    name = short_id(plan.run_id)
    voice.say(f"run {name} is job {job_id} of {dialect.name}; files in {run_dir.path}")
    follower = JobFollower(plan, run_dir, dialect, job_id, voice)
    try:
        result = asyncio.run(follower.follow())
    finally:
        follower.close()
    view = follower.view
    is_cancelled = view is not None and view.state is JobState.CANCELLED
    if result is None and is_cancelled and os.path.exists(run_dir.cancelled):
        result = cancelled_before_start(run_dir)  # it was still queued: there is no head
        atomic.write_json(run_dir.result, codec.to_plain(result))
    if result is None and view is not None and view.state.is_final:
        output = "\n".join(last_lines(run_dir.job_log, 12))
        silent = f"it has written nothing: its node may not see {run_dir.path}"
        checks = f"muster engines check {plan.engine}  # says what the nodes see"
        raise MusterError(
            f"job {job_id} ended without a result: {view.state.value}",
            where=run_dir.job_log,
            why=output or "\n".join(word for word in (view.reason, silent) if word),
            fix=(how_to_go_on(run_dir) or f"muster logs {name}") if output else checks,
        )
    if result is None:
        voice.say(f"the job continues: muster wait {name}")
    return result


class InsideJobPlace(Place):
    """The nodes of the job around this shell."""

    kind = "in-job"
    takes_no_job_options = "the job exists already"
    job: "OwnJob"

    def __init__(self, job: "OwnJob") -> None:
        self.job, self.from_here = job, job.from_here()
        self.name, self.job_id = job.dialect.name, job.allocation.job_id
        self._warn_s = WARN_S
        self._ship_env: str | None = None
        self._one_for_each_gpu = False

    def fill(self, request: "RunRequest") -> "RunRequest":
        nodes = request.nodes or str(max(len(self.job.nodes) - request.spares, 1))
        return replace(request, nodes=nodes)

    def check_detach(self, words: str, problems: "Problems") -> None:
        del words
        problems.add(
            "`--detach` can't be used inside a job",
            "--detach",
            "the run lives in this step of the job and ends with it",
            "leave it out and end the line with ` &`; a job script then needs `wait` as its last line",
        )

    def plan(
        self, request: "RunRequest", run_id: str, limits: "JobLimits", problems: "Problems"
    ) -> "RunPlan | None":

        self._warn_s = WARN_S if limits.warn_s is None else limits.warn_s
        self._ship_env = request.ship_env
        self._one_for_each_gpu = request.nproc_per_node in (None, "gpu")
        # These are this node's GPUs; the others have their own.
        return plan_elsewhere(request, run_id, len(visible_gpus()), problems)

    def show(self, plan: "RunPlan") -> None:
        show_agents(*self._on_nodes(plan, self.from_here or self.job))

    def _on_nodes(self, plan: "RunPlan", job: "OwnJob") -> "tuple[RunPlan, OwnJob]":
        """Return the plan with the job's nodes, and the job with only the plan's nodes.

        Raises:
            UsageError: The job has fewer nodes than requested.
        """
        if (short := too_few(plan, len(job.nodes))) is not None:
            asked, fix = short
            raise UsageError(
                f"{asked} are asked for, the job has {len(job.nodes)}",
                where=f"job {self.job_id} of {self.name}",
                fix=f"{fix}, or --here for simulated nodes on this one",
            )
        job = job.with_nodes(job.nodes[: plan.num_places]).with_launcher()
        plan = replace(plan, node_names=job.node_names, engine=self.name, job_id=self.job_id)
        gpus = [node.gpus or 0 for node in job.nodes]
        if self._one_for_each_gpu and len(set(gpus)) > 1:  # the plan counted only this node's
            plan = replace(plan, workers_per_node=tuple(max(number, 1) for number in gpus))
        return plan, job

    def instead(self) -> int | None:
        """Outside the job's nodes, run the same command on its first node, with its output here."""
        if self.from_here is not None:
            return None
        node = self.job.nodes[0]
        warn([f"this is not a node of job {self.job_id}: run on {node.name}"])
        command = (sys.executable, "-m", "torchmuster", *sys.argv[1:])
        child = proc.start(self.job.argv(node, command), cwd=os.getcwd())
        while True:
            try:
                status = child.wait(3600.0)
            except KeyboardInterrupt:
                child.send_signal(2)
                continue
            if status is not None:
                return 128 - status if status < 0 else status

    def settle(self, plan: "RunPlan") -> "RunPlan":

        plan, self._used = self._on_nodes(plan, self.from_here or self.job)
        plan, self._packed = with_shipped(plan, self._ship_env)
        return plan

    def start(self, plan: "RunPlan", run_dir: "RunDir", *, detach: bool) -> "Follow":

        from torchmuster.launcher.engines.allocation import AllocationEngine
        from torchmuster.launcher.jobs.conduct import make_deadline, note_the_end, own_run_inside

        del detach  # it was refused
        job = self._used
        link_parcel(plan, self._packed)
        engine = AllocationEngine(plan, run_dir, job)

        def follow(voice: "TerminalVoice") -> "Result":
            where = f"inside job {self.job_id} of {self.name}"
            voice.say(f"run {short_id(plan.run_id)} {where}, on {', '.join(plan.node_names)}")
            if plan.preflight in ("long", "only"):
                note_the_end(job)
            return own_run_inside(engine, voice, make_deadline(job, warn_s=self._warn_s))

        return follow


_QUOTA_TIMEOUT_S = 1.0
_KIB = 1024
Ask = Callable[[Sequence[str]], proc.CommandOutput]


def quota_warnings(path: str, asking: Ask | None = None) -> list[str]:
    """Return warnings where the user's quota is nearly used up; abandon a hung tool after 1 s."""
    import shutil

    folder = nearest_folder(os.path.realpath(path))
    found = []
    for argv in (
        ["quota", "-w", "-p"],
        ["lfs", "quota", "-q", "-u", str(os.getuid()), folder],
    ):
        if not shutil.which(argv[0]):
            continue
        try:
            said = asking(argv) if asking is not None else proc.ask(argv, b"", _QUOTA_TIMEOUT_S)
        except MusterError:
            continue
        for disk, left, unit in parse_quota(said.stdout.decode(errors="replace")):
            if unit == "KiB" and left * _KIB < LOW_FREE_BYTES:
                size = f"{max(0, left) // _KIB} MiB"
                found.append(f"your quota on {disk} leaves {size} (`{' '.join(argv[:2])}`)")
            if unit == "files" and left < LOW_INODES:
                found.append(f"your quota on {disk} leaves {max(0, left)} files")
    return found


def parse_quota(text: str) -> list[tuple[str, int, str]]:
    """Return (file system, amount left, `KiB` or `files`) per limit of `quota` or `lfs quota -q`.

    Both print: file system, blocks of 1 KiB, soft limit, hard limit, grace, files, soft limit, hard
    limit, grace. The grace may be missing; a `*` marks what is over its limit.
    """
    found: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        words = line.split()
        is_disk = words and (words[0].startswith(("/", "[")) or ":" in words[0])
        if len(words) < 7 or not is_disk:
            continue
        numbers = [int(w.rstrip("*")) for w in words[1:] if re.fullmatch(r"\d+\*?", w)]
        if len(numbers) == 8:  # `-p` writes the grace times as numbers too
            numbers = [*numbers[:3], *numbers[4:7]]
        if len(numbers) != 6:
            continue
        for (used, soft, hard), unit in ((numbers[:3], "KiB"), (numbers[3:], "files")):
            limit = soft or hard
            if limit:
                found.append((words[0], limit - used, unit))
    return found
