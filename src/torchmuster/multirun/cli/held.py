"""The place for runs that is a session: its servers fork the runs' agents."""

import shlex
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.here import own, show_workers
from torchmuster.core.cli.place import JOB_OPTIONS, Place
from torchmuster.core.files.layout import short_id

if TYPE_CHECKING:
    from torchmuster.core.cli.find import Where
    from torchmuster.core.cli.place import Follow
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.spec.launch import JobLimits, RunRequest
    from torchmuster.core.spec.problems import Problems

# Options of `muster run` that a session has decided, or that need agents to outlive the client.
_REFUSED = {
    "engine": "--on",
    "hosts": "--hosts",
    "hostfile": "--hostfile",
    "spares": "--spares",
    **JOB_OPTIONS,
    "warn": "--warn",
    "resubmit": "--resubmit",
    "ship_env": "--ship-env",
}


class SessionPlace(Place):
    """The nodes that a session holds, as a place for runs.

    Raises:
        NotFoundError: There is no such session.
    """

    kind = "held"

    def __init__(self, session: str) -> None:
        from torchmuster.core.node.kernel import visible_gpus
        from torchmuster.multirun.server.call import read_setup
        from torchmuster.multirun.views.sessions import find_session, plan_of

        self.session, self._held = session, find_session(session)
        self._setup, self._session_plan = (
            read_setup(self._held.run_dir),
            plan_of(self._held.run_dir),
        )
        self.name, self.is_here = self._session_plan.engine, self._session_plan.engine == "local"
        # Other nodes have their own GPUs and interpreter.
        sees_gpus = self.is_here or self._session_plan.job_id is not None
        self.gpus = tuple(visible_gpus()) if sees_gpus else ()

    def fill(self, request: "RunRequest") -> "RunRequest":
        return replace(
            request,
            nodes=request.nodes or str(self._setup.nodes),
            nproc_per_node=request.nproc_per_node or self._setup.workers,
            preload=tuple(dict.fromkeys([*self._setup.preload, *request.preload])),
        )

    def plan(
        self, request: "RunRequest", run_id: str, limits: "JobLimits", problems: "Problems"
    ) -> "RunPlan | None":
        from torchmuster.core.spec.launch import plan_run

        given = request if self.is_here else replace(request, python=None)
        plan = plan_run(given, run_id, self.gpus, problems, simulated=self.is_here)
        there = self._setup.nodes
        if plan is not None and plan.max_nodes > there:
            what = f"the session {self.session} has {there} node{'s' if there != 1 else ''}"
            problems.add(what, f"--nodes {request.nodes}", fix=f"--nodes {there}")
        for field, word in _REFUSED.items():
            if getattr(request, field) not in (None, 0, False):
                why = "the session has its nodes and interpreters already"
                problems.add(f"`{word}` can't be used in a session", word, why)
        if plan is None:
            return None
        if request.python is None or not self.is_here:
            python = self._session_plan.program.python
            if request.python is not None:
                python = tuple(shlex.split(request.python))
            plan = replace(plan, program=replace(plan.program, python=python))
        # The nodes were compared when the session began.
        plan = replace(plan, session=self.session, preflight="off")
        return plan if self.is_here else self._on_its_nodes(plan, request)

    def _on_its_nodes(self, plan: "RunPlan", request: "RunRequest") -> "RunPlan":
        from torchmuster.multirun.cli.session import run_node_setup

        given = request.python is not None
        return replace(
            plan,
            engine=self.name,
            job_id=self._session_plan.job_id,
            node_names=self._session_plan.node_names[: plan.max_nodes],
            node_setup=run_node_setup(plan.node_setup, self._session_plan, python_given=given),
        )

    def show(self, plan: "RunPlan") -> None:
        click.echo(f"# the session {self.session} forks the agents on its nodes")
        show_workers(plan)

    def start(self, plan: "RunPlan", run_dir: "RunDir", *, detach: bool) -> "Follow | None":
        from torchmuster.core.cli.ending import go_to_the_background
        from torchmuster.core.owner.detach import start_background_owner
        from torchmuster.core.owner.session import own_terminal
        from torchmuster.multirun.cli.session import say_when_it_ends
        from torchmuster.multirun.engine import SessionEngine

        if self.is_here:
            say_when_it_ends(self._held.run_dir, self.session)
        if detach:
            start_background_owner(run_dir)
            return None
        if not self.is_here:
            return partial(self._own_elsewhere, plan, run_dir)
        go_to_the_background(plan.run_id, run_dir)  # before the agents inherit where we write
        engine = SessionEngine(
            plan, run_dir, self.gpus, terminal=own_terminal(), session=self._held
        )
        return partial(_own, engine)

    def _own_elsewhere(
        self, plan: "RunPlan", run_dir: "RunDir", voice: "TerminalVoice"
    ) -> "Result":
        from torchmuster.core.files.layout import near
        from torchmuster.multirun.held import own_on_nodes

        def begun(plan: "RunPlan") -> None:
            names = ", ".join(plan.node_names)
            voice.say(f"run {short_id(plan.run_id)} on {names}; logs in {near(run_dir.logs)}")

        return own_on_nodes(plan, run_dir, self._held, voice, begun=begun)

    def sweep_request(self, request: "RunRequest", given: dict[str, Any]) -> "RunRequest":
        """Return the request for each member of a sweep in this session."""
        setup = self._setup
        return replace(
            request,
            nodes=str(setup.nodes),
            nproc_per_node=given["nproc_per_node"] or setup.workers or "1",
            preload=tuple(dict.fromkeys([*setup.preload, *given["preload"]])),
            python=given["python"] if self.is_here else None,
        )

    def sweep_run(self, run: "RunPlan", python: str | None) -> "RunPlan":
        """Return the plan for each sweep member here; `python` is the `--python` option."""
        run = replace(run, session=self.session, preflight="off")
        if python is None or not self.is_here:
            words = self._setup.python if python is None else tuple(shlex.split(python))
            run = replace(run, program=replace(run.program, python=words))
        if self.is_here:
            return run
        theirs = self._session_plan
        return replace(run, engine=self.name, job_id=theirs.job_id, node_names=theirs.node_names)


def find_held(where: "Where", problems: "Problems") -> SessionPlace | None:
    """Return the session that the options name, or None.

    Raises:
        NotFoundError: There is no such session.
    """
    return SessionPlace(where.session) if where.session is not None else None


def _own(engine: Any, voice: "TerminalVoice") -> "Result":
    from torchmuster.core.owner.create import note_failed_start
    from torchmuster.core.owner.session import EarlyStop

    engine.say, early = voice.explain, EarlyStop()
    with note_failed_start(engine.run_dir):
        engine.start_all()
    return own(engine, early, voice)
