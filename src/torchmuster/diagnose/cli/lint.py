"""`muster lint`: find mistakes in a job script before it waits in a queue."""

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.options import complete_files
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.diagnose.finding import Finding

_MAX_SIZE_BYTES = 256 * 1024
_EXIT_CODES = {"error": 2, "warning": 1, "note": 0}


@click.command()
@click.argument(
    "files", shell_complete=complete_files, nargs=-1, required=True, metavar="JOBSCRIPT..."
)
@options.json()
def lint(files: tuple[str, ...], as_json: bool) -> int:
    """Find mistakes in a job script: sbatch, qsub, or a torchrun line.

    Nothing is run. `-` reads standard input. The exit code is 0 without errors and warnings,
    1 with warnings, 2 with errors.

    \b
    muster lint job.sh
    muster lint --json *.sbatch
    """  # noqa: D301 - \b is click's mark
    from torchmuster.diagnose.lint.job import parse
    from torchmuster.diagnose.lint.lint import lint as find
    from torchmuster.diagnose.lint.lint import starts_training

    found: list[tuple[str, Finding]] = []
    for path in files:
        name = "<stdin>" if path == "-" else path
        job = parse(read_script(path), name)
        found += [(name, finding) for finding in find(job)]
        if not starts_training(job):
            click.echo(f"muster: {name} has no line that is known to start training", err=True)
    if as_json:
        records = [_as_record(name, finding) for name, finding in found]
        click.echo(json.dumps(records, indent=2))
    else:
        click.echo(_as_text(found))
    return max((_EXIT_CODES[finding.word] for _, finding in found), default=0)


def read_script(path: str) -> str:
    """Return the text of a script; bytes that are not UTF-8 are replaced.

    Raises:
        UsageError: The script can't be read, or is too large.
    """
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_MAX_SIZE_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(_MAX_SIZE_BYTES + 1)
    except OSError as error:
        raise UsageError("the job script can't be read", where=path, why=error.strerror) from error
    if len(data) > _MAX_SIZE_BYTES:
        what = f"the job script is larger than {_MAX_SIZE_BYTES // 1024} KiB"
        raise UsageError(what, where=path, fix="give the script that is submitted, not its output")
    return data.decode("utf-8", errors="replace")


def _as_text(found: "list[tuple[str, Finding]]") -> str:
    """Return one block for each finding, and a line with their numbers."""
    blocks = [_as_block(name, finding) for name, finding in found]
    counts = {word: sum(f.word == word for _, f in found) for word in _EXIT_CODES}
    said = [f"{count} {word}{'s' * (count > 1)}" for word, count in counts.items() if count]
    return "\n".join([*blocks, ", ".join(said) or "nothing was found"])


def _as_block(name: str, finding: "Finding") -> str:
    from torchmuster.diagnose.finding import render

    return render(replace(finding, at=f"{name}:{finding.line}"), finding.word)


def _as_record(name: str, finding: "Finding") -> dict[str, str | int | None]:
    return {
        "file": name,
        "line": finding.line,
        "level": finding.word,
        "rule": finding.cause,
        "what": finding.error,
        "why": finding.because[0],
        "fix": finding.hint,
    }
