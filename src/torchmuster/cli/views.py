"""`muster ps`, `status`, `logs`, `wait` and `cancel`."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.cli import options
from torchmuster.cli.account import clock, print_account, span
from torchmuster.cli.completion import complete_runs
from torchmuster.cli.echo import echo, echo_json
from torchmuster.errors import MusterError, NotFoundError, UsageError
from torchmuster.files.layout import short_id
from torchmuster.model.display.text import few_of, in_one_line
from torchmuster.model.plan import GRACE_S

if TYPE_CHECKING:
    from torchmuster.model.record.training import EpochView
    from torchmuster.owner.views.account import Account
    from torchmuster.owner.views.run_view import RunView
    from torchmuster.owner.views.training import TrainingView

_MOST_ROWS = 20
_LOG_LINES = 10  # of a pod, in a status
_COLUMNS = ("RUN", "STATE", "SUBMITTED", "TIME", "ON", "WORKERS", "COMMAND", "ENDED BY")


@click.command()
@click.option(
    "-a", "--all", "everything", is_flag=True, help="All runs, not only the open and the last 20."
)
@options.json()
def ps(*, everything: bool, as_json: bool) -> int:
    """List the runs, the one submitted last at the end."""
    from torchmuster.owner.views.account import account_of
    from torchmuster.owner.views.find import all_runs, newest_and_open
    from torchmuster.ui.table import render_table

    views = all_runs()
    shown = views if everything else newest_and_open(views, _MOST_ROWS)
    accounts = [account_of(view, time.time()) for view in shown]
    if as_json:
        plain = [_plain(*pair) for pair in zip(shown, accounts, strict=True)]
        echo_json(plain)
        return 0
    if not views:
        echo("no runs yet", err=True)
        return 0
    rows = [_row(*pair) for pair in zip(shown, accounts, strict=True)]
    echo(render_table(_COLUMNS, rows), nl=False)
    return 0


def _plain(view: "RunView", account: "Account") -> dict[str, Any]:
    return {
        "run_id": view.run_id,
        "state": view.state.value,
        "started": view.started,
        "kind": "workflow" if view.is_workflow else "sweep" if view.is_sweep else "run",
        "submitted": account.submitted,
        "elapsed_s": account.elapsed_s,
        "engine": account.engine,
        "jobs": list(account.jobs),
        "exit_code": account.exit_code,
        "ended_by": account.ended_by,
    }


def _row(view: "RunView", account: "Account") -> list[str]:
    from torchmuster.owner.views.training import bad_loss_of

    workers, command = _size_and_command(view)
    return [
        short_id(view.run_id),
        view.state.value,
        clock(account.submitted),
        span(account.elapsed_s),
        account.place,
        workers,
        in_one_line(command)[:50],
        in_one_line(account.ended_by or bad_loss_of(view.run_dir))[:60],
    ]


def _size_and_command(view: "RunView") -> tuple[str, str]:
    if view.is_workflow:
        from torchmuster.cli.workflow_views import size_and_name

        return size_and_name(view)
    if view.is_sweep:
        from torchmuster.cli.sweep_views import size_and_command

        return size_and_command(view)
    workers = str(view.num_workers or "-")
    if view.plan is not None:
        return workers, view.command
    return workers, "(plan.json can't be read)" if not view.problem else "-"


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option("--watch", is_flag=True, help="Again every two seconds, until RUN has ended.")
@options.json()
def status(run: str, *, watch: bool, as_json: bool) -> int:
    """Show the state of RUN: its nodes, attempts, training and verdict."""
    if watch:
        from torchmuster.cli.watch import watch_status

        return watch_status(run, lambda: print_status(run, as_json=as_json))
    return print_status(run, as_json=as_json)


def _quiet_words(view: "RunView") -> str:
    """Return `, quiet for 1:20` of a run whose ranks do nothing, by the newest line of its record."""
    from torchmuster.model.sample import quiet_s
    from torchmuster.owner.views.live import last_sample
    from torchmuster.ui.top.words import show_time

    sample = last_sample(view.run_dir) if not view.state.is_final else None
    if sample is None or not view.attempts or sample.attempt != view.attempts[-1]["attempt"]:
        return ""
    still_s = quiet_s(sample)
    return f", quiet for {show_time(still_s)}" if still_s else ""


def print_status(run: str, *, as_json: bool) -> int:
    """Print where a run stands now."""
    from datetime import UTC, datetime

    from torchmuster.cli.ending import last_line
    from torchmuster.model import codec
    from torchmuster.model.display.narration import narrate_wait
    from torchmuster.model.states import RunState
    from torchmuster.owner.views.account import account_of, find_saved, how_to_go_on
    from torchmuster.owner.views.find import look_at, view_job
    from torchmuster.owner.views.record import code_that_ran, read_events
    from torchmuster.owner.views.run_view import problems_of
    from torchmuster.owner.views.training import training_of
    from torchmuster.ui.messages import last_report, paint_report

    view = look_at(run)
    if view.is_workflow:
        from torchmuster.cli.workflow_views import print_status

        return print_status(view, as_json=as_json)
    if view.is_sweep:
        from torchmuster.cli.sweep_views import print_sweep

        return print_sweep(view, as_json=as_json)
    only_log = _tell_reach(view)
    training = training_of(view.run_dir)
    job = view_job(view.run_dir) if view.result is None else None
    account = account_of(view, time.time())
    if as_json:
        plain = {
            **_plain(view, account),
            "attempts": view.attempts,
            "spares": view.spares,
            "code": code_that_ran(read_events(view.run_dir.events)),
            "job": codec.to_plain(job) if job else None,
            "training": codec.to_plain(training) if training else None,
            "result": codec.to_plain(view.result) if view.result else None,
        }
        echo_json(plain)
        return 0
    echo(f"run      {short_id(view.run_id)}")
    echo(f"state    {view.state.value}{_quiet_words(view)}")
    if view.plan is not None:
        echo(f"command  {in_one_line(view.command)}")
    echo(f"folder   {in_one_line(view.run_dir.path)}")
    for problem in problems_of(view):
        echo(f"problem  {in_one_line(problem)}")
    if job is not None:
        from torchmuster.model.job import describe_job
        from torchmuster.owner.jobs.links import describe_link, words_on_head

        link = describe_link(view.run_dir)
        echo(f"job      {describe_job(job)}{f', {link}' if link else ''}")
        if (words := words_on_head(view.run_dir, job)) is not None:
            echo(f"problem  {in_one_line(words)}")
    elif view.state is RunState.UNKNOWN and account.jobs and not view.is_workflow:
        forgotten = f"{account.engine} does not know job {account.jobs[-1]} any more"
        echo(f"problem  {forgotten}, and the run has left no result")
    print_account(account, has_job_line=job is not None)
    _print_attempts(view)
    whys = [str(e["why"]) for e in view.events if e.get("event") == "imports_in_workers"]
    if whys:
        echo(f"imports  each worker makes its own: {in_one_line(whys[-1])}")
    if not view.state.is_final and view.plan is not None and view.plan.spares:
        echo(f"spare    {few_of(view.spares, 8) or 'none at the moment'}")
    if not view.state.is_final and (waits := narrate_wait(view.events, datetime.now(UTC))):
        click.echo(waits)
    if training is not None:
        saved_step = training.saved_step
        if view.state.is_final:  # what a restart finds: what was in memory has gone
            saved = find_saved(view.run_dir)
            saved_step = saved.step if saved is not None else None
        _print_training(training, saved_step)
    if only_log:
        _print_pod_log(view)
    if view.result is not None:
        echo(f"\n{last_line(view.result, view.run_dir)}")
        for note in view.result.notes:
            echo(note)
        report = last_report(view.result, view.run_dir)
        if report is not None:
            echo(paint_report(report, colour=False), nl=False)
    elif view.state.is_final and (further := how_to_go_on(view.run_dir)) is not None:
        echo(f"\n{further}")
    return 0


def _tell_reach(view: "RunView") -> bool:
    """Say why only its first pod's log is known of a run in pods; return whether that is so."""
    if not os.path.isdir(os.path.join(view.run_dir.path, "pods")):
        return False
    from torchmuster.owner.pods.end import words_on_reach

    words = words_on_reach(view.run_dir)
    if words is not None:
        echo(f"muster: {words}", err=True)
    return words is not None


def _print_pod_log(view: "RunView") -> None:
    """Show the end of the first pod's log."""
    try:
        with open(view.run_dir.job_log, errors="replace") as log:
            lines = log.read().splitlines()[-_LOG_LINES:]
    except OSError:
        return
    echo("\n" + "\n".join(lines))


def _print_attempts(view: "RunView") -> None:
    from torchmuster.owner.views.run_view import workers_of
    from torchmuster.ui.table import render_table

    rows: list[list[str]] = []
    failures: dict[str, str] = {}
    stops: dict[str, str] = {}  # of attempts after which another head went on
    number = ""
    for event in view.events:
        number = str(event.get("attempt")) if event.get("event") == "attempt_started" else number
        if event.get("event") == "attempt_failed":
            failures[str(event.get("attempt"))] = str(event.get("what", ""))
        elif event.get("event") == "run_ended":
            stops[number] = str(event.get("state"))
    starts = view.attempts
    for start, following in itertools.pairwise(starts):  # a node that has left is no failure
        number, why = str(start.get("attempt")), str(following.get("why") or "")
        stop = stops.get(number, "its head was lost")
        failures.setdefault(number, why.replace(f"after attempt {number}", stop, 1))
    for start in starts:
        number, nodes = str(start.get("attempt")), start.get("nodes")
        named = [n for n in nodes if isinstance(n, dict)] if isinstance(nodes, list) else []
        places = few_of((f"{n.get('node')}: {n.get('ranks')}" for n in named), 8)
        rows.append([number, str(workers_of(start) or "-"), places, failures.get(number, "")])
    if rows:
        echo("\n" + render_table(["ATTEMPT", "WORKERS", "RANKS", "ENDED BY"], rows), nl=False)


def _print_training(training: "TrainingView", saved_step: int | None) -> None:
    from torchmuster.ui.table import render_table

    saved = "no snapshot yet" if saved_step is None else f"saved {saved_step}"
    echo(f"\ntraining  step {training.step}, {saved}{_words(training.values, training.not_finite)}")
    rows = [
        [
            str(e.epoch),
            str(e.step),
            "-" if e.elapsed_s is None else f"{e.elapsed_s:.1f} s",
            _ledger(e),
            _words(e.values).strip(", "),
        ]
        for e in training.epochs[-10:]
    ]
    if rows:
        echo(render_table(["EPOCH", "STEP", "TIME", "SAMPLES", "MEANS"], rows), nl=False)


def _ledger(epoch: "EpochView") -> str:
    if epoch.samples is None:
        return "-"
    return f"{epoch.samples}, each once" + ("" if epoch.is_whole else " (left early)")


def _words(values: dict[str, float], not_finite: dict[str, int] | None = None) -> str:
    from torchmuster.model.record.series import since_words

    since = {name: since_words(step) for name, step in (not_finite or {}).items()}
    return "".join(f", {name} {value:.4g}{since.get(name, '')}" for name, value in values.items())


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.argument("task", required=False)
@click.option("-f", "--follow", is_flag=True, help="Follow until the run ends.")
@click.option(
    "-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each."
)
@click.option("--rank", type=click.IntRange(min=0), help="This rank only.")
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
    """Print the output of RUN's ranks; for a workflow, of its tasks or of one TASK."""
    import asyncio

    from torchmuster.model.display.lines import LineJoiner
    from torchmuster.model.display.text import as_bytes, as_output
    from torchmuster.owner.pods.copy import copied
    from torchmuster.owner.views.control import LogChoice, follow_logs, log_files, task_names
    from torchmuster.owner.views.find import find_run, look_at

    view = find_run(run) if follow else look_at(run)
    _tell_reach(view)
    if view.is_workflow:
        from torchmuster.cli.workflow_views import workflow_of

        workflow_of(view)
    elif view.is_sweep:
        name = short_id(view.run_id)
        what = f"the sweep {name} writes no log of its own: each member does"
        raise NotFoundError(what, fix=f"muster logs {name}.0; muster status {name}")
    elif task is not None:
        raise NotFoundError(
            f"the run {short_id(view.run_id)} has no tasks", fix=f"muster logs {run} --rank 0"
        )
    choice = LogChoice(task=task, attempt=attempt, rank=rank)
    names = task_names(view)
    several = len(names) > 1 if view.is_workflow else (view.num_workers or 1) > 1
    joiner = LineJoiner(prefix_always=several and task is None and rank is None)
    joiner.names.update(enumerate(names))
    is_terminal = sys.stdout.isatty()

    def write(number: int, text: str) -> None:
        pieces = joiner.add(number, 1, text)
        if follow:  # a progress bar has no end of line for a long time
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
            # Whole lines: of a progress bar the last state.
            joiner.prefix_always, joiner.whole = True, frozenset({1})
            for number, path in files:
                _print_file(path, partial(write, number), tail)
    except KeyboardInterrupt:
        return 130
    put(joiner.rest())
    return 0


def _print_file(path: str, write: "Callable[[str], None]", tail: int | None) -> None:
    import io

    from torchmuster.files.tail import offset_of_last_lines
    from torchmuster.plainfile import open_plain

    try:
        with io.TextIOWrapper(open_plain(path), errors="surrogateescape", newline="") as log:
            log.seek(offset_of_last_lines(path, tail) if tail is not None else 0)
            while text := log.read(1 << 20):
                write(text)
    except BrokenPipeError:  # who reads ours has gone
        raise
    except OSError as error:
        raise NotFoundError("the log can't be read", where=path, why=error.strerror) from error


@click.command()
@click.argument("run", shell_complete=complete_runs)
def wait(run: str) -> int:
    """Wait for the end of RUN and exit with its exit code."""
    import asyncio

    from torchmuster.cli.ending import ended_with_pods, last_line
    from torchmuster.model.job import describe_job
    from torchmuster.model.states import JobState
    from torchmuster.owner.pods.copy import copied
    from torchmuster.owner.views.account import how_to_go_on
    from torchmuster.owner.views.control import wait_for_result
    from torchmuster.owner.views.find import find_run, view_job
    from torchmuster.ui.messages import paint_report, uses_colour

    view = find_run(run)
    try:
        with copied(view.run_dir) as copy:
            result = asyncio.run(wait_for_result(view.run_dir, copy))
    except KeyboardInterrupt:
        return 130
    if result is None:
        _check_result(view)
        job = view_job(view.run_dir)  # as `muster status`: the scheduler may know
        if job is not None and job.state is JobState.CANCELLED:
            name = short_id(view.run_id)
            echo(f"muster: {name} was cancelled, and left no result: {describe_job(job)}", err=True)
            return 128 + signal.SIGTERM
        of_parts = view.is_sweep or view.is_workflow  # these have no log of their own
        look = f"muster {'restart' if of_parts else 'logs'} {short_id(view.run_id)}"
        raise MusterError(
            f"the run {short_id(view.run_id)} has no result and its owner has gone",
            where=view.run_dir.owner,
            why=describe_job(job) if job is not None else "the process that started it was killed",
            fix=how_to_go_on(view.run_dir) or look,
        )
    if result.report is not None and ended_with_pods(view.run_dir, result):
        echo(paint_report(result.report, colour=uses_colour()), nl=False, err=True)
    echo(last_line(result, view.run_dir), err=True)
    return result.exit_code


@click.command()
@click.argument("run", shell_complete=complete_runs)
def fetch(run: str) -> int:
    """Take here what has not come of RUN, a run in pods: files, logs and record.

    Its first pod waits for that after the end (`take_within` of the site, 15 minutes), and ends when it has been taken. On a
    volume a pod is started that reads it.
    """
    from torchmuster.owner.pods.fetch import fetch as fetch_run
    from torchmuster.owner.views.find import find_run

    fetch_run(find_run(run).run_dir, lambda text: echo(f"muster: {text}", err=True))
    return 0


def _check_result(view: "RunView") -> None:
    """Refuse a result that nobody can read: its run was not lost.

    Raises:
        MusterError: It is damaged.
    """
    from torchmuster.owner.views.record import damage_of_result

    if (damage := damage_of_result(view.run_dir)) is not None:
        name = short_id(view.run_id)
        what = f"how the run {name} ended is not known"
        raise MusterError(what, where=view.run_dir.result, why=damage, fix=f"muster logs {name}")


def identity(view: "RunView") -> str:
    """Return what tells a run from the others: `last` may not be the one that somebody has in mind."""
    from torchmuster.owner.jobs.links import all_jobs

    what = "-"
    if view.workflow is not None:
        what = f"workflow {view.workflow.plan.name}"
    elif view.sweep is not None:
        what = f"sweep of {in_one_line(os.path.basename(view.sweep.plan.run.program.target))}"
    elif view.plan is not None:
        what = in_one_line(os.path.basename(view.plan.program.target))
    jobs = all_jobs(view.run_dir)
    job = f", job {', '.join(jobs[1])} of {jobs[0].name}" if jobs is not None else ""
    return f"{short_id(view.run_id)} ({what}, {view.state.value}{job})"


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option("--now", is_flag=True, help="SIGKILL at once, without the grace.")
def cancel(run: str, *, now: bool) -> int:
    """Stop RUN: SIGTERM to its workers, SIGKILL after its grace."""
    from torchmuster.cli.ending import last_line
    from torchmuster.owner.views.control import stop_and_wait
    from torchmuster.owner.views.find import find_run

    view = find_run(run)
    if view.state.is_final:
        echo(f"the run {short_id(view.run_id)} has ended already: {view.state.value}", err=True)
        from torchmuster.owner.pods.end import remove_left

        if left := remove_left(view.run_dir):
            echo(f"removed what was left on the cluster: {', '.join(left)}", err=True)
        return 0
    if view.is_headless_member:
        sweep = short_id(view.run_id).rpartition(".")[0]
        what = f"{short_id(view.run_id)} is a process of its sweep and ends with it"
        raise UsageError(what, fix=f"muster cancel {sweep}")
    echo(f"cancelling {identity(view)}", err=True)
    grace_s = view.plan.limits.grace_s if view.plan is not None else GRACE_S
    if view.workflow is not None:
        grace_s = view.workflow.plan.grace_s
    if view.sweep is not None:
        grace_s = view.sweep.plan.run.limits.grace_s
    result = stop_and_wait(view, at_once=now, timeout_s=grace_s + 10.0)
    if result is None:
        raise MusterError(
            f"the run {short_id(view.run_id)} has not ended yet", fix=f"muster cancel --now {run}"
        )
    echo(last_line(result, view.run_dir), err=True)
    return 0
