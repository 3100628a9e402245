"""What commands do with a record by its kind; `status`, `logs` and `replay` of a run or session."""

import time
from typing import Any, Protocol

from torchmuster.core import plugs
from torchmuster.core.cli.ending import last_line
from torchmuster.core.cli.messages import last_report, paint_report
from torchmuster.core.files.layout import short_id
from torchmuster.core.model import codec
from torchmuster.core.model.events import fields_of
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import few_of, in_one_line, span
from torchmuster.errors import NotFoundError
from torchmuster.launcher.cli.echo import echo, echo_json
from torchmuster.launcher.model.job import describe_job
from torchmuster.launcher.model.progress import quiet_s
from torchmuster.launcher.model.run import since_suffix
from torchmuster.launcher.ui.table import render_table
from torchmuster.launcher.views.account import Account, account_of, find_saved, how_to_go_on
from torchmuster.launcher.views.elsewhere import elsewhere, is_elsewhere
from torchmuster.launcher.views.find import view_job
from torchmuster.launcher.views.live import last_sample, said_of
from torchmuster.launcher.views.run_view import RunView, problems_of
from torchmuster.launcher.views.training import TrainingView, training_of

_LOG_LINES = 10  # of a pod's log, in a status
_MOST_SAID = 2
_FIRST_ROWS, _LAST_ROWS = 5, 20  # of the attempts


def plain_of(view: "RunView", account: "Account") -> dict[str, Any]:
    """Return the JSON fields that runs of all kinds have."""
    return {
        "run_id": view.run_id,
        "state": view.state.value,
        "started": view.record.started,
        "kind": view.kind.value,
        "submitted": account.submitted,
        "elapsed_s": account.elapsed_s,
        "engine": account.engine,
        "jobs": list(account.jobs),
        "exit_code": account.exit_code,
        "ended_by": account.ended_by,
    }


def _quiet_words(view: "RunView") -> str:
    """Return e.g. `, quiet for 1:20` if the last recorded sample shows idle ranks."""
    sample = last_sample(view.run_dir) if not view.state.is_final else None
    attempts = view.record.attempts
    if sample is None or not attempts or sample.attempt != attempts[-1].number:
        return ""
    still_s = quiet_s(sample)
    return f", quiet for {span(still_s, whole=True)}" if still_s else ""


def print_status(view: "RunView", *, as_json: bool) -> int:
    """Print the state of a run; return 0."""
    only_log = report_reach(view)
    training = training_of(view.run_dir)
    job = view_job(view.run_dir) if view.result is None else None
    account = account_of(view, time.time())
    if as_json:
        plain = {
            **plain_of(view, account),
            "attempts": [
                {"time": one.time, "event": one.start.name, **fields_of(one.start)}
                for one in view.attempts
            ],
            "spares": view.record.spares,
            "said": list(said_of(view.record)),
            "code": codec.to_plain(view.record.code),
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
        from torchmuster.launcher.jobs.jobs import describe_link, describe_lost_head

        link = describe_link(view.run_dir)
        echo(f"job      {describe_job(job)}{f', {link}' if link else ''}")
        if (words := describe_lost_head(view.run_dir, job)) is not None:
            echo(f"problem  {in_one_line(words)}")
    elif view.state is RunState.UNKNOWN and account.jobs:
        forgotten = f"{account.engine} does not know job {account.jobs[-1]} any more"
        echo(f"problem  {forgotten}, and the run has left no result")
    print_account(account, has_job_line=job is not None)
    _print_attempts(view)
    if view.attempts and not view.state.is_final and (pids := view.attempts[-1].pids):
        echo(f"pids     {' '.join(map(str, pids))}  (ranks from 0 on, each on its node)")
    if view.record.imports_why:
        echo(f"imports  each worker makes its own: {in_one_line(view.record.imports_why)}")
    if not view.state.is_final and view.plan is not None and view.plan.spares:
        echo(f"spare    {few_of(view.record.spares, 8) or 'none at the moment'}")
    if not view.state.is_final and (waits := view.record.wait_sentence(time.time())):
        echo(waits)
    for text in said_of(view.record)[-_MOST_SAID:] if not view.state.is_final else ():
        echo(f"said     {in_one_line(text)}")
    if training is not None:
        saved_step = training.saved_step
        if view.state.is_final:  # what a restart finds: snapshots in memory are gone
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


def report_reach(view: "RunView") -> bool:
    """Print why only the first pod's log of a run in pods is known, if so; return whether."""
    if not is_elsewhere(view.run_dir):
        return False
    words = elsewhere().words_on_reach(view.run_dir)
    if words is not None:
        echo(f"muster: {words}", err=True)
    return words is not None


def _print_pod_log(view: "RunView") -> None:
    """Print the end of the first pod's log."""
    try:
        with open(view.run_dir.job_log, errors="replace") as log:
            lines = log.read().splitlines()[-_LOG_LINES:]
    except OSError:
        return
    echo("\n" + "\n".join(lines))


def _print_attempts(view: "RunView") -> None:

    attempts = view.attempts
    rows: list[list[str]] = []
    for one, ended_by in zip(attempts, view.record.ended_by(attempts), strict=True):
        places = few_of((f"{node.node}: {node.ranks}" for node in one.start.nodes), 8)
        rows.append([str(one.number), str(one.num_workers or "-"), places, ended_by])
    if len(rows) > _FIRST_ROWS + _LAST_ROWS + 1:
        left_out = len(rows) - _FIRST_ROWS - _LAST_ROWS
        rows[_FIRST_ROWS:-_LAST_ROWS] = [["...", "", f"{left_out} more attempts", ""]]
    if rows:
        echo("\n" + render_table(["ATTEMPT", "WORKERS", "RANKS", "ENDED BY"], rows), nl=False)


def _print_training(training: "TrainingView", saved_step: int | None) -> None:

    saved = "no snapshot yet" if saved_step is None else f"saved {saved_step}"
    echo(f"\ntraining  step {training.step}, {saved}{_words(training.values, training.not_finite)}")
    rows: list[list[str]] = []
    for e in training.epochs[-10:]:
        ledger = "-"
        if e.samples is not None:
            ledger = f"{e.samples}, each once" + ("" if e.is_whole else " (left early)")
        means = _words(e.values).strip(", ")
        rows.append([str(e.epoch), str(e.step), span(e.elapsed_s), ledger, means])
    if rows:
        echo(render_table(["EPOCH", "STEP", "TIME", "SAMPLES", "MEANS"], rows), nl=False)


def _words(values: dict[str, float], not_finite: dict[str, int] | None = None) -> str:

    since = {name: since_suffix(step) for name, step in (not_finite or {}).items()}
    return "".join(f", {name} {value:.4g}{since.get(name, '')}" for name, value in values.items())


def check_logs(view: "RunView", task: str | None) -> None:
    """Refuse a task, because a run has ranks.

    Raises:
        NotFoundError: A task was named.
    """
    if task is not None:
        name = short_id(view.run_id)
        raise NotFoundError(f"the run {name} has no tasks", fix=f"muster logs {name} --rank 0")


def check_replay(view: "RunView") -> None:
    """Accept the run: it has steps."""
    del view


class KindCommands(Protocol):
    """Interface of the module that a kind plugs in as its `commands`."""

    def print_status(self, view: "RunView", *, as_json: bool) -> int:
        """Print the state; return the exit code."""

    def check_logs(self, view: "RunView", task: str | None) -> None:
        """Refuse, with a `MusterError`, logs that it doesn't have."""

    def check_replay(self, view: "RunView") -> None:
        """Refuse, with a `MusterError`, a record without steps."""


class Restart(Protocol):
    """Restarts a record of this kind; returns the exit code."""

    def __call__(self, view: "RunView", *, detach: bool) -> int:
        """Restart it."""


def restart_of(view: "RunView") -> Restart:
    """Return the function that restarts a record of this kind."""
    found: Restart = plugs.find("kinds", f"{view.kind.value} restart")
    return found


def commands_of(view: "RunView") -> KindCommands:
    """Return the commands for a record of this kind."""
    found: KindCommands = plugs.find("kinds", f"{view.kind.value} commands")
    return found


def clock(seconds: float) -> str:
    """Format a time, in seconds since 1970, in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def print_account(account: "Account", *, has_job_line: bool = False) -> None:
    """Print where and how long it ran, and how it ended, even if the scheduler has forgotten it."""
    if account.jobs and not has_job_line:
        many = "s" if len(account.jobs) > 1 else " "
        echo(f"job{many}     {', '.join(account.jobs)} of {account.engine}")
    elif not account.jobs:
        echo(f"on       {account.engine}")
    duration = f", {span(account.elapsed_s)} since it began"
    if account.exit_code is not None:
        duration = f", took {span(account.elapsed_s)}"
    elif account.ended_by is not None:  # the end was not recorded
        duration = f", last heard of after {span(account.elapsed_s)}"
    lasted = duration if account.elapsed_s is not None else ""
    echo(f"time     submitted {clock(account.submitted)}{lasted}")
    if account.exit_code is not None:
        why = f": {in_one_line(account.ended_by)}" if account.ended_by else ""
        echo(f"exit     {account.exit_code}{why}")
    elif account.ended_by is not None:
        echo(f"end      {in_one_line(account.ended_by)}")
    for line in account.notifiers:
        echo(f"notify   {line}")
