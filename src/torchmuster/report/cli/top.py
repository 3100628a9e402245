"""`muster top`: runs seen live."""

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.options import complete_runs
from torchmuster.launcher.cli.echo import echo, echo_json

if TYPE_CHECKING:
    from torchmuster.launcher.model.live import LiveRun
    from torchmuster.launcher.views.run_view import RunView

_PLAIN_COLUMNS, _LIST_COLUMNS = 100, 200  # where no terminal says how wide it is
_ANSWER_S = 2.0


@click.command()
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option("--once", is_flag=True, help="Print one picture as plain text.")
@options.json()
def top(run: str | None, *, once: bool, as_json: bool) -> int:
    """Show RUN live: its ranks, speed, waits, attempts, snapshots; without RUN, all live and queued runs.

    In a file, a pipe or a dumb terminal it prints one picture, as with --once. The key ? lists all
    keys.
    """
    from torchmuster.launcher.views.find import find_run

    view = find_run(run) if run is not None else None
    has_screen = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM") != "dumb"
    if as_json or once or not has_screen:
        return _print_once(view, as_json=as_json)
    from torchmuster.report.cli.top_screen import show

    return show(view)


def _print_once(view: "RunView | None", *, as_json: bool) -> int:
    from torchmuster.core.model import codec

    if view is None:
        from torchmuster.report.live_list import ListReader

        rows = ListReader().read()
        if as_json:
            echo_json([codec.to_plain(row) for row in rows])
            return 0
        from torchmuster.report.top import overview_lines

        if not rows:
            echo("no runs yet", err=True)
            return 0
        _print(overview_lines(rows, _LIST_COLUMNS))
        return 0
    live = _read_once(view)
    if as_json:
        echo_json(codec.to_plain(live))
        return 0
    from torchmuster.report.top import run_picture

    _print(run_picture(live, _PLAIN_COLUMNS))
    return 0


def _read_once(view: "RunView") -> "LiveRun":
    from torchmuster.launcher.views.live import LiveReader

    if view.state.is_final or not view.has_ranks:
        return LiveReader(view.run_dir).read()
    from torchmuster.launcher.views.head_call import BoardWatch

    watch = BoardWatch(view)
    watch.start()
    watch.wait(_ANSWER_S)
    try:
        return LiveReader(view.run_dir, watch.newest).read()
    finally:
        watch.close()


def _print(lines: Any) -> None:
    for line in lines:
        echo(line.text.rstrip())
