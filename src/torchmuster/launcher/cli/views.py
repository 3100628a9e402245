"""`muster ps`, `status`, `logs`, `wait` and `cancel`."""

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import ending, options
from torchmuster.core.cli.ending import AnswerCommand, answers, last_line
from torchmuster.core.cli.messages import paint_report, uses_colour
from torchmuster.core.cli.options import complete_runs
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model.lines import LineJoiner
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import as_bytes, as_output, in_one_line, span
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.record import damage_of_result
from torchmuster.core.plainfile import open_plain
from torchmuster.errors import MissingRecordError, MusterError, NotFoundError, UsageError
from torchmuster.launcher.cli.echo import echo, echo_json
from torchmuster.launcher.cli.record import clock, commands_of, plain_of, report_reach
from torchmuster.launcher.model.job import JobState, describe_job
from torchmuster.launcher.ui.table import render_table
from torchmuster.launcher.views.account import Account, account_of, how_to_go_on
from torchmuster.launcher.views.elsewhere import copied, elsewhere, is_elsewhere
from torchmuster.launcher.views.find import all_runs, find_run, look_at, newest_and_open, view_job
from torchmuster.launcher.views.training import bad_loss_of

if TYPE_CHECKING:
    from torchmuster.launcher.views.run_view import RunView


# `muster status --watch`: redraw in place on a terminal; elsewhere print only if something changed.


_EVERY_S = 2.0


def watch_status(run: str, print_once: Callable[[], int]) -> int:
    """Print until the run has ended; return the last exit code.

    Args:
        run: The run's id or another word for it.
        print_once: Prints the state of the run; returns the exit code.

    Raises:
        NotFoundError: There is no such run.
    """
    view = find_run(run)
    before, pause = "", threading.Event()
    with copied(view.run_dir), contextlib.suppress(KeyboardInterrupt):
        while True:
            # Checked first, so that the final state is printed last.
            has_ended = find_run(view.run_dir.path).state.is_final
            with contextlib.redirect_stdout(io.StringIO()) as said:
                code = print_once()
            text = said.getvalue()
            if text != before:
                _show(text)
            before = text
            if has_ended:
                return code
            pause.wait(_EVERY_S)
    return 130


def _show(text: str) -> None:
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        text = "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[J"
    sys.stdout.write(text)
    sys.stdout.flush()


_MOST_ROWS = 20
_COLUMNS = ("RUN", "STATE", "SUBMITTED", "TIME", "ON", "WORKERS", "COMMAND", "ENDED BY")


@click.command()
@click.option(
    "-a", "--all", "everything", is_flag=True, help="All runs, not only the open and the last 20."
)
@options.json()
def ps(*, everything: bool, as_json: bool) -> int:
    """List the runs, the one submitted last at the end."""
    shown = all_runs() if everything else newest_and_open(_MOST_ROWS)
    accounts = [account_of(view, time.time()) for view in shown]
    if as_json:
        echo_json([plain_of(*pair) for pair in zip(shown, accounts, strict=True)])
        return 0
    if not shown:
        echo("no runs yet", err=True)
        return 0
    rows = [_row(*pair) for pair in zip(shown, accounts, strict=True)]
    echo(render_table(_COLUMNS, rows), nl=False)
    return 0


def _row(view: "RunView", account: "Account") -> list[str]:

    return [
        short_id(view.run_id),
        view.state.value,
        clock(account.submitted),
        span(account.elapsed_s),
        account.place,
        view.size,
        in_one_line(view.command or "-")[:50],
        in_one_line(account.ended_by or bad_loss_of(view.run_dir))[:60],
    ]


@click.command()
@options.last_run
@click.option("--watch", is_flag=True, help="Again every two seconds, until RUN has ended.")
@options.json()
def status(run: str, *, watch: bool, as_json: bool) -> int:
    """Show the state of RUN, by default the last one: its nodes, attempts, training and verdict."""
    print_once = partial(print_status, run, as_json=as_json)
    return watch_status(run, print_once) if watch else print_once()


def print_status(run: str, *, as_json: bool) -> int:
    """Print the state of a run, a workflow or a sweep; return the exit code."""
    view = look_at(run)
    return commands_of(view).print_status(view, as_json=as_json)


class _Rank(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """A rank, or all: -1."""

    name = "rank"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if value == "all":
            return _ALL_RANKS
        if not isinstance(value, int) and not (value.isascii() and value.isdigit()):
            self.fail(f"{value!r} is neither a rank nor `all`", param, ctx)
        return int(value)


_ALL_RANKS = -1


@click.command()
@options.last_run
@click.argument("task", required=False)
@click.option("-f", "--follow", is_flag=True, help="Follow until the run ends.")
@click.option(
    "-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each."
)
@click.option("--rank", type=_Rank(), metavar="N|all", help="This rank, or all; default rank 0.")
@click.option("--attempt", type=click.IntRange(min=0), help="This attempt; default the last.")
def logs(
    run: str,
    task: str | None,
    *,
    follow: bool,
    tail: int | None,
    rank: int | None,
    attempt: int | None,
) -> int:
    """Print the output of rank 0 of RUN, by default the last run; for a workflow, of its tasks or of one TASK."""
    import asyncio

    from torchmuster.launcher.views.control import LogChoice, follow_logs, log_files

    view = find_run(run) if follow else look_at(run)
    report_reach(view)
    commands_of(view).check_logs(view, task)
    names, num_workers = view.task_names, view.record.num_workers or 1
    if rank is None and num_workers > 1 and not names:
        echo(f"muster: of rank 0; of all {num_workers} ranks: --rank all", err=True)
    by_default = 0 if rank is None and not names else None
    rank = None if rank == _ALL_RANKS else rank
    choice = LogChoice(task=task, attempt=attempt, rank=rank, rather=by_default)
    rank = rank if by_default is None else by_default
    several = max(len(names), num_workers) > 1
    joiner = LineJoiner(prefix_always=several and task is None and rank is None)
    joiner.names.update(enumerate(names))
    is_terminal = sys.stdout.isatty()

    def write(number: int, text: str) -> None:
        pieces = joiner.add(number, 1, text)
        if follow:  # a progress bar may end no line for a long time
            pieces += joiner.show_halves()
        put(pieces)

    def put(pieces: "list[tuple[int, str]]") -> None:
        text = "".join(part for _, part in pieces)
        sys.stdout.buffer.write(as_bytes(as_output(text) if is_terminal else text))
        sys.stdout.flush()

    try:
        if follow:
            with copied(view.run_dir):
                asyncio.run(follow_logs(view, choice, write, tail))
        else:
            files = log_files(view, choice)
            if len(files) == 1 and not joiner.prefix_always:
                joiner.prefixes[files[0][0]] = ""
            # Whole lines: for a progress bar, its last state.
            joiner.prefix_always, joiner.whole = True, frozenset({1})
            for number, path in files:
                _print_file(path, partial(write, number), tail)
    except KeyboardInterrupt:
        return 130
    put(joiner.rest())
    return 0


def _print_file(path: str, write: "Callable[[str], None]", tail: int | None) -> None:
    from torchmuster.launcher.views.control import offset_of_last_lines

    try:
        with io.TextIOWrapper(open_plain(path), errors="surrogateescape", newline="") as log:
            log.seek(offset_of_last_lines(path, tail) if tail is not None else 0)
            while text := log.read(1 << 20):
                write(text)
    except BrokenPipeError:  # the reader of our output is gone
        raise
    except OSError as error:
        raise NotFoundError("the log can't be read", where=path, why=error.strerror) from error


@click.command(cls=AnswerCommand)
@options.last_run
@answers
def wait(run: str) -> int:
    """Wait for the end of RUN, by default the last one, and exit with its exit code."""
    import asyncio

    from torchmuster.launcher.views.control import wait_for_result

    view = find_run(run)
    ending.followed = view.run_dir
    try:
        with copied(view.run_dir) as copy:
            result = asyncio.run(wait_for_result(view.run_dir, copy))
    except KeyboardInterrupt:
        return 130
    if result is None:
        if (damage := damage_of_result(view.run_dir)) is not None:  # it was not lost
            name = short_id(view.run_id)
            what, fix = f"how the run {name} ended is not known", f"muster logs {name}"
            raise MusterError(what, where=view.run_dir.result, why=damage, fix=fix)
        job = view_job(view.run_dir)  # as in `muster status`: the scheduler may know
        if job is not None and job.state is JobState.CANCELLED:
            name = short_id(view.run_id)
            echo(f"muster: {name} was cancelled, and left no result: {describe_job(job)}", err=True)
            return 128 + signal.SIGTERM
        # A run that consists of parts has no log of its own.
        look = f"muster {'logs' if view.has_ranks else 'restart'} {short_id(view.run_id)}"
        raise MusterError(
            f"the run {short_id(view.run_id)} has no result and its owner has gone",
            where=view.run_dir.owner,
            why=describe_job(job) if job is not None else "the process that started it was killed",
            fix=how_to_go_on(view.run_dir) or look,
        )
    if result.report is not None and _ended_with_pods(view.run_dir, result):
        echo(paint_report(result.report, colour=uses_colour()), nl=False, err=True)
    echo(last_line(result, view.run_dir), err=True)
    return result.exit_code


@click.command()
@click.argument("run", shell_complete=complete_runs)
def fetch(run: str) -> int:
    """Take here what has not come of RUN, a run in pods: files, logs and record.

    Its first pod waits for that after the end (`take_within` of the site, 15 minutes), and ends
    when it has been taken. On a volume a pod is started that reads it.
    """
    elsewhere().fetch(find_run(run).run_dir, lambda text: echo(f"muster: {text}", err=True))
    return 0


def _ended_with_pods(run_dir: RunDir, result: Result) -> bool:
    """Return whether the files of a run in pods may be only on its cluster."""
    is_left = result.state in (RunState.LOST, RunState.CANCELLED)
    is_left |= result.exit_code == MissingRecordError.exit_code
    return is_left and is_elsewhere(run_dir)


def identity(view: "RunView") -> str:
    """Return a description that identifies a run: `last` may not be the one that the user means."""
    from torchmuster.launcher.jobs.jobs import all_jobs

    jobs = all_jobs(view.run_dir)
    job = f", job {', '.join(jobs[1])} of {jobs[0].name}" if jobs is not None else ""
    return f"{short_id(view.run_id)} ({view.name}, {view.state.value}{job})"


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option("--now", is_flag=True, help="SIGKILL at once, without the grace.")
def cancel(run: str, *, now: bool) -> int:
    """Stop RUN: SIGTERM to its workers, SIGKILL after its grace."""
    from torchmuster.launcher.views.control import stop_and_wait

    view = find_run(run)
    if view.state.is_final:
        echo(f"the run {short_id(view.run_id)} has ended already: {view.state.value}", err=True)

        if left := elsewhere().remove_left(view.run_dir):
            echo(f"removed what was left on the cluster: {', '.join(left)}", err=True)
        return 0
    if view.is_headless_member:
        sweep = short_id(view.run_id).rpartition(".")[0]
        what = f"{short_id(view.run_id)} is a process of its sweep and ends with it"
        raise UsageError(what, fix=f"muster cancel {sweep}")
    echo(f"cancelling {identity(view)}", err=True)
    result = stop_and_wait(view, at_once=now, timeout_s=view.grace_s + 10.0)
    if result is None:
        raise MusterError(
            f"the run {short_id(view.run_id)} has not ended yet", fix=f"muster cancel --now {run}"
        )
    echo(last_line(result, view.run_dir), err=True)
    return 0
