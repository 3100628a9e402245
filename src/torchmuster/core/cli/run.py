"""`muster run`."""

import os
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core import plugs
from torchmuster.core.cli import ending, options
from torchmuster.core.cli.ending import answers, is_terminal, whole_word
from torchmuster.core.cli.options import complete, complete_files
from torchmuster.core.cli.place import JOB_OPTIONS
from torchmuster.core.model.plan import GRACE_S, MAX_RESTARTS
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    import types

    from torchmuster.core.spec.launch import LaunchOrder, RunRequest
    from torchmuster.core.spec.problems import Problems


def choose_id(request: "RunRequest", problems: "Problems") -> str:
    """Return the id of the run; note a problem."""
    from torchmuster.core.owner.create import choose_run_id

    try:
        return choose_run_id(request.script, request.run_id, request.name)
    except UsageError as error:
        problems.found.append(error)
        return ""


def check_debugger(request: "RunRequest", problems: "Problems") -> None:
    """Refuse a debugger that this terminal could not reach."""
    for option, is_on in (("--debugpy", request.debugpy is not None), ("--pdb", request.pdb)):
        if is_on and request.detach:
            what = f"{option} can't be combined with --detach"
            why = "its connection goes through the command that follows the run"
            problems.add(what, "--detach", why, "leave it out")
    for other, value in (("--debugpy", request.debugpy), ("--stdin", request.stdin_rank)):
        if request.pdb and value is not None:
            what = f"--pdb can't be combined with {other}"
            problems.add(what, other, fix="leave one of them out")
    if request.pdb and not request.detach and not (is_terminal(0) and is_terminal(1)):
        why = "standard input or output of this command is no terminal"
        fix = "muster run --debugpy, for an editor; `muster logs RUN` has the traceback"
        problems.add("--pdb needs a terminal", "--pdb", why, fix)


_SEPARATED = "torchmuster.separated"  # `--` stands before the script: what follows is its own
_SECTIONS = {
    "Workers": (
        *("nodes", "spares", "nproc_per_node", "module", "python", "ship_env", "set_env", "start"),
        *("preload", "stage", "before"),
    ),
    "Where": ("engine", "session", "here", "hosts", "hostfile", "detach", "dry_run"),
    "Job": (
        *("time_limit", "queue", "account", "cpus_per_node", "gpus_per_node", "mem"),
        *("take_within", "warn", "resubmit"),
    ),
    "Failures": (
        *("max_restarts", "restart_policy", "grace", "join_timeout", "last_call", "grow"),
        *("hang_timeout", "verify_every"),
    ),
    "Name and output": (
        *("name", "run_id", "tee", "progress", "answer", "notify", "stdin_rank", "metrics_port"),
    ),
    "Debugging": ("debugpy", "pdb", "inline", "debug", "no_preflight"),
}


class RunCommand(click.Command):
    """A command that lists its options in sections; options without a section come last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let `--debugpy` consume the next word only if it is a number, and `--ship-env` never."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        with_value = {word for p in options if not p.is_flag for word in p.opts}
        here = 0
        while here < len(args) and args[here].startswith("-") and args[here] != "--":
            is_last = here + 1 == len(args)
            if args[here] == "--debugpy" and (is_last or not args[here + 1].isdecimal()):
                args = [*args[:here], "--debugpy=0", *args[here + 1 :]]
            args = [*args[:here], *whole_word(args[here : here + 1]), *args[here + 1 :]]
            if args[here] == "--ship-env":  # it never consumes the next word
                args = [*args[:here], "--ship-env=", *args[here + 1 :]]
            here += 2 if args[here].replace("_", "-") in with_value else 1
        ctx.meta[_SEPARATED] = args[here : here + 1] == ["--"]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their sections."""
        records = {
            str(param.name): record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            if (record := param.get_help_record(ctx)) is not None
        }
        for title, names in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names if name in records])
        if records:
            with formatter.section("Other"):
                formatter.write_dl(list(records.values()))


@click.command(
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option(
    "--nodes",
    "--nnodes",
    "nodes",
    metavar="N|MIN:MAX",
    help="Number of nodes; default 1, inside a job all of its nodes.",
)
@click.option(
    "--spares",
    type=click.IntRange(0, 1000),
    metavar="K",
    help="Nodes more than --nodes, which hold torch loaded and replace lost ones at once; default 0.",
)
@click.option(
    "--nproc-per-node",
    metavar="N[,N...]|gpu|cpu|auto",
    help="Workers on each node; default one for each GPU, or one.",
)
@click.option(
    "--max-restarts",
    type=int,
    metavar="K",
    help=f"Restarts after failures; default {MAX_RESTARTS}.",
)
@click.option(
    "--restart-policy",
    type=click.Choice(["evidence", "count"]),
    help="Retry unless it would fail in the same way, or always.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with `python -m`.")
@options.on
@click.option(
    "--name", metavar="WORD", help="Start of the run's id and its job's name; default SCRIPT's."
)
@click.option("--run-id", metavar="NAME", help="The whole id of the run, and its folder's name.")
@click.option(
    "--tee",
    type=click.Choice(["0", "all", "none"]),
    help="Ranks that the terminal shows; default rank 0.",
)
@ending.option
@options.detach
@click.option("--grow", is_flag=True, help="Restart the attempt when a new node joins, to use it.")
@click.option(
    "--start",
    type=click.Choice(["auto", "fork", "fresh"]),
    help="Fork workers from a process with torch, or start fresh interpreters.",
)
@click.option(
    "--env",
    "--set-env",
    "set_env",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a variable in every worker; repeatable.",
)
@click.option("--preload", multiple=True, metavar="MODULE", help="Import this before forking too.")
@options.python
@click.option(
    "--ship-env",
    metavar="[=PATH]",
    help="Send this environment to hosts of ssh, or to the nodes of a job; default the active one.",
)
@click.option(
    "--stage",
    multiple=True,
    metavar="SRC[:DST]",
    help="Copy or unpack this into every node's MUSTER_SCRATCH.",
)
@click.option("--before", multiple=True, metavar="CMD", help="Run this once on every node first.")
@click.option(
    "--stdin", "stdin_rank", type=int, metavar="RANK", help="Rank that gets standard input."
)
@click.option("--grace", metavar="TIME", help=f"From a stop to SIGKILL; default {GRACE_S:g}s.")
@click.option("--join-timeout", metavar="TIME", help="Wait for nodes; default 10m.")
@click.option(
    "--last-call",
    metavar="TIME",
    help="How long to wait for more nodes than MIN; default 2s.",
)
@click.option("--time", "time_limit", metavar="TIME", help="Time limit of the job: 2h, 1:30:00.")
@options.queue
@options.account
@options.cpus_per_node
@options.gpus_per_node
@click.option("--mem", metavar="SIZE", help="Memory of each node, e.g. 64Gi.")
@click.option(
    "--take-within",
    metavar="TIME",
    help="How long the first pod waits, after the end, for a client that takes its files; default 15m.",
)
@click.option("--warn", metavar="TIME", help="How long before the time limit to send SIGUSR1.")
@click.option(
    "--resubmit",
    type=click.IntRange(0, 1000),
    metavar="K",
    help="How many more jobs may continue it; default 0.",
)
@options.hosts
@options.hostfile
@click.option("--no-preflight", is_flag=True, help="Do not compare the nodes before the start.")
@click.option(
    "--hang-timeout",
    metavar="MIN[:MAX]|off",
    help="How long a rank may hang while others wait; default 60s:30m.",
)
@click.option(
    "--verify-every",
    type=click.IntRange(1),
    metavar="K",
    help="Make every K-th step again on another rank, and compare the two bit for bit.",
)
@click.option(
    "--debugpy",
    type=int,
    metavar="[RANK]",
    help="A rank, by default 0, waits for VS Code or PyCharm, through a local port.",
)
@click.option(
    "--pdb",
    is_flag=True,
    help="Open pdb here on the first rank that fails; the others wait.",
)
@click.option(
    "--inline",
    is_flag=True,
    help="Run SCRIPT in this very process, as rank 0 of 1, for a debugger or a test.",
)
@click.option(
    "--debug",
    is_flag=True,
    help="More output of NCCL and torch; an NCCL log for each rank.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Tell Prometheus how it stands, on this port of the head's loopback.",
)
@options.here
@click.option(
    "--session",
    metavar="NAME",
    help="Start on the nodes that a session holds: `muster session`.",
    shell_complete=complete("sessions"),
)
# Used by `torchmuster.launch` only: this process stays as the owner of the run. The file holds what
# doesn't fit a command line.
@click.option("--launched", hidden=True)
@click.option("--dry-run", is_flag=True, help="Show the job script and command, submit nothing.")
@click.argument("script", shell_complete=complete_files)
@click.argument("args", shell_complete=complete_files, nargs=-1, type=click.UNPROCESSED)
@answers
@options.add_start_options
def run(**given: Any) -> int:
    """Run SCRIPT with ARGS on one or many nodes.

    It starts in about a second, survives the loss of any worker or node, and says what was wrong.
    Options of muster go before SCRIPT, the script's own options after it.
    """
    return launch(request_of(given))


def request_of(given: dict[str, Any]) -> "RunRequest":
    """Return the request that the command line makes."""
    from torchmuster.core.spec.launch import RunRequest

    off = given["no_preflight"] or os.environ.get("MUSTER_PREFLIGHT") in ("off", "no", "0")
    said = {name: value for name, value in given.items() if value is not None}
    del said["no_preflight"]
    if given["pdb"]:
        said.setdefault("max_restarts", 0)  # one failure is enough to debug
    if "launched" in said:
        order = read_order(said["launched"])
        variables = (f"{name}={value}" for name, value in order.environment.items())
        said |= {"launched": True, "call": order.call, "args": order.args}
        said["set_env"] = (*said.get("set_env", ()), *variables)
    return RunRequest(**said, preflight="off" if off else "short")


def read_order(path: str) -> "LaunchOrder":
    """Return the order that a Python client has written to a file."""
    import json

    from torchmuster.core.model import codec
    from torchmuster.core.plainfile import open_own
    from torchmuster.core.spec.launch import LaunchOrder

    with open_own(path) as file:
        return codec.from_plain(LaunchOrder, json.load(file))


def launch(request: "RunRequest") -> int:
    """Start a run in its place for runs and follow it to its end; return the exit code."""
    from torchmuster.core.cli.spelling import misplaced_options, option_names, warn_of_misplaced

    if request.inline:
        return run_inline(request)
    ending.is_launched = request.launched
    if request.engine == "all":
        show: Any = plugs.find("everywhere", "run")
        if show is not None:
            return int(show(request, launch))
    context = click.get_current_context(silent=True)
    is_separated = context is not None and context.meta.get(_SEPARATED, False)
    args = () if is_separated or request.launched else request.args
    late = misplaced_options(request.script, args, option_names(run))
    if "--dry-run" in late:
        raise UsageError(
            f"`--dry-run` comes after {request.script}, which does not know it",
            why="the script would get it, and the run would start\n"
            f"if it is the script's own: muster run -- {request.script} --dry-run",
            fix=f"muster run --dry-run {request.script}",
        )
    if late:
        click.echo(f"muster: {warn_of_misplaced(request.script, late)}", err=True)
    return start_run(request)


def start_run(request: "RunRequest") -> int:
    """Start a run in its place for runs and follow it, or show what would be started.

    Raises:
        ManyErrors: Everything that is wrong with the request.
    """
    from torchmuster.core.cli.find import find_place, where_of
    from torchmuster.core.cli.place import begin, check
    from torchmuster.core.spec.launch import other_environment, own_processes, read_job_limits
    from torchmuster.core.spec.problems import Problems

    problems = Problems()
    place = find_place(where_of(request), problems)
    request = place.fill(replace(request, stdin_rank=_stdin_rank(request)))
    run_id = choose_id(request, problems)
    limits = read_job_limits(request, problems)
    check_debugger(request, problems)
    check(place, request, problems)
    plan = problems.checked(place.plan(request, run_id, limits, problems))
    if request.dry_run:
        place.show(plan)
        return 0
    other = other_environment(os.environ, "--python") if request.python is None else ""
    own = own_processes(os.path.join(plan.program.cwd, plan.program.target), refuses=True)
    unread = "no worker reads standard input here; `--stdin 0` gives it to rank 0"
    is_unread = request.stdin_rank is None and _input_waits()
    for note in filter(None, (other, own, unread if is_unread else "")):
        click.echo(f"muster: {note}", err=True)
    return begin(place, plan, detach=request.detach)


def _input_waits() -> bool:
    """Say whether standard input has data: a file, or a pipe that already holds bytes."""
    import fcntl
    import stat
    import termios

    try:
        mode = os.fstat(0).st_mode
        if stat.S_ISREG(mode):
            return os.lseek(0, 0, os.SEEK_CUR) < os.fstat(0).st_size
        held = fcntl.ioctl(0, termios.FIONREAD, bytes(4)) if stat.S_ISFIFO(mode) else b""
    except OSError:  # it is closed
        return False
    return any(held)


def _stdin_rank(request: "RunRequest") -> int | None:
    """Return the rank that gets standard input: as requested, else 0 at a terminal, else None."""
    if request.stdin_rank is not None or request.pdb:  # pdb reads the terminal itself
        return request.stdin_rank
    try:
        return 0 if sys.stdin.isatty() and not request.detach else None
    except (AttributeError, ValueError):  # closed
        return None


# `--inline`: rank 0 of 1 in this very process, for a debugger and for tests.

# What is the same in one process without an agent, and what a terminal decides by itself.
_MEANT = frozenset(
    {
        *("script", "args", "module", "set_env", "cwd", "preflight", "tee", "stdin_rank", "name"),
        *("max_restarts", "inline"),
    }
)
_OPTIONS = {"engine": "--on", **JOB_OPTIONS}  # those that are called otherwise than their field


def run_inline(request: "RunRequest") -> int:
    """Run the script as `__main__` of this process; return its exit code.

    There is no agent, no attempt and no record, so breakpoints, profilers and coverage see the
    script as they see any program. Torch and `torchmuster.train` find a world of one.

    Raises:
        ManyErrors: Options that need more than one process, or a script that can't be run.
    """
    import runpy

    from torchmuster.core.node.options import world_of_one
    from torchmuster.core.node.spawner.mainmodule import first_path
    from torchmuster.core.spec.launch import check_script
    from torchmuster.core.spec.problems import Problems, parse_set_env

    problems = Problems()
    for one in fields(request):
        value = getattr(request, one.name)
        is_one = one.name in ("nodes", "nproc_per_node") and value == "1"
        if one.name not in _MEANT and not is_one and value != one.default and value:
            option = _OPTIONS.get(one.name, f"--{one.name.replace('_', '-')}")
            what = "this process runs the script itself, as rank 0 of 1"
            problems.add(what, option, fix="without it, or without --inline")
    variables = parse_set_env(request.set_env, problems)
    if not request.module:
        check_script(request.script, request.cwd, problems, request.args)
    problems.checked(True)
    os.environ.update(world_of_one() | variables)
    kind = "module" if request.module else "file"
    sys.argv = [request.script, *request.args]
    if (folder := first_path(kind, request.script)) is not None:
        sys.path[0] = folder
    if request.module:
        runpy.run_module(request.script, run_name="__main__", alter_sys=True)
        return 0
    sys.excepthook = _show_from_script  # a debugger around this process sees the error itself
    try:
        runpy.run_path(request.script, run_name="__main__")
    except EOFError as error:  # click would take it for Ctrl-D
        _show_from_script(type(error), error, error.__traceback__)
        return 1
    return 0


def _show_from_script(
    kind: type[BaseException], error: BaseException, trace: "types.TracebackType | None"
) -> None:
    """Print an exception from the script's own first frame on."""
    import traceback

    frames, path = trace, os.path.realpath(sys.argv[0])
    while frames is not None and os.path.realpath(frames.tb_frame.f_code.co_filename) != path:
        frames = frames.tb_next
    traceback.print_exception(kind, error, frames or trace)
