"""`muster explain`: the root cause of a failed run, or of any failed job from its logs."""

import json
import os
import stat
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.options import complete_files
from torchmuster.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from typing import BinaryIO

    from torchmuster.diagnose.explain.events import LogVerdict
    from torchmuster.launcher.views.run_view import RunView

_DASH = "-"
_PIPE = "give it a log: `kubectl logs POD | muster explain -`, or `muster explain - < FILE`"
_LOG_ENDINGS = (
    *(".log", ".out", ".err", ".txt", ".tar", ".gz", ".tgz", ".xz", ".txz"),
    *(".bz2", ".tbz2", ".zst", ".tzst"),
)


@click.command()
@click.argument("what", shell_complete=complete_files, nargs=-1, metavar="[RUN|LOG...|-]")
@click.option(
    "--script",
    metavar="JOBSCRIPT",
    shell_complete=complete_files,
    help="The job's script: what `muster lint` finds in it is evidence too.",
)
@options.json()
def explain(what: tuple[str, ...], script: str | None, as_json: bool) -> int:
    """Explain why a run of muster, by default the last one, or any other job failed, from its logs.

    Without RUN and LOG it reads what is piped into it, if there is any. LOG is a file, a folder, a gzip, xz, bz2, zstd or tar archive: the output of torchrun, srun,
    PBS or Kubernetes, one file or one for each node; - is standard input. The exit code is 0 if
    the cause was found (confidence medium or high), 3 if it is unknown or a guess, 4 if nothing
    failed.

    \b
    muster explain
    muster explain RUN
    muster explain slurm-4711.out
    muster explain job.o123 job.e123
    muster explain --script job.sh slurm-4711.out
    kubectl logs -l job=train --prefix | muster explain
    """  # noqa: D301 - \b is click's mark
    verdict, own = _verdict(what or ((_DASH,) if _is_piped() else ("last",)))
    if script is not None:
        verdict = _with_script(verdict, script)
    if as_json:
        from torchmuster.diagnose.explain.own_run import as_values

        click.echo(json.dumps(as_values(verdict), indent=2))
    else:
        from torchmuster.diagnose.explain.own_run import render_verdict

        click.echo(render_verdict(verdict, own), nl=False)
    return _exit_code(verdict)


def _is_piped() -> bool:
    """Return whether standard input is a pipe or a file; a terminal and /dev/null are neither."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # it is closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _with_script(verdict: "LogVerdict", script: str) -> "LogVerdict":
    """Add lint's findings about the job's script to the verdict and return it.

    Raises:
        UsageError: The script can't be read.
    """
    from torchmuster.diagnose.cli.lint import read_script
    from torchmuster.diagnose.explain.own_run import with_script
    from torchmuster.diagnose.lint.job import parse
    from torchmuster.diagnose.lint.lint import lint

    found = lint(parse(read_script(script), script))
    return with_script(verdict, [(script, finding.line, finding) for finding in found])


def _exit_code(verdict: "LogVerdict") -> int:
    from torchmuster.diagnose.finding import Confidence

    if verdict.healthy:
        return 4
    first = verdict.first
    return 0 if first is not None and first.confidence is not Confidence.LOW else 3


def _verdict(what: tuple[str, ...]) -> "tuple[LogVerdict, str | None]":
    """Return the verdict and, for a run of muster, its state in words."""
    from torchmuster.diagnose.explain.case import Case
    from torchmuster.diagnose.explain.judge import judge
    from torchmuster.diagnose.logs import STDIN, read_logs

    year = datetime.now(tz=UTC).year
    if _DASH in what:
        others = _paths(tuple(word for word in what if word != _DASH))
        streams = [(STDIN, _standard_input())]
        return judge(Case(read_logs(others, year=year, streams=streams))), None
    view = _run_of(what[0]) if len(what) == 1 else None
    if view is None:
        return judge(Case(read_logs(_paths(what), year=year))), None
    from torchmuster.core.files.layout import short_id
    from torchmuster.core.model.states import RunState
    from torchmuster.diagnose.explain.own_run import foreign_store, with_own_result

    case = Case(read_logs(_logs_of_run(view), year=year))
    verdict = with_own_result(judge(case), view.result, view.record, state=view.state)
    foreign = (
        foreign_store(case, view.result, view.record.masters) if view.result is not None else None
    )
    if foreign is not None:
        verdict = replace(verdict, found=(foreign, *verdict.found))
    if verdict.healthy and view.state is RunState.RUNNING:
        name = short_id(view.run_id)
        verdict = replace(verdict, collect=(f"muster stacks {name}", f"muster top {name}"))
    return verdict, _state_of_run(view)


def _state_of_run(view: "RunView") -> str:
    from torchmuster.core.cli.ending import last_line
    from torchmuster.core.files.layout import short_id

    words = f"is {view.state.value}"
    if view.result is not None:
        words = last_line(view.result, view.run_dir)
    return f"the run {short_id(view.run_id)} {words}"


def _standard_input() -> "BinaryIO":
    """Return standard input as a stream of bytes.

    Raises:
        UsageError: Standard input is closed or a terminal.
    """
    stream = sys.stdin
    if stream is None or stream.closed:
        raise UsageError("standard input is closed", where="muster explain -", fix=_PIPE)
    if stream.isatty():
        raise UsageError(
            "standard input is a terminal, and no log", where="muster explain -", fix=_PIPE
        )
    return stream.buffer


def _run_of(word: str) -> "RunView | None":
    """Return the run that an argument names; None if it names a file or a folder of logs."""
    from torchmuster.core.files.layout import RunDir
    from torchmuster.launcher.views.find import find_run, is_run, view_run

    folder = RunDir(os.path.abspath(word))
    if is_run(folder):
        return view_run(folder)
    return None if os.path.exists(word) or _looks_like_a_path(word) else find_run(word)


def _looks_like_a_path(word: str) -> bool:
    return os.sep in word or word.endswith(_LOG_ENDINGS)


def _paths(what: tuple[str, ...]) -> list[str]:
    """Return the logs that the arguments name: files and folders as they are, a run by its name.

    Raises:
        UsageError: Some do not exist (one message for all), or a file can't be unpacked.
    """
    found: list[str] = []
    missing: list[str] = []
    for word in what:
        if os.path.exists(word):
            found.append(word)
            continue
        try:
            view = _run_of(word)
        except NotFoundError:
            view = None
        if view is None:
            missing.append(word)
        else:
            found += _logs_of_run(view)
    _refuse_zstd(found)
    if missing:
        raise UsageError(
            f"there is no file and no run {', '.join(f'`{word}`' for word in missing)}",
            fix=_near(missing[0]),
        )
    return found


def _refuse_zstd(paths: list[str]) -> None:
    """Refuse named files that can't be unpacked here; inside a folder they only give a note.

    Raises:
        UsageError: A file is compressed in a form that nothing here unpacks.
    """
    from torchmuster.diagnose.logs import by_hand, can_unpack, packing_of

    for path in filter(os.path.isfile, paths):
        try:
            with open(path, "rb") as file:
                packing = packing_of(file.read(8))
        except OSError:
            continue
        if packing is not None and not can_unpack(packing):
            raise UsageError(
                f"{packing} is not unpacked here", where=path, fix=by_hand(packing, path)
            )


def _near(word: str) -> str:
    from torchmuster.core.spec.problems import near_file

    return near_file(word) or "`muster ps` lists the runs; give logs by their path"


def _logs_of_run(view: "RunView") -> list[str]:
    folder = view.run_dir
    logs = [os.path.join(folder.path, "logs"), folder.job_log, folder.supervisor_log]
    found = [path for path in logs if os.path.exists(path)]
    if not found and view.result is None:
        raise UsageError(f"the run {view.run_id} has no logs", where=folder.path)
    return found
