"""`muster explain`: the root cause of a failed run, or of any job by its logs."""

import json
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from torchmuster.errors import MusterError, NotFoundError, UsageError

if TYPE_CHECKING:
    from torchmuster.doctor.explain.events import Verdict

_CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.command(context_settings=_CONTEXT)
@click.argument("what", nargs=-1, required=True, metavar="RUN|LOG...")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict in JSON.")
def explain(what: tuple[str, ...], as_json: bool) -> int:
    """Say why a run failed: of muster, or of anything else by its logs.

    LOG is a file, a folder, a gzip or tar archive: what torchrun, srun, PBS or Kubernetes wrote, one file or one for
    each node. The exit code is 0 when the cause was found or there is no failure, 3 when it can't be told.

    \b
    muster explain RUN
    muster explain slurm-4711.out
    muster explain job.o123 job.e123
    """  # noqa: D301 - \b is click's mark
    verdict = _verdict(what)
    if as_json:
        from torchmuster.doctor.explain.words import as_values

        click.echo(json.dumps(as_values(verdict), indent=2))
    else:
        from torchmuster.doctor.explain.words import render_verdict

        click.echo(render_verdict(verdict), nl=False)
    return 0 if verdict.found or verdict.healthy else 3


def _verdict(what: tuple[str, ...]) -> "Verdict":
    from torchmuster.doctor.explain.case import Case
    from torchmuster.doctor.explain.judge import judge
    from torchmuster.doctor.explain.scan import read_logs

    paths = _paths(what)
    return judge(Case(read_logs(paths, year=datetime.now(tz=UTC).year)))


def _paths(what: tuple[str, ...]) -> list[str]:
    """Return the logs that are meant: files as they are, a run by its name."""
    found: list[str] = []
    problems: list[MusterError] = []
    for word in what:
        if os.path.exists(word):
            found.append(word)
            continue
        try:
            found += _logs_of_run(word)
        except NotFoundError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return found


def _logs_of_run(run_id: str) -> list[str]:
    from torchmuster.run.find import find_run

    view = find_run(run_id)
    folder = view.run_dir
    logs = [os.path.join(folder.path, "logs"), folder.job_log, folder.supervisor_log]
    found = [path for path in logs if os.path.exists(path)]
    if not found:
        raise UsageError(f"the run {view.run_id} has no logs", where=folder.path)
    return found
