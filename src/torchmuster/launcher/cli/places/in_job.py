"""Runs on the nodes of the job around this shell."""

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from torchmuster.core.cli.here import show_agents
from torchmuster.core.cli.place import Place, plan_elsewhere, too_few, warn
from torchmuster.core.files.layout import short_id
from torchmuster.core.model.plan import WARN_S
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Follow
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.spec.launch import JobLimits, RunRequest
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.engines.own_job import OwnJob


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
        from torchmuster.core.node.kernel import visible_gpus

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
        from torchmuster.core import proc

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
        from torchmuster.launcher.cli.ship import with_shipped

        plan, self._used = self._on_nodes(plan, self.from_here or self.job)
        plan, self._packed = with_shipped(plan, self._ship_env)
        return plan

    def start(self, plan: "RunPlan", run_dir: "RunDir", *, detach: bool) -> "Follow":
        from torchmuster.launcher.cli.ship import place_archive
        from torchmuster.launcher.engines.allocation import AllocationEngine
        from torchmuster.launcher.jobs.inside import make_deadline, note_the_end, own_run_inside

        del detach  # it was refused
        job = self._used
        place_archive(plan, self._packed)
        engine = AllocationEngine(plan, run_dir, job)

        def follow(voice: "TerminalVoice") -> "Result":
            where = f"inside job {self.job_id} of {self.name}"
            voice.say(f"run {short_id(plan.run_id)} {where}, on {', '.join(plan.node_names)}")
            if plan.preflight in ("long", "only"):
                note_the_end(job)
            return own_run_inside(engine, voice, make_deadline(job, warn_s=self._warn_s))

        return follow
