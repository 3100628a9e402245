"""`muster session`: hold nodes on which runs start with a fork."""

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.options import complete
from torchmuster.core.cli.spelling import NearMissGroup
from torchmuster.errors import ChannelError, MusterError, NotFoundError, UsageError

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.spec.problems import Problems
    from torchmuster.multirun.cli.places import SessionCell
    from torchmuster.multirun.views.sessions import SessionView

IDLE = "30m"
_ELSEWHERE = "muster session start --on slurm, --hosts a,b, or in a job: muster session start"
_MAX_RESTARTS = 20  # of its servers, over the whole session
_JOIN_S = 120.0  # for a lost node: without it no run begins, and the others are held for nothing
_LOOK_S = 0.05
_END_S = 40.0


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
    from torchmuster.core.spec.problems import Problems

    problems = Problems()
    run_dir = start_session(given, problems)
    name = given["name"]
    wait_until_open(run_dir, name)
    view = _view(run_dir)
    if view is not None and view.state is not None and view.state.problem:
        click.echo(f"muster: nothing is imported ahead: {view.state.problem}", err=True)
    where = view.where if view is not None else "this machine"
    nodes = view.setup.nodes if view is not None else 1
    words = f"{nodes} node{'s' if nodes != 1 else ''} of {where}"
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
    from torchmuster.core.files import atomic
    from torchmuster.core.model import codec
    from torchmuster.core.model.plan import (
        SESSION_PROGRAM,
        Limits,
        NodeSetup,
        Program,
        RunPlan,
        ScriptKind,
        StartMethod,
        Tee,
    )
    from torchmuster.core.node.options import THREADS
    from torchmuster.core.owner.create import choose_run_id, create_run_dir
    from torchmuster.core.spec.launch import find_python, parse_workers
    from torchmuster.multirun.server.call import SESSION_FILE
    from torchmuster.multirun.server.messages import SessionSetup
    from torchmuster.multirun.views.sessions import PREFIX, check_name

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


def find_session_place(given: dict[str, Any], problems: "Problems") -> "SessionCell":
    """Return the session cell of the place that the options name; note a problem if it has none."""
    from torchmuster.core.cli.find import find_place, where_of_options

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


def wait_until_open(run_dir: "RunDir", name: str) -> None:
    """Wait until all servers of a session are open.

    Raises:
        MusterError: The session has ended before it was open.
    """
    from torchmuster.multirun.cli.places import JobWait, error_at_end
    from torchmuster.multirun.views.sessions import lives

    wait = JobWait(run_dir) if os.path.isfile(run_dir.job) else None
    while True:
        view = _view(run_dir)
        if view is not None and view.state is not None:
            return
        if wait is not None:
            wait.look(name)
        if not lives(run_dir):
            raise error_at_end(run_dir, name)
        threading.Event().wait(_LOOK_S)


def _view(run_dir: "RunDir") -> "SessionView | None":
    from torchmuster.multirun.views.sessions import view_session

    try:
        return view_session(run_dir)
    except ChannelError:
        return None


@session.command(name="list")
@options.json("As JSON, with what the servers say.")
def list_sessions(*, as_json: bool) -> int:
    """List the sessions that live."""
    from torchmuster.core.model import codec
    from torchmuster.launcher.ui.table import render_table
    from torchmuster.multirun.views.sessions import living_sessions

    views = [view for one in living_sessions() if (view := _view(one)) is not None]
    if as_json:
        plain = [
            {
                "run_id": view.run_id,
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
    from torchmuster.core.files.layout import short_id
    from torchmuster.core.model.text import in_minutes

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
    from torchmuster.core.files.layout import short_id
    from torchmuster.multirun.views.sessions import find_session

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
    from torchmuster.multirun.server import messages
    from torchmuster.multirun.server.call import ask
    from torchmuster.multirun.views.sessions import lives, plan_of

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
