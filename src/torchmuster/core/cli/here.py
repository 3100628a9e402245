"""Runs whose agents are processes of this machine, or of the job that this shell is in."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.place import Place, plan_elsewhere, say_ignored_of_a_job, too_few, warn
from torchmuster.core.files.layout import short_id
from torchmuster.core.model.plan import WARN_S
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Follow, StartSweep
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.owner.session import EarlyStop
    from torchmuster.core.spec.launch import JobLimits, RunRequest
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.engines.own_job import OwnJob
    from torchmuster.multirun.door.messages import SessionSetup
    from torchmuster.workflow.owner.capacity import Machine
    from torchmuster.workflow.plan import WorkflowPlan


class ThisMachine(Place):
    """A place whose workflows run on this machine."""

    is_this_machine = True

    def show_workflow(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        from torchmuster.workflow.cli.workflow import show_plan

        show_plan(plan, machine, as_json=as_json)

    def submit_workflow(
        self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool, as_json: bool
    ) -> int:
        from torchmuster.workflow.cli.workflow import start_workflow

        return start_workflow(run_dir, plan, detach=detach, as_json=as_json)

    def sweep(self, given: dict[str, Any], problems: "Problems", start: "StartSweep") -> int:
        from torchmuster.launcher.facts.gpu import visible_gpus
        from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request

        gpus = visible_gpus()
        say_ignored_of_a_job(self, given)
        if given["per_gpu"] > 1 and not gpus:
            fix = "--slots is the number of members at a time"
            warn([f"ignored: --per-gpu: no GPU is visible here; {fix}"])
        return start(plan_sweep(given, sweep_request(given), gpus, problems))


class Here(ThisMachine):
    """Simulated nodes of this machine."""

    name = "local"
    takes_no_job_options = "this run is not a scheduler's job"
    takes_no_environment = "simulated nodes are this machine"

    is_simulated = True
    needs_commands = False

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        """Return this machine's, as its environment shows them."""
        from torchmuster.launcher.facts.gpu import visible_gpus

        return tuple(visible_gpus())

    def look(self) -> list[dict[str, Any]]:
        from torchmuster.launcher.cli.engine_rows import row

        return [row("this machine", ok=True, found=f"{os.cpu_count()} CPUs")]

    def fill(self, request: "RunRequest") -> "RunRequest":
        return replace(request, nodes=request.nodes or "1")

    def plan(
        self, request: "RunRequest", run_id: str, limits: "JobLimits", problems: "Problems"
    ) -> "RunPlan | None":
        from torchmuster.core.spec.launch import plan_run

        del limits
        return plan_run(request, run_id, self.gpus, problems)

    def show(self, plan: "RunPlan") -> None:
        show_agents(plan)

    def start(self, plan: "RunPlan", run_dir: "RunDir", *, detach: bool) -> "Follow | None":
        from torchmuster.core.cli.ending import go_to_the_background
        from torchmuster.core.engines.local import LocalEngine
        from torchmuster.core.owner.create import room_warnings
        from torchmuster.core.owner.detach import detach_supervisor
        from torchmuster.core.owner.session import EarlyStop, own_terminal

        warn(room_warnings(run_dir.path))
        if detach:
            detach_supervisor(run_dir)
            return None
        go_to_the_background(plan.run_id, run_dir)  # before the agents inherit where we write
        engine = LocalEngine(plan, run_dir, self.gpus, terminal=own_terminal())
        early = EarlyStop()
        engine.start_all()
        return partial(own, engine, early)

    def settle_session(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        del setup, given
        return plan

    def own_session(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        from torchmuster.core.owner.detach import detach_supervisor

        del plan, given
        detach_supervisor(run_dir)


def show_agents(plan: "RunPlan", job: "OwnJob | None" = None) -> None:
    """Print the commands of the agents that a run on this machine, or in the job around us, would start."""
    from torchmuster.core.engines.local import agent_argv
    from torchmuster.core.files.layout import RunDir, runs_dir
    from torchmuster.core.node.options import AgentOrder

    run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
    host = "127.0.0.1" if job is None else job.node_names[0]
    for place in range(plan.num_places if job is None else len(job.nodes)):
        # The port is the one that is free then.
        order = AgentOrder(run_dir=run_dir.path, place=place, head=(f"{host}:0",))
        argv = agent_argv(order)
        if job is not None and place > 0:
            argv = job.argv(job.nodes[place], argv)
        spare = "  # spare" if place >= plan.max_nodes else ""
        click.echo(f"$ {shlex.join(argv)}{spare}")
    show_workers(plan)


def show_workers(plan: "RunPlan") -> None:
    """Print what the workers of a run would be, at the end of a dry run."""
    words = shlex.join([*plan.program.python, *plan.program.display()])
    num_workers = sum(plan.num_workers(place) for place in range(plan.max_nodes))
    click.echo(f"\n# {num_workers} worker{'s' if num_workers != 1 else ''}: {words}")
    click.echo("nothing was started (--dry-run)", err=True)


def own(engine: Any, early: "EarlyStop", voice: "TerminalVoice") -> "Result":
    """Say what runs where, and own it to its end."""
    from torchmuster.core.owner.account import near
    from torchmuster.core.owner.session import note_on_session
    from torchmuster.core.owner.supervise import own_run  # while the agents start

    plan = engine.plan
    voice.say(f"run {short_id(plan.run_id)}: {_size(plan)}; logs in {near(engine.run_dir.logs)}")
    if (note := note_on_session()) is not None:
        voice.say(note)
    return own_run(engine, voice, forward_stdin=plan.stdin_rank is not None, early=early)


def _size(plan: "RunPlan") -> str:
    nodes = f"{plan.min_nodes} to {plan.max_nodes}" if plan.is_elastic else str(plan.max_nodes)
    total = sum(plan.num_workers(place) for place in range(plan.max_nodes))
    most = "up to " if plan.is_elastic else ""
    workers = f"{most}{total} worker{'s' if total != 1 else ''}"
    spares = f", {plan.spares} spare" if plan.spares else ""
    return f"{workers} on {nodes} node{'s' if plan.max_nodes != 1 else ''}{spares}"


class InJob(ThisMachine):
    """The nodes of the job that this shell is in."""

    takes_no_job_options = "the job exists already"
    job: "OwnJob"

    def __init__(self, job: "OwnJob") -> None:
        self.job, self.from_here = job, job.from_here()
        self.name, self.job_id = job.dialect.name, job.allocation.job_id
        self.most_nodes = len(job.nodes)
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
        from torchmuster.launcher.facts.gpu import visible_gpus

        self._warn_s = WARN_S if limits.warn_s is None else limits.warn_s
        self._ship_env = request.ship_env
        self._one_for_each_gpu = request.nproc_per_node in (None, "gpu")
        # The GPUs are those of one node; the others have their own.
        return plan_elsewhere(request, run_id, len(visible_gpus()), problems)

    def show(self, plan: "RunPlan") -> None:
        show_agents(*self._on_nodes(plan, self.from_here or self.job))

    def _on_nodes(self, plan: "RunPlan", job: "OwnJob") -> "tuple[RunPlan, OwnJob]":
        """Return the plan with the nodes of the job, and the job with those of the plan.

        Raises:
            UsageError: The job has fewer nodes than asked for.
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
        if self._one_for_each_gpu and len(set(gpus)) > 1:  # only those of this node were seen
            plan = replace(plan, workers_per_node=tuple(max(number, 1) for number in gpus))
        return plan, job

    def instead(self) -> int | None:
        """Type the same command on the first node of the job; its output comes here."""
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

    def check_workflow(self, plan: "WorkflowPlan", *, detach: bool) -> None:
        del plan, detach
        if self.from_here is None:
            raise UsageError(
                f"this is not a node of job {self.job_id}, and a workflow runs where it is started",
                where=f"job {self.job_id} of {self.name}",
                fix=f"start it on {self.job.nodes[0].name}, or here with --here",
            )

    def sweep(self, given: dict[str, Any], problems: "Problems", start: "StartSweep") -> int:
        if not given["dry_run"] and (code := self.instead()) is not None:
            return code
        if len(self.job.nodes) > 1:
            warn([f"members run on this node alone, of {len(self.job.nodes)} in job {self.job_id}"])
        return super().sweep(given, problems, start)

    def settle_session(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        from torchmuster.multirun.cli.session_places import with_setup

        del given
        job = self.from_here or self.job
        names = job.node_names[: plan.max_nodes]
        plan = replace(plan, node_names=names, engine=self.name, job_id=self.job_id)
        return with_setup(plan, setup)

    def own_session(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Start what conducts a run in a job, on its first node, in the background."""
        from torchmuster.core import proc
        from torchmuster.core.model.codec import to_words
        from torchmuster.core.model.plan import WARN_S
        from torchmuster.launcher.jobs.succession import ConductWords
        from torchmuster.multirun.cli.session_places import start_owner

        del given
        conduct = ConductWords(run_dir=run_dir.path, engine=plan.engine, warn=WARN_S)
        words = proc.node_program("conduct", *to_words(conduct))
        is_here = self.from_here is not None
        start_owner(words if is_here else self.job.argv(self.job.nodes[0], words), run_dir)
