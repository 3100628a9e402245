"""`muster convert`: torchrun boilerplate of a workflow file becomes `nodes`, `nproc_per_node` and `script`."""

import difflib
import os
from typing import TYPE_CHECKING, Any

import click

from torchmuster.cli.completion import complete_files
from torchmuster.cli.sets import SetCommand, value_options
from torchmuster.errors import ManyErrors, UsageError

if TYPE_CHECKING:
    from torchmuster.diagnose.convert.convert import Conversion
    from torchmuster.spec.source import Source


@click.command(cls=SetCommand)
@click.argument("file", shell_complete=complete_files)
@click.option("-o", "--output", metavar="OUT", help="Write the new text here; may be FILE itself.")
@click.option("--diff", "only_diff", is_flag=True, help="Print the difference instead of the text.")
@value_options
def convert(**given: Any) -> int:
    """Turn the torchrun boilerplate of the workflow in FILE into the short form.

    The new text goes to standard output, the difference to standard error; FILE is not changed.

    \b
    muster convert train.yaml --diff
    muster convert train.yaml -o short.yaml
    """  # noqa: D301 - \b is click's mark
    from torchmuster.spec.workflow.load import read_source
    from torchmuster.ui.messages import print_notes, print_warnings

    source = read_source(given["file"])
    done = _convert(source, given)
    if not done.converted:
        raise ManyErrors(list(done.refusals))
    print_warnings(done.refusals)
    print_notes([*done.notes, *_moved(source.path, given["output"])])
    difference = _difference(source, done, given["output"])
    if given["output"]:
        _write(given["output"], done.text)
    elif not given["only_diff"]:
        click.echo(done.text, nl=False)
    click.echo(difference, nl=False, err=not given["only_diff"])
    return 0


def _convert(source: "Source", given: dict[str, Any]) -> "Conversion":
    from torchmuster.diagnose.convert.convert import convert_workflow
    from torchmuster.spec.problems import Problems
    from torchmuster.spec.values import parse_set_strings, parse_sets

    problems = Problems()
    sets = parse_sets(given["sets"], problems)
    texts = parse_set_strings(given["set_strings"], problems)
    if problems.found:
        raise ManyErrors(problems.found)
    return convert_workflow(source, sets, texts)


def _moved(path: str, output: str | None) -> list[str]:
    """Return a note when the new file lies elsewhere: paths in it start at its own folder."""
    folders = [os.path.dirname(os.path.realpath(p)) for p in (path, output or path)]
    if folders[0] == folders[1]:
        return []
    return [f"`script` and `localpath` of the new file start at {folders[1]}"]


def _difference(source: "Source", done: "Conversion", output: str | None) -> str:
    lines = difflib.unified_diff(
        source.text.splitlines(keepends=True),
        done.text.splitlines(keepends=True),
        source.path,
        output or f"{source.path} (converted)",
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _write(path: str, text: str) -> None:
    """Write the file whole or not at all."""
    path = os.path.realpath(path)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", newline="") as file:
            file.write(text)
        if os.path.exists(path):
            os.chmod(temporary, os.stat(path).st_mode & 0o7777)
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError("the new text can't be written", where=path, why=error.strerror) from error
