"""`muster session`: hold nodes on which runs start with a fork; how that is done at each place for runs."""

import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core import proc
from torchmuster.core.cli import options
from torchmuster.core.cli.find import find_place, where_of_options
from torchmuster.core.cli.options import complete
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, last_lines, short_id
from torchmuster.core.model import codec, contract
from torchmuster.core.model.codec import to_arguments
from torchmuster.core.model.plan import (
    SESSION_PROGRAM,
    WARN_S,
    Limits,
    NodeSetup,
    Program,
    RunPlan,
    ScriptKind,
    StartMethod,
    Tee,
)
from torchmuster.core.model.text import in_minutes
from torchmuster.core.node.options import THREADS
from torchmuster.core.owner.create import choose_run_id, create_run_dir, write_owner
from torchmuster.core.owner.record import read_result
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import ChannelError, MusterError, NotFoundError, UsageError
from torchmuster.launcher.cli.sets import NearMissGroup
from torchmuster.launcher.ui.table import render_table
from torchmuster.multirun.server import messages
from torchmuster.multirun.server.call import SESSION_FILE, ask
from torchmuster.multirun.server.messages import SessionSetup
from torchmuster.multirun.views.sessions import (
    PREFIX,
    SessionView,
    check_name,
    find_session,
    lives,
    living_sessions,
    plan_of,
    view_session,
)

if TYPE_CHECKING:
    from torchmuster.launcher.jobs.batch import JobReportFilter
    from torchmuster.launcher.spec.site import Site

IDLE = "30m"
_ELSEWHERE = "muster session start --on slurm, --hosts a,b, or in a job: muster session start"
_MAX_RESTARTS = 20  # of its servers, over the whole session
_JOIN_S = 120.0  # for a lost node: without it no run begins, and the others are held for nothing
_LOOK_S = 0.05
_END_S = 40.0
_SOON_S = 600.0


def with_site(plan: "RunPlan", site: "Site", *, python_given: bool) -> "RunPlan":
    """Return the plan with the site's node setup; the servers learn which variables the site sets."""
    from torchmuster.launcher.engines.sites import with_node_setup

    of_site = dict(site.environment)
    own = tuple((name, text) for name, text in plan.node_setup.environment if name not in of_site)
    names = (contract.SITE_NAMES_VARIABLE, " ".join(of_site))
    plan = replace(plan, node_setup=replace(plan.node_setup, environment=(*own, names)))
    return with_node_setup(plan, site, python_given=python_given)


def run_node_setup(setup: "NodeSetup", of_session: "RunPlan", *, python_given: bool) -> "NodeSetup":
    """Return the node setup for a run in a session.

    The servers have already done the session's; a restart outside of the session does it again.
    """
    theirs = of_session.node_setup
    variables = dict(theirs.environment)
    of_site = variables.get(contract.SITE_NAMES_VARIABLE, "").split()
    exports = tuple(f"export {name}={shlex.quote(variables[name])}" for name in of_site)
    return replace(
        setup,
        lines=(*exports, *theirs.lines),
        scratch=theirs.scratch,
        origin=theirs.origin,
        python_follows=theirs.python_follows and not python_given,
    )


def with_session_setup(plan: "RunPlan", setup: "SessionSetup") -> "RunPlan":
    """Pass the setup to the servers by a variable: not every node sees the client's files."""
    text = json.dumps(codec.to_plain(setup))
    added = (*plan.node_setup.environment, (contract.SESSION_VARIABLE, text))
    return replace(plan, node_setup=replace(plan.node_setup, environment=added))


def start_owner(argv: list[str], run_dir: "RunDir", *, own_package: bool = False) -> None:
    """Start the owner of a session in the background."""
    log = os.open(run_dir.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    environment = proc.own_package_environment() if own_package else None
    try:
        child = proc.start(argv, env=environment, stdout=log, stderr=log)
    finally:
        os.close(log)
    write_owner(run_dir, child.pid)


def _look_at_job(run_dir: RunDir, name: str, news: "JobReportFilter") -> None:
    """Ask for the state of the job that a session waits for, and print it if it is news.

    Raises:
        MusterError: The job has ended.
    """
    from torchmuster.launcher.jobs.jobs import view_newest
    from torchmuster.launcher.model.job import describe_job

    view = view_newest(run_dir)
    if view is None:
        return
    text = describe_job(view)
    if news.should_report(text, view, time.monotonic()):
        click.echo(f"muster: {text}", err=True)
    if view.state.is_final:
        raise MusterError(
            f"the session {name} has ended before it was open",
            where=run_dir.job_log,
            why="\n".join(last_lines(run_dir.job_log, 12)) or view.reason,
            fix=f"muster session start --name {name}",
        )


def error_at_end(run_dir: "RunDir", name: str) -> MusterError:
    """Return the error for a session that ended before it was open, with its result's report."""
    what, result = f"the session {name} has ended before it was open", read_result(run_dir)
    report = result.report if result is not None else None
    has_logs = os.path.isdir(run_dir.logs) and any(
        entry.startswith("attempt-") for entry in os.listdir(run_dir.logs)
    )
    logs = f"muster logs {short_id(os.path.basename(run_dir.path))}" if has_logs else None
    if report is None:
        return MusterError(what, where=run_dir.path, fix=logs or f"cat {run_dir.supervisor_log}")
    at = f"at: {report.at}" if report.at is not None else ""
    why = "\n".join(filter(None, (report.error, at, *report.because)))
    return MusterError(what, where=run_dir.path, why=why, fix=report.hint or logs)


def say_when_it_ends(run_dir: "RunDir", name: str) -> None:
    """Warn if the session's time limit ends soon; its idle time starts again with the run."""
    try:
        state = ask(run_dir, 0, messages.AskServerState())
    except ChannelError:
        return  # the start of the run reports it
    if not isinstance(state, messages.SessionServerState):
        return
    left_s = state.ends_in_s
    if left_s is not None and left_s < _SOON_S and "time limit" in state.why_ends:
        click.echo(
            f"muster: the session {name} ends in {in_minutes(left_s)}: {state.why_ends}", err=True
        )


class SessionCell:
    """A session at a place for runs.

    Attributes:
        refusal: Why no session can be held here; empty if one can.
    """

    refusal = ""

    def __init__(self, place: Any) -> None:
        self.place = place

    @property
    def most_nodes(self) -> int | None:
        """The number of nodes it can hold; None for any number."""
        return None

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        """Return the session's plan for its nodes here; `given` are the command line's options."""
        raise NotImplementedError

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Start the session's owner."""
        raise NotImplementedError


class SessionHere(SessionCell):
    """A session on this machine."""

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        return plan

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        from torchmuster.core.owner.detach import start_background_owner

        start_background_owner(run_dir)


class SessionInJob(SessionCell):
    """A session on the nodes of the job around this shell."""

    @property
    def most_nodes(self) -> int:
        return len(self.place.job.nodes)

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        job = self.place.from_here or self.place.job
        names = job.node_names[: plan.max_nodes]
        plan = replace(plan, node_names=names, engine=self.place.name, job_id=self.place.job_id)
        return with_session_setup(plan, setup)

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Start `conduct`, which heads a run in a job, on the first node in the background."""
        from torchmuster.launcher.jobs.succession import ConductOptions

        conduct = ConductOptions(run_dir=run_dir.path, engine=plan.engine, warn=WARN_S)
        words = proc.node_program("conduct", *to_arguments(conduct))
        is_here, job = self.place.from_here is not None, self.place.job
        start_owner(words if is_here else job.argv(job.nodes[0], words), run_dir)


class SessionOnHosts(SessionCell):
    """A session on ssh hosts."""

    @property
    def most_nodes(self) -> int:
        return len(self.place.wishes.hosts)

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        names = tuple(host.name for host in self.place.wishes.hosts)[: plan.max_nodes]
        plan = replace(plan, engine=self.place.name, node_names=names)
        plan = with_site(plan, self.place.site, python_given=given["python"] is not None)
        if not setup.preload:  # without the user's own modules no code is copied
            plan = replace(plan, program=replace(plan.program, cwd="/"))
        return with_session_setup(plan, replace(setup, folder="", variables=()))

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Start `muster session hold` in the background: it keeps the connections."""
        words = [w for o in ("hosts", "hostfile") if given[o] for w in (f"--{o}", given[o])]
        argv = [sys.executable, "-m", "torchmuster", "session", "hold", run_dir.path]
        start_owner([*argv, "--on", self.place.name, *words], run_dir, own_package=True)


class SessionAsJob(SessionCell):
    """A session as a job of a scheduler."""

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        plan = replace(plan, engine=self.place.name)
        plan = with_site(plan, self.place.site, python_given=given["python"] is not None)
        return with_session_setup(plan, setup)

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Submit the job that owns the session.

        Raises:
            MusterError: The scheduler has refused the job.
        """
        from torchmuster.core.spec.launch import RunRequest, read_job_limits
        from torchmuster.launcher.jobs.jobs import make_job, note_refusal, submit_job

        named = ("queue", "account", "cpus_per_node", "gpus_per_node", "mem", "time_limit")
        request = RunRequest(script="session", **{name: given[name] for name in named})
        limits = read_job_limits(request, Problems())
        with note_refusal(run_dir):
            job = make_job(plan, run_dir, self.place.site, request, limits)
            submit_job(job, run_dir, self.place.dialect)


class NoSessionInPods(SessionCell):
    """Sessions in pods, which are not possible yet."""

    refusal = "pods of a session are not made yet"


# The commands.


@click.group(cls=NearMissGroup)
def session() -> None:
    """Hold nodes on which runs start at once: torch is imported already."""


@session.command()
@click.option(
    "--nodes",
    "--nnodes",
    "nodes",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Number of nodes; default 1, or all that a job or a list of hosts has.",
)
@click.option(
    "--nproc-per-node",
    metavar="N|gpu|cpu|auto",
    help="Workers on each node, for runs that don't say.",
)
@click.option(
    "--name", metavar="WORD", default="main", show_default=True, help="What `--session` calls it."
)
@click.option("--preload", multiple=True, metavar="MODULE", help="Import this too; repeatable.")
@click.option(
    "--idle",
    metavar="TIME|off",
    default=IDLE,
    show_default=True,
    help="End when no run has begun for so long.",
)
@click.option("--time", "time_limit", metavar="TIME", help="End so long after the start.")
@options.python
@options.on
@options.hosts
@options.hostfile
@options.queue
@options.account
@options.cpus_per_node
@options.gpus_per_node
@click.option("--mem", metavar="SIZE", help="Memory of each node, e.g. 64Gi.")
@options.here
def start(**given: Any) -> int:
    """Hold nodes, and import torch on them."""
    problems = Problems()
    run_dir = start_session(given, problems)
    name = given["name"]
    view = wait_until_open(run_dir, name)
    if view.state is not None and view.state.problem:
        click.echo(f"muster: nothing is imported ahead: {view.state.problem}", err=True)
    nodes = view.setup.nodes
    words = f"{nodes} node{'s' if nodes != 1 else ''} of {view.where}"
    click.echo(f"muster: session {name}: {words}; muster run --session {name} SCRIPT", err=True)
    return 0


@session.command(hidden=True)
@click.argument("run_dir")
@options.on
@options.hosts
@options.hostfile
def hold(run_dir: str, **given: Any) -> int:
    """Own a session on hosts of ssh: what `start` leaves in the background."""
    from torchmuster.launcher.cli.hosts import hold_session

    return hold_session(run_dir, given)


@session.command(hidden=True)
@click.argument("line", type=int)
def clients(line: int) -> int:
    """Fork clients of runs for `torchmuster.session`, at the other end of a socket."""
    import socket

    from torchmuster.multirun.cli.forks import serve

    return serve(socket.socket(fileno=line))


def start_session(given: dict[str, Any], problems: "Problems") -> "RunDir":
    """Start the run that is the session; return its run directory.

    Raises:
        ManyErrors: All problems of the command line.
    """
    from torchmuster.core.spec.launch import find_python, parse_workers

    name = given["name"]
    python = find_python(given["python"], problems)
    idle_s = None if given["idle"] == "off" else _duration(given["idle"], "--idle", problems)
    limit_s = None
    if given["time_limit"] is not None:
        limit_s = _duration(given["time_limit"], "--time", problems)
    place = find_session_place(given, problems)
    most = place.most_nodes
    num_nodes = given["nodes"] or most or 1
    if most is not None and num_nodes > most:
        problems.add(
            f"{num_nodes} nodes are asked for, there are {most}",
            f"--nodes {num_nodes}",
            fix=f"--nodes {most}",
        )
    workers: tuple[int, ...] | None = (1,)
    if given["nproc_per_node"] is not None:
        from torchmuster.core.node.kernel import visible_gpus

        workers = parse_workers(given["nproc_per_node"], visible_gpus(), problems)
    run_id = ""
    try:
        check_name(name)
        run_id = choose_run_id("", None, f"{PREFIX}{name}")
    except UsageError as error:
        problems.found.append(error)
    if problems.found or python is None or workers is None:
        problems.checked(None)
    assert python is not None
    assert workers is not None
    setup = SessionSetup(
        name=name,
        nodes=num_nodes,
        workers=given["nproc_per_node"],
        python=python,
        preload=given["preload"],
        idle_s=idle_s,
        limit_s=limit_s,
        folder=os.getcwd(),
        variables=tuple(os.environ),
        client=given.get("client"),
    )
    several = len(set(workers)) == 1 and workers[0] > 1 and THREADS not in os.environ
    program = Program(
        kind=ScriptKind.COMMAND,
        target=SESSION_PROGRAM,
        args=(),
        python=python,
        cwd=os.getcwd(),
        start=StartMethod.FRESH,
    )
    plan = RunPlan(
        run_id=run_id,
        program=program,
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        workers_per_node=(1,),
        limits=Limits(max_restarts=_MAX_RESTARTS, hang_s=0.0, join_timeout_s=_JOIN_S),
        node_names=tuple(f"n{number + 1}" for number in range(num_nodes)),
        tee=Tee.NONE,
        stdin_rank=None,
        node_setup=NodeSetup(environment=((THREADS, "1"),) if several else ()),
    )
    plan = place.settle(plan, setup, given)
    run_dir = create_run_dir(plan)
    atomic.write_json(os.path.join(run_dir.path, SESSION_FILE), codec.to_plain(setup), mode=0o600)
    place.own(plan, run_dir, given)
    return run_dir


def find_session_place(given: dict[str, Any], problems: "Problems") -> SessionCell:
    """Return the session cell of the place that the options name; note a problem if it has none."""
    place = find_place(where_of_options({**given, "session": None}), problems)
    at: SessionCell = place.cell("session")
    if at.refusal:
        what = f"a session can't be held on `{place.name}`"
        problems.add(what, f"--on {place.name}", at.refusal, _ELSEWHERE)
    return at


def _duration(text: str, option: str, problems: "Problems") -> float | None:
    from torchmuster.core.spec.problems import duration_fix, parse_timeout

    seconds = parse_timeout(text)
    if not seconds:
        fix = duration_fix(option, text, IDLE)
        problems.add(f"`{text}` is not a valid duration", option, fix=fix)
    return seconds


def wait_until_open(run_dir: RunDir, name: str) -> SessionView:
    """Wait until all servers of a session are open; return its view.

    Raises:
        MusterError: The session has ended before it was open.
    """
    news = None
    if os.path.isfile(run_dir.job):
        from torchmuster.launcher.jobs.batch import JobReportFilter

        news = JobReportFilter()
    while True:
        view = _view(run_dir)
        if view is not None and view.state is not None:
            return view
        if news is not None:
            _look_at_job(run_dir, name, news)
        if not lives(run_dir):
            raise error_at_end(run_dir, name)
        threading.Event().wait(_LOOK_S)


def _view(run_dir: "RunDir") -> "SessionView | None":
    try:
        return view_session(run_dir)
    except ChannelError:
        return None


@session.command(name="list")
@options.json("As JSON, with what the servers say.")
def list_sessions(*, as_json: bool) -> int:
    """List the sessions that live."""
    views = [view for one in living_sessions() if (view := _view(one)) is not None]
    if as_json:
        plain = [
            {
                "run_id": os.path.basename(view.run_dir.path),
                **codec.to_plain(view.setup),
                "where": view.where,
                "door": codec.to_plain(view.state) if view.state is not None else None,
            }
            for view in views
        ]
        click.echo(json.dumps(plain, indent=1))
        return 0
    if not views:
        click.echo("no session: muster session start", err=True)
        return 0
    rows = [_row(view) for view in views]
    click.echo(render_table(("NAME", "NODES", "RUNS", "STATE", "ENDS", "ON"), rows), nl=False)
    return 0


def _row(view: "SessionView") -> tuple[str, ...]:
    state = view.state
    if state is None:
        return (view.setup.name, str(view.setup.nodes), "", "opening", "", view.where)
    doing = short_id(state.run_id) if state.run_id else f"idle for {in_minutes(state.idle_s)}"
    ends = f"in {in_minutes(state.ends_in_s)}" if state.ends_in_s is not None else "never"
    num_runs = str(state.num_runs)
    return (view.setup.name, str(view.setup.nodes), num_runs, doing, ends, view.where)


@session.command()
@click.argument("name", shell_complete=complete("sessions"), required=False)
@click.option("--name", "same", metavar="WORD", help="The same, as `session start` takes it.")
def end(name: str | None, same: str | None) -> int:
    """End the session NAME, default `main`."""
    if name is not None and same is not None:
        raise UsageError("one session is ended at a time", where=f"--name {same}")
    name = name or same or "main"
    held = find_session(name)
    view = _view(held.run_dir)
    if view is not None and view.state is not None and _still_runs(view.state.run_id):
        raise UsageError(
            f"the run {view.state.run_id} is in the session {name}",
            fix=f"muster cancel {short_id(view.state.run_id)}",
        )
    end_session(held.run_dir, name)
    return 0


def _still_runs(run_id: str) -> bool:
    """Return whether a run in the session still runs.

    After it has a result, its agents may need a moment to leave.
    """
    from torchmuster.launcher.views.find import find_run

    if not run_id:
        return False
    try:
        return not find_run(run_id).state.is_final
    except NotFoundError:  # its directory is on another machine
        return True


def end_session(run_dir: "RunDir", name: str) -> None:
    """End a session and wait until it has ended.

    Raises:
        MusterError: The session has not ended in time.
    """
    from torchmuster.launcher.views.control import stop_and_wait
    from torchmuster.launcher.views.find import view_run

    try:
        if plan_of(run_dir).engine != "local":  # its servers end as on nodes that shut down
            stop_and_wait(view_run(run_dir), at_once=False, timeout_s=_END_S)
        else:
            ask(run_dir, 0, messages.EndSession(why="`muster session end`"))
    except ChannelError:
        stop_and_wait(view_run(run_dir), at_once=True, timeout_s=_END_S)
    deadline = time.monotonic() + _END_S
    while lives(run_dir):
        if time.monotonic() > deadline:
            run_id = os.path.basename(run_dir.path)
            raise MusterError(
                f"the session {name} has not ended yet", fix=f"muster cancel --now {run_id}"
            )
        threading.Event().wait(_LOOK_S)
