"""`muster doctor`: check all nodes before a job."""

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import options
from torchmuster.errors import ManyErrors, MusterError, RunDirectoryError, UsageError

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Place
    from torchmuster.core.files.layout import RunDir
    from torchmuster.diagnose.gather import Outcome

# Above this number of simulated nodes, importing torch in each takes too long.
_JOB_UP_TO = 8
# Options of `muster run` that are passed on unchanged.
_PASSED_OPTIONS = (
    "nodes",
    "nproc_per_node",
    "engine",
    "python",
    "hosts",
    "hostfile",
    "time_limit",
    "queue",
    "account",
    "gpus_per_node",
    "cpus_per_node",
    "join_timeout",
)
_NODE_OPTIONS = ("nodes", "engine", "hosts", "hostfile", "nproc_per_node")  # options choosing nodes
_WORDS = {"engine": "--on", "time_limit": "--time"}


@click.command()
@options.on
@click.option(
    "--nodes", metavar="N", help="Number of nodes; inside a job default all of its nodes."
)
@click.option("--nproc-per-node", metavar="N", help="Workers of the test job on each node.")
@click.option("--script", metavar="FILE", help="Check that all nodes see this script.")
@options.here
@click.option("--no-job", is_flag=True, help="Only check the nodes, run no test job.")
@click.option("--seconds", default=0.5, metavar="S", help="Length of the test job; default 0.5.")
@options.python
@options.hosts
@options.hostfile
@click.option("--time", "time_limit", metavar="TIME", help="Time limit of the job, e.g. 5m.")
@options.queue
@options.account
@options.gpus_per_node
@options.cpus_per_node
@click.option("--join-timeout", default="1m", metavar="TIME", help="Wait for nodes; default 1m.")
@options.json("Print everything in JSON.")
def doctor(**given: Any) -> int:
    """Check every node for problems that would make a job fail.

    Without options it checks this machine. With --nodes or --on it runs on those nodes, as
    `muster run` would: names, networks, clocks, versions, limits, folders, GPUs; all pairs of nodes
    connect to each other; then a test job runs an all-reduce on all ranks. The exit code is 0 if
    all is well, 1 with warnings, 2 with failures, 3 if not all could be checked.

    \b
    muster doctor
    muster doctor --nodes 2 --nproc-per-node 2
    muster doctor --on mycluster --nodes 4 --script train.py
    """  # noqa: D301 - \b is click's mark
    script = _check_script(given["script"])
    is_named = any(given[name] for name in _NODE_OPTIONS)
    if (code := _place_of(given).instead()) is not None:
        return code  # the whole command, on a node of the job around this shell
    if not is_named and _simulates({**given, "engine": "local"}):
        from torchmuster.diagnose.gather import check_this_machine

        outcome = check_this_machine(script)
    else:
        outcome = _check_with_run(given, script)
    _print(outcome, as_json=given["as_json"])
    return outcome.exit_code


def _check_with_run(given: dict[str, Any], script: str | None) -> "Outcome":
    try:
        return _look_with_a_run(given, script)
    except (MusterError, ManyErrors) as error:
        errors = error.errors if isinstance(error, ManyErrors) else [error]
        if any(type(one) is UsageError for one in errors):  # the command line is wrong
            raise
        from torchmuster.diagnose.gather import outcome_of_errors

        return outcome_of_errors(errors)


def _check_script(script: str | None) -> str | None:
    if script is not None and not os.path.isfile(script):
        raise UsageError("the script does not exist", where=f"--script {script}")
    return script


def _simulates(given: dict[str, Any]) -> bool:
    """Return whether the nodes are simulated on this machine; a surrounding job's are not."""
    return _place_of(given).is_simulated


def _place_of(given: dict[str, Any]) -> "Place":
    from torchmuster.core.cli.find import find_place, where_of_options
    from torchmuster.core.spec.problems import Problems

    return find_place(where_of_options(given), Problems())


def _look_with_a_run(given: dict[str, Any], script: str | None) -> "Outcome":
    from torchmuster.core.files.layout import RunDir, runs_dir
    from torchmuster.core.owner.create import new_run_id
    from torchmuster.diagnose.gather import (
        JOB_FILE,
        prepare_job,
        read_outcome,
        remove_run,
        wait_for_job,
    )

    try:
        folder = prepare_job()
    except OSError as error:
        raise RunDirectoryError("the test job can't be written", why=str(error)) from error
    has_job = not given["no_job"] and not _are_many_here(given)
    run_id = new_run_id("doctor")
    words = _words(given, run_id)
    # Without the test job no interpreter has to import torch.
    words += [] if has_job else ["--start", "fresh"]
    words += [JOB_FILE, "--seconds", str(given["seconds"])]
    run_dir = RunDir(os.path.join(runs_dir(), run_id))
    _run(words, folder, script, "long" if has_job else "only")
    outcome = read_outcome(run_dir, has_job=has_job)
    if outcome.could_tell:
        wait_for_job(run_dir)  # the head still records the end, and its log arrives last
        remove_run(run_dir)
    else:
        _say_where(run_dir)
    return outcome


def _are_many_here(given: dict[str, Any]) -> bool:
    """Return whether importing torch on all simulated nodes takes minutes; if so, say so."""
    number = (given["nodes"] or "1").partition(":")[2] or given["nodes"] or "1"
    if not number.isdecimal() or int(number) <= _JOB_UP_TO or not _simulates(given):
        return False
    click.echo(
        f"muster: {number} simulated nodes: no test job, it would import torch {number} times",
        err=True,
    )
    return True


def _words(given: dict[str, Any], run_id: str) -> list[str]:
    """Return the options for `muster run`."""
    words = ["--run-id", run_id, "--tee", "none", "--max-restarts", "0"]
    words += ["--here"] if given["here"] else []
    for name in _PASSED_OPTIONS:
        if given[name] is not None:
            words += [_WORDS.get(name, f"--{name.replace('_', '-')}"), str(given[name])]
    return words


def _run(words: list[str], folder: str, script: str | None, form: str) -> None:
    from torchmuster.core.cli.run import launch, request_of, run

    looked_at = os.path.abspath(script) if script is not None else None
    request = request_of(run.make_context("run", words).params)
    launch(replace(request, cwd=folder, preflight=form, preflight_script=looked_at))


def _say_where(run_dir: "RunDir") -> None:
    if os.path.isdir(run_dir.path):
        click.echo(f"muster: its files are kept in {run_dir.path}", err=True)


def _print(outcome: "Outcome", *, as_json: bool) -> None:
    from torchmuster.diagnose.gather import as_values

    if as_json:
        click.echo(json.dumps(as_values(outcome), indent=2))
        return
    click.echo(render(outcome), nl=False)


def render(outcome: "Outcome") -> str:
    """Return the output: a table of nodes, a matrix, one block for each finding, a last line."""
    from torchmuster.diagnose.doctor import show
    from torchmuster.diagnose.finding import render as render_finding
    from torchmuster.diagnose.gather import describe_fit, fit_of
    from torchmuster.launcher.ui.table import render_table

    parts = []
    if outcome.nodes:
        rows = [show.table_row(row) for row in outcome.nodes]
        parts.append(render_table(show.COLUMNS, rows))
    if outcome.pairs:
        names = [row["node"] for row in outcome.nodes]
        parts.append(render_table(*show.matrix_rows(names, outcome.pairs)))
    fit = fit_of(outcome.job) if outcome.job is not None else None
    if fit is not None:
        parts.append(f"{describe_fit(fit)}\n")
    parts += [render_finding(finding) for finding in outcome.findings]
    if outcome.traceback:
        parts.append("\n".join(["the test job:", *(f"  {line}" for line in outcome.traceback), ""]))
    parts.append(f"{_summary(outcome)}\n")
    return "\n".join(parts)


def _summary(outcome: "Outcome") -> str:
    counts = dict.fromkeys(("failure", "warning", "note"), 0)
    for finding in outcome.findings:
        counts[finding.level.value] += 1
    found = [f"{n} {word}{'s' if n != 1 else ''}" for word, n in counts.items() if n]
    text = ", ".join(found) or "nothing is wrong"
    if not outcome.could_tell:
        return f"{text}; not all could be checked"
    return text
