"""`muster report`: a page of a run, or of how two runs differ."""

import os
from typing import TYPE_CHECKING

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.options import complete_runs
from torchmuster.errors import RunDirectoryError, UsageError
from torchmuster.launcher.cli.echo import echo

if TYPE_CHECKING:
    from torchmuster.report.story import Story


@click.command()
@click.argument("runs", shell_complete=complete_runs, nargs=-1, metavar="[RUN [OTHER]]")
@click.option(
    "-o",
    "--output",
    metavar="FILE.html",
    help="Where to write the page; default `report.html` in the run's directory.",
)
@options.json("The same as data, on standard output; writes no page.")
def report(runs: tuple[str, ...], output: str | None, *, as_json: bool) -> int:
    """Write one page of all that is known of RUN, default the last one submitted, or of how it differs from OTHER.

    The page is one file that loads nothing: it can be opened, printed, and passed on.

    \b
    muster report
    muster report train-3f2a -o train.html
    muster report train-3f2a train-90c1
    """  # noqa: D301 - \b is click's mark
    from torchmuster.report.find import find_story

    if len(runs) > 2:
        raise UsageError(
            "at most two runs can be compared", where=" ".join(("muster report", *runs))
        )
    stories = [find_story(run) for run in runs or ("last",)]
    if len(stories) == 1:
        return _one(stories[0], output, as_json=as_json)
    return _two(stories[0], stories[1], output, as_json=as_json)


def _one(story: "Story", output: str | None, *, as_json: bool) -> int:
    if as_json:
        _print_json(story)
        return 0
    from torchmuster.core.files.layout import RunDir
    from torchmuster.report.page import render_page

    path = output or RunDir(story.folder).report
    _write(path, render_page(story))
    echo(path)
    return 0


def _two(one: "Story", other: "Story", output: str | None, *, as_json: bool) -> int:
    from torchmuster.report.compare import compare

    for story in (one, other):
        if story.kind == "run":
            continue
        fix = f"give the folder of a training task's run, below {story.folder}/tasks"
        if story.kind == "sweep":
            fix = f"two of its members are: muster report {story.name}.0 {story.name}.1"
        what = f"{story.name} is a {story.kind}, and only training runs are compared"
        raise UsageError(what, fix=fix)
    both = compare(one, other)
    if as_json:
        _print_json(both)
        return 0
    from torchmuster.report.page import render_comparison

    path = output or os.path.join(other.folder, f"report-{one.name}.html")
    _write(path, render_comparison(both, one, other))
    echo(both.sentence)
    echo(path)
    return 0


def _print_json(value: object) -> None:
    import json

    from torchmuster.core.model import codec

    echo(json.dumps(codec.to_plain(value), indent=1, allow_nan=False))


def _write(path: str, page: str) -> None:
    from torchmuster.core.files import atomic

    try:
        atomic.replace_file(path, page.encode(errors="replace"), mode=0o600)
    except OSError as error:
        raise RunDirectoryError(
            "the page can't be written",
            where=os.path.abspath(path),
            why=error.strerror or str(error),
            fix="-o FILE.html writes it elsewhere",
        ) from error
