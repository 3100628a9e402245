"""Follow a run from Python: rank 0's output and a status line, in a terminal, notebook or file."""

import asyncio
import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.text import as_bytes, printable
from torchmuster.core.owner.record import Follow
from torchmuster.errors import MusterError, NotFoundError
from torchmuster.launcher.ui.run_lines import status_rows
from torchmuster.launcher.views.control import LogChoice, log_files
from torchmuster.launcher.views.find import any_result, owner_lives, view_run
from torchmuster.launcher.views.head_call import BoardWatch
from torchmuster.launcher.views.live import LiveReader

_POLL_S = 0.1
_STATUS_EVERY_S = 2.0  # as often as agents report
_COLUMNS = 100  # of a notebook cell


def follow(run_dir: RunDir) -> None:
    """Show a run until it ends."""
    for pause_s in _show(run_dir):
        threading.Event().wait(pause_s)


async def follow_async(run_dir: RunDir) -> None:
    """Show a run until it ends, without blocking the event loop."""
    with contextlib.closing(_show(run_dir)) as pauses:
        for pause_s in pauses:
            await asyncio.sleep(pause_s)


def _show(run_dir: RunDir) -> Generator[float, None, None]:
    """Show new output; yield the pauses between two polls, in seconds."""
    shown = status_display()
    follow = Follow()
    watch = BoardWatch(view_run(run_dir), ask_every_s=_STATUS_EVERY_S)
    watch.start()
    reader = LiveReader(run_dir, watch.newest)
    try:
        status_at = time.monotonic() + _STATUS_EVERY_S
        while True:
            over = any_result(run_dir) is not None or not owner_lives(run_dir)
            with contextlib.suppress(NotFoundError):  # no output of rank 0's newest attempt yet
                for _, text in follow.texts(log_files(view_run(run_dir), LogChoice(rank=0))):
                    shown.write(as_bytes(text).decode(errors="replace"))
            if over:
                return
            if time.monotonic() >= status_at:
                status_at = time.monotonic() + _STATUS_EVERY_S
                shown.show_run(reader)
            yield _POLL_S
    finally:
        watch.close()
        shown.show("")


def shown(run_dir: RunDir, pauses: Iterator[float]) -> Iterator[float]:
    """Pass on the pauses of a wait; in a notebook, show the run's status in the cell meanwhile."""
    cell = _cell()
    if cell is None:
        yield from pauses
        return
    reader, status_at = LiveReader(run_dir), time.monotonic() + _STATUS_EVERY_S
    try:
        for pause_s in pauses:
            if time.monotonic() >= status_at:
                status_at = time.monotonic() + _STATUS_EVERY_S
                cell.show_run(reader)
            yield pause_s
    finally:
        cell.show("")


class StatusDisplay:
    """An output without a status line; prints only rank 0's lines."""

    def write(self, text: str) -> None:
        """Write output of rank 0."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def show(self, row: str) -> None:
        """Replace the status row; an empty row removes it."""

    def show_run(self, reader: LiveReader) -> None:
        """Show the status of a run, unless it can't be read now, e.g. from a silent scheduler."""
        with contextlib.suppress(MusterError, OSError):
            self.show("".join(status_rows(reader.read(), self.columns(), 1)))

    def columns(self) -> int:
        """Return the greatest width of a status row, in columns."""
        return _COLUMNS


class _Terminal(StatusDisplay):
    """A status row below the output; it is erased before more output is written."""

    def __init__(self) -> None:
        self._row = ""
        self._is_open = False  # the last output has no newline yet

    def write(self, text: str) -> None:
        row = self._row
        self.show("")
        super().write(text)
        self._is_open = not text.endswith("\n")
        self.show(row)

    def show(self, row: str) -> None:
        if self._row:
            sys.stdout.write("\r\x1b[K")
        self._row = "" if self._is_open else row
        sys.stdout.write(printable(self._row))
        sys.stdout.flush()

    def columns(self) -> int:
        return shutil.get_terminal_size().columns


class _Cell(StatusDisplay):
    """A display of its own in a notebook cell; each status replaces the last."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, row: str) -> None:
        data = {"text/plain": printable(row)}
        if self._handle is not None:
            self._handle.update(data, raw=True)
        elif row:
            self._handle = self._display(data, raw=True, display_id=True)


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def status_display() -> StatusDisplay:
    """Return the status display for this output: a notebook cell, a terminal, or plain lines."""
    if (cell := _cell()) is not None:
        return cell
    return _Terminal() if sys.stdout.isatty() else StatusDisplay()


def _cell() -> _Cell | None:
    """Return a display in the running cell; None outside a notebook."""
    if not in_notebook():
        return None
    display: Any = sys.modules["IPython.display"].display
    return _Cell(display)
