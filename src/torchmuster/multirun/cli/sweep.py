"""The command `muster sweep`."""

import contextlib
import os
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import ending, options
from torchmuster.core.cli.ending import answers, leave_in_background, say_next, wanted, whole_word
from torchmuster.core.cli.find import find_place, where_of_options
from torchmuster.core.cli.options import complete, complete_files
from torchmuster.core.cli.run import read_order
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model.plan import GRACE_S
from torchmuster.core.model.states import RunState
from torchmuster.core.owner.create import write_owner
from torchmuster.core.owner.session import note_on_session
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import UsageError
from torchmuster.launcher.cli.sets import SetCommand
from torchmuster.multirun.sweep.plan import SweepPlan

if TYPE_CHECKING:
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.verdict import Result
    from torchmuster.multirun.views.sweep_view import SweepRun


class _SweepCommand(SetCommand):
    """A command that explains, for an unknown option, where the script's own options go."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Explain an unknown option; `--json` never consumes the next word."""
        end = args.index("--") if "--" in args else len(args)
        args = [*whole_word(args[:end]), *args[end:]]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from torchmuster.core.cli.spelling import hint_for_option, refuse_removed

            refuse_removed(f"muster sweep {error.option_name}")
            known = [name for param in self.get_params(ctx) for name in param.opts]
            near = hint_for_option(error.option_name, [name for name in known if name[:2] == "--"])
            fix = "the script's own go behind `--`: muster sweep train.py --grid lr=1e-3 -- --epochs 5"
            what = f"`muster sweep` has no option `{error.option_name}`"
            raise UsageError(what, fix=near or fix) from error


@click.command(cls=_SweepCommand)
@click.option(
    "--grid",
    multiple=True,
    metavar="NAME=VALUES ...",
    help="Values to combine: lr=1e-3,1e-4 seed=0:3.",
)
@click.option(
    "--zip",
    "zipped",
    multiple=True,
    metavar="NAME=VALUES ...",
    help="Values that go together, one row a member.",
)
@click.option(
    "--style",
    type=click.Choice(["option", "hydra", "env"]),
    default="option",
    help="Pass values as --lr 1e-3 (default), as lr=1e-3, or in the environment only.",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Members at a time; default GPUs or CPUs, on a scheduler all, in pods at most 32.",
)
@click.option(
    "--per-gpu", type=click.IntRange(1, 64), default=1, help="Members that share a GPU; default 1."
)
@click.option("--nproc-per-node", metavar="N", help="Workers of each member; default 1.")
@click.option(
    "--nodes",
    type=click.IntRange(1, 1024),
    default=1,
    metavar="N",
    help="Pods of each member, on Kubernetes; default 1.",
)
@click.option("--metric", metavar="NAME", help="What to look for, as recorded or printed.")
@click.option(
    "--goal", type=click.Choice(["min", "max"]), default="min", help="Which values are better."
)
@click.option(
    "--stop", metavar="RULE", help="End the worst early: asha, median, or MODULE:NAME of your own."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with `python -m`.")
@options.on
@options.hosts
@options.hostfile
@click.option(
    "--session",
    metavar="NAME",
    help="One member after the other on the nodes that a session holds.",
    shell_complete=complete("sessions"),
)
@options.here
@options.python
@click.option(
    "--env",
    "--set-env",
    "set_env",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a variable in every member; repeatable.",
)
@click.option("--time", "time_limit", metavar="TIME", help="Time limit of each member's job.")
@options.queue
@options.account
@options.cpus_per_node
@options.gpus_per_node
@click.option("--mem", metavar="SIZE", help="Memory of each node, e.g. 64Gi.")
@click.option("--preload", multiple=True, metavar="MODULE", help="Import this before forking too.")
@click.option(
    "--start",
    type=click.Choice(["auto", "fork", "fresh"]),
    default="auto",
    help="Fork members from a process with torch, or start fresh interpreters.",
)
@click.option("--grace", metavar="TIME", help=f"From a stop to SIGKILL; default {GRACE_S:g}s.")
@click.option("--name", metavar="WORD", help="Start of the sweep's id; default SCRIPT's.")
@click.option("--run-id", metavar="NAME", help="The whole id of the sweep, and its folder's name.")
@ending.option
@options.detach
# For `torchmuster.sweep` only: a file with the values, and what no command line can carry.
@click.option("--launched", hidden=True)
@click.option("--dry-run", is_flag=True, help="Show the members' commands, start nothing.")
@click.argument("script", shell_complete=complete_files)
@click.argument("args", shell_complete=complete_files, nargs=-1, type=click.UNPROCESSED)
@answers
@options.add_start_options
def sweep(**given: Any) -> int:
    """Run SCRIPT with every combination of the values of --grid, some at a time.

    Each member is a run of its own, NAME.0 and so on, for `muster logs` and `muster status`; the
    script's own options go behind `--`, and {lr} in them is replaced by a value.
    """
    if given["launched"] is not None:
        given |= _options_from_python(given)
    problems = Problems()
    place = find_place(where_of_options(given), problems)
    code: int = place.cell("sweep").start(given, problems, partial(_start, given))
    return code


def _start(given: dict[str, Any], plan: "SweepPlan", run_dir: "RunDir | None" = None) -> int:
    """Start a planned sweep, in its folder if that exists already; or show it."""
    from torchmuster.multirun.sweep.members import create_sweep_dir

    if run_dir is None:
        if given["dry_run"]:
            return _show(plan)
        if plan.stop is not None and plan.metric is not None:
            from torchmuster.multirun.sweep.metric import load_rule

            load_rule(plan.stop, plan.metric)  # fail before anything is created
        run_dir = create_sweep_dir(plan)
    return start_sweep(plan, run_dir, detach=given["detach"])


def _options_from_python(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a Python client passes in a file, not on the command line."""
    order = read_order(given["launched"])
    variables = tuple(f"{name}={value}" for name, value in order.environment.items())
    return {
        "order": order,
        "args": order.args,
        "call": order.call,
        "set_env": (*given["set_env"], *variables),
    }


def _show(plan: "SweepPlan") -> int:
    for number in range(len(plan.members)):
        words = plan.member_plan(number).program.display()
        click.echo(f"{number}\t{shlex.join(words)}")
    slots = f"{plan.slots} slot{'s' if plan.slots != 1 else ''}"
    click.echo(f"{len(plan.members)} members in {slots}; nothing was started (--dry-run)", err=True)
    return 0


def start_sweep(plan: "SweepPlan", run_dir: "RunDir", *, detach: bool) -> int:
    """Own a prepared sweep until it ends, or leave it to a background process."""
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.launcher.cli.follow import StatusLine

    if detach:
        return leave_in_background(run_dir, plan.run_id)
    ending.note_start(run_dir)
    voice = TerminalVoice()
    voice.start()
    status = StatusLine(voice, run_dir, wanted())
    status.start()
    try:
        result = _follow(plan, run_dir, voice)
        status.close()
        from torchmuster.multirun.cli.sweep_record import say_end
        from torchmuster.multirun.views.sweep_view import view_sweep

        say_end(view_sweep(run_dir, is_alive=False), result, voice, run_dir)
        say_next(voice, run_dir, plan)
    finally:
        status.close()
        voice.flush(5.0)
    return result.exit_code


def _follow(plan: "SweepPlan", run_dir: "RunDir", voice: "TerminalVoice") -> "Result":
    from torchmuster.multirun.sweep.owner import follow_sweep

    slots = f"{plan.slots} slot{'s' if plan.slots != 1 else ''}"
    name = short_id(plan.run_id)
    voice.say(f"sweep {name}: {len(plan.members)} members in {slots}; muster status {name}")
    note = note_on_session()
    if note is not None:
        voice.say(note)
    return follow_sweep(run_dir, voice.say)


def restart_sweep(view: "SweepRun", *, detach: bool) -> int:
    """Restart a sweep in its own folder: members that have not succeeded resume from snapshots.

    Raises:
        UsageError: All members have succeeded.
        NotFoundError: The session of its members has ended.
    """
    sweep_view = view.sweep_view()
    done = (RunState.SUCCEEDED, RunState.STOPPED)
    if all(member.state in done for member in sweep_view.members):
        what = f"all members of the sweep {short_id(view.run_id)} have succeeded"
        raise UsageError(what, where=view.run_dir.path)
    if os.path.isfile(view.run_dir.arrays):
        from torchmuster.multirun.cli.sweep_jobs import submit_again

        failed = [member.number for member in sweep_view.members if member.state not in done]
        return submit_again(sweep_view.plan, view.run_dir, failed, detach=detach)
    if os.path.isfile(view.run_dir.job):
        raise UsageError(
            f"the sweep {short_id(view.run_id)} was started by an earlier version of muster",
            where=view.run_dir.job,
            why="its pods were slots, which took one member after the other",
            fix="type its command again, with the values of the members that have not succeeded",
        )
    if (session := sweep_view.plan.run.session) is not None:
        from torchmuster.multirun.views.sessions import find_session

        find_session(session)  # fail here, before any member is tried
    with contextlib.suppress(FileNotFoundError):
        os.unlink(view.run_dir.result)
    write_owner(view.run_dir)
    return start_sweep(sweep_view.plan, view.run_dir, detach=detach)
