"""`muster exec` and `muster stacks`: what runs inside a task or rank, and where it is."""

import codecs
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.ending import is_terminal
from torchmuster.core.cli.options import complete_runs
from torchmuster.core.model.lines import LineJoiner
from torchmuster.core.spec.problems import parse_timeout
from torchmuster.errors import UsageError
from torchmuster.launcher.cli.echo import echo

if TYPE_CHECKING:
    from torchmuster.launcher.views.execute import ExecOrder

_COMMAND = "muster.exec.command"


class _ExecCommand(click.Command):
    """Keeps words after `--` apart: they are not options of muster."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_COMMAND] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@click.command(
    cls=_ExecCommand,
    name="exec",
    options_metavar="[OPTIONS]",
)
@click.argument("run", shell_complete=complete_runs)
@click.argument("words", nargs=-1, metavar="[TASK] [-- COMMAND...]")
@click.option("--group", metavar="GROUP", help="In all tasks of this group at once.")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="Training: on the node of this rank."
)
@click.option("--node", metavar="K", help="Training: on this node, e.g. n2.")
@click.option("--tty/--no-tty", default=None, help="With a terminal; default when we have one.")
@click.option("--timeout", metavar="TIME", help="End the command after this time, e.g. 30s.")
@click.pass_context
def exec(  # noqa: A001 - the command's name
    ctx: click.Context,
    run: str,
    words: tuple[str, ...],
    *,
    group: str | None,
    rank: int | None,
    node: str | None,
    tty: bool | None,
    timeout: str | None,
) -> int:
    """Run COMMAND inside of the running TASK of the workflow RUN: by default a shell.

    In a training run it runs on the node of a rank, with its variables (RANK, CUDA_VISIBLE_DEVICES,
    ...); by default rank 0.

    It has the task's view of files and network, its working directory and its variables, and ends
    with the task.

    \b
    muster exec last train                       a shell
    muster exec last train -- nvidia-smi         one command; pipes work
    muster exec last --group workers -- hostname in all tasks of a group
    muster exec last --rank 3 -- nvidia-smi      on the node of rank 3
    muster exec last --node n2                   a shell on its node n2

    The exit code is the command's, 128 + N after the signal N; with --group the highest. Codes of
    muster itself: 124 at the time limit, 125 if the task can't be entered, 126 if the command is
    not executable, 127 if it does not exist, 137 if the task ended during the command; 2, 4, 5 and
    7 if there is no such task, it does not run, or its run can't be reached.
    """  # noqa: D301 - \b is click's mark
    import asyncio

    from torchmuster.launcher.views import execute as executing
    from torchmuster.launcher.views.find import find_run

    view = find_run(run)
    lines = None
    if rank is not None or node is not None or (view.has_ranks and view.is_readable):
        command = _command_of(words, ctx.meta[_COMMAND], rank, node, group)
        word = f"node {node}" if node is not None else f"rank {rank or 0}"
        order = _order(command, None, tty, timeout)
        running = executing.execute_at_rank(view, word, order, _write_plain)
    else:
        task, argv = _split(words, ctx.meta[_COMMAND], group)
        order = _order(argv, group, tty, timeout)
        if task is not None:
            tasks = [executing.choose_task(view, task)]
        else:
            tasks = executing.choose_group(view, group or "")
        lines = _Lines([one.name for one in tasks])
        running = executing.execute(
            view, tasks, order, _write_plain if group is None else lines.write
        )
    try:
        result = asyncio.run(running)
    except KeyboardInterrupt:
        return 130
    if lines is not None:
        lines.end()
    for note in result.notes:
        echo(f"muster: {note if lines is not None else note.removeprefix('task ')}", err=True)
    return result.exit_code


def _command_of(
    words: tuple[str, ...],
    command: tuple[str, ...],
    rank: int | None,
    node: str | None,
    group: str | None,
) -> tuple[str, ...]:
    """Check the options for a training run; return the command."""
    if rank is not None and node is not None:
        what = "--rank and --node can't be combined"
        raise UsageError(what, where=f"--rank {rank} --node {node}", fix="leave one out")
    if group is not None:
        what = "--group is for workflows; a training run has ranks and nodes"
        raise UsageError(what, where=f"--group {group}", fix="--rank 0 or --node n1")
    if words:
        what = f"`{words[0]}` comes before `--`: a training run has no tasks"
        raise UsageError(what, fix=f"muster exec RUN [--rank R] -- {' '.join(words)}")
    return command


def _split(
    words: tuple[str, ...], command: tuple[str, ...], group: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """Return the task (None with --group) and the command."""
    if group is None and not words:
        fix = "muster exec RUN TASK -- COMMAND, or --group GROUP"
        raise UsageError("`muster exec` needs a task", fix=fix)
    task = words[0] if group is None else None
    rest = words[1:] if group is None else words
    if rest and command:
        what = f"`{rest[0]}` comes before `--`, where only a run and a task may be"
        raise UsageError(what, fix="leave it out" if group is not None else None)
    return task, rest or command


def _order(
    argv: tuple[str, ...], group: str | None, tty: bool | None, timeout: str | None
) -> "ExecOrder":

    if group is not None and tty:
        raise UsageError("--tty is for one task, not for a group", fix="leave --tty out")
    if group is not None and not argv:
        raise UsageError("--group needs a command", fix="muster exec RUN --group GROUP -- COMMAND")
    limit_s = parse_timeout(timeout) if timeout is not None else None
    if timeout is not None and not limit_s:
        where, fix = f"--timeout {timeout}", "--timeout 30s"
        raise UsageError("the limit is not a time above 0", where=where, fix=fix)
    if tty is None:
        tty = group is None and is_terminal(0) and is_terminal(1)
    input_fd = 0 if group is None else None
    from torchmuster.launcher.views.execute import ExecOrder

    return ExecOrder(argv=argv, tty=tty, input_fd=input_fd, timeout_s=limit_s)


def _write_plain(task: str, stream: int, data: bytes) -> None:
    del task
    view = memoryview(data)
    while view:
        view = view[os.write(stream, view) :]


class _Lines:
    """Prints lines of several tasks, each after its task's name."""

    def __init__(self, names: list[str]) -> None:

        self._names = names
        self._joiner = LineJoiner(prefix_always=True)
        self._joiner.names.update(enumerate(names))
        self._decoders: dict[tuple[str, int], Any] = {}

    def write(self, task: str, stream: int, data: bytes) -> None:
        decoder = self._decoders.get((task, stream))
        if decoder is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._decoders[task, stream] = decoder
        self._print(self._joiner.add(self._names.index(task), stream, decoder.decode(data)))

    def end(self) -> None:
        """Print incomplete lines."""
        self._print(self._joiner.rest())

    def _print(self, pieces: list[tuple[int, str]]) -> None:
        for stream, text in pieces:
            target = sys.stdout if stream == 1 else sys.stderr
            target.write(text)
            target.flush()


@click.command()
@click.argument("run", shell_complete=complete_runs)
@options.json()
def stacks(run: str, *, as_json: bool) -> int:
    """Show the Python stacks of all ranks of the running RUN, equal ones together.

    The first line says which ranks wait in which collective and which do something else. The
    workers keep running: a signal handler writes their stacks, also while C code holds the
    interpreter's lock. For processes that can't answer, py-spy is used if it is installed on the
    node.
    """
    import asyncio
    import json

    from torchmuster.launcher.views.execute import ask_stacks
    from torchmuster.launcher.views.find import find_run

    found = asyncio.run(ask_stacks(find_run(run)))
    if as_json:
        echo(json.dumps({"sentence": found.sentence, "stacks": list(found.lines)}, indent=1))
        return 0
    echo(found.sentence)
    if found.lines:
        echo()
    for line in found.lines:
        echo(line)
    return 0
