"""The place for runs whose agents are processes on this machine."""

import os
import shlex
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.place import Place, row, warn
from torchmuster.core.files.layout import short_id

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Follow
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.owner.session import EarlyStop
    from torchmuster.core.spec.launch import JobLimits, RunRequest
    from torchmuster.core.spec.problems import Problems


class Here(Place):
    """This machine, with simulated nodes."""

    kind = "here"
    name = "local"
    takes_no_job_options = "this run is not a scheduler's job"
    takes_no_environment = "simulated nodes are this machine"

    is_simulated = True
    needs_commands = False

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        """Return this machine's GPUs, as its environment shows them."""
        from torchmuster.core.node.kernel import visible_gpus

        return tuple(visible_gpus())

    def look(self) -> list[dict[str, Any]]:
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
        from torchmuster.core.owner.detach import start_background_owner
        from torchmuster.core.owner.session import EarlyStop, own_terminal

        warn(room_warnings(run_dir.path))
        if detach:
            start_background_owner(run_dir)
            return None
        go_to_the_background(plan.run_id, run_dir)  # before the agents inherit our streams
        engine = LocalEngine(plan, run_dir, self.gpus, terminal=own_terminal())
        early = EarlyStop()
        engine.start_all()
        return partial(own, engine, early)


def show_agents(plan: "RunPlan", job: Any = None) -> None:
    """Print the agent commands that a run on this machine, or in the job around us, would start."""
    from torchmuster.core.engines.local import agent_argv
    from torchmuster.core.files.layout import RunDir, runs_dir
    from torchmuster.core.node.options import AgentOrder

    run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
    host = "127.0.0.1" if job is None else job.node_names[0]
    for place in range(plan.num_places if job is None else len(job.nodes)):
        # The actual port is chosen at the start.
        order = AgentOrder(run_dir=run_dir.path, place=place, head=(f"{host}:0",))
        argv = agent_argv(order)
        if job is not None and place > 0:
            argv = job.argv(job.nodes[place], argv)
        spare = "  # spare" if place >= plan.max_nodes else ""
        click.echo(f"$ {shlex.join(argv)}{spare}")
    show_workers(plan)


def show_workers(plan: "RunPlan") -> None:
    """Print the workers of a run, at the end of a dry run."""
    words = shlex.join([*plan.program.python, *plan.program.display()])
    num_workers = sum(plan.num_workers(place) for place in range(plan.max_nodes))
    click.echo(f"\n# {num_workers} worker{'s' if num_workers != 1 else ''}: {words}")
    click.echo("nothing was started (--dry-run)", err=True)


def own(engine: Any, early: "EarlyStop", voice: "TerminalVoice") -> "Result":
    """Announce the run and own it to its end."""
    from torchmuster.core.files.layout import near
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
