"""The status below the output of a run that is followed on a terminal: read and drawn beside everything else."""

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from torchmuster.errors import MusterError

if TYPE_CHECKING:
    from torchmuster.files.layout import RunDir
    from torchmuster.files.terminal import TerminalVoice

CHOICES = ("off", "line", "full")
_KEY = "torchmuster.progress"
_BEGIN_S = 5.0  # a shorter run needs none, and its start needs the processor
_EVERY_S = 2.0  # agents report as often


def _keep(context: click.Context, _: click.Parameter, value: str | None) -> None:
    context.meta[_KEY] = value


option = click.option(
    "--progress",
    type=click.Choice(CHOICES),
    expose_value=False,  # read where the run is followed, behind many calls that don't care
    callback=_keep,
    help="Status below the output, on a terminal: no, one row (default) or two.",
)


class StatusLine:
    """Draws the status of a run until it is closed; does nothing where nobody would see it.

    Args:
        voice: Writes on the terminal.
        run_dir: Of the run.
        kind: One of `CHOICES`.
    """

    def __init__(self, voice: "TerminalVoice", run_dir: "RunDir", kind: str) -> None:
        self._voice, self._run_dir = voice, run_dir
        self._num_rows = CHOICES.index(kind)
        self._ends = threading.Event()
        self._shows = threading.Lock()  # no rows come behind the end

    def start(self) -> None:
        """Begin after some seconds."""
        if self._num_rows and is_drawable():
            threading.Thread(target=self._work, name="status", daemon=True).start()

    def close(self) -> None:
        """Draw no more, and take away what stands there."""
        with self._shows:
            if not self._ends.is_set():
                self._ends.set()
                self._voice.show_status(())

    def _work(self) -> None:
        if self._ends.wait(_BEGIN_S):
            return
        from torchmuster.owner.views.board_watch import BoardWatch
        from torchmuster.owner.views.find import view_run
        from torchmuster.owner.views.live import LiveReader
        from torchmuster.owner.views.record import DAMAGED
        from torchmuster.ui.status_line import status_rows

        view = view_run(self._run_dir)
        watch = BoardWatch(view, ask_every_s=_EVERY_S)
        if view.has_ranks:
            watch.start()
        reader = LiveReader(self._run_dir, watch.newest)
        while not self._ends.wait(_EVERY_S):
            with suppress(
                MusterError, OSError, *DAMAGED
            ):  # a scheduler or a disk that does not answer now
                columns = os.get_terminal_size(2).columns
                rows = status_rows(reader.read(), columns or 80, self._num_rows)
                with self._shows:
                    if not self._ends.is_set():
                        self._voice.show_status(_painted(rows))
        watch.close()


def is_drawable() -> bool:
    """Say whether standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def wanted() -> str:
    """Return what the command that runs now was told by `--progress`."""
    context = click.get_current_context(silent=True)
    return (context.meta.get(_KEY) if context is not None else None) or CHOICES[1]


def _painted(rows: list[str]) -> list[str]:
    if os.environ.get("NO_COLOR"):
        return rows
    return [f"\x1b[2m{row}\x1b[0m" for row in rows]
