"""What runs next to a followed run: the status below its output, its debuggers, its job."""

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchmuster.core.cli import ending
from torchmuster.errors import MusterError

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.launcher.views.execute import DebuggerServer

_BEGIN_S = 5.0  # a shorter run needs no status, and a start needs the processor
_EVERY_S = 2.0  # as often as agents report


class StatusLine:
    """Draws the status of a run until it is closed; does nothing where nobody would see it.

    Args:
        voice: Writes to the terminal.
        run_dir: Directory of the run.
        kind: One of `CHOICES`.
    """

    def __init__(self, voice: "TerminalVoice", run_dir: "RunDir", kind: str) -> None:
        self._voice, self._run_dir = voice, run_dir
        self._num_rows = ending.CHOICES.index(kind)
        self._ends = threading.Event()
        self._shows = threading.Lock()  # no rows after the end

    def start(self) -> None:
        """Start drawing, after some seconds."""
        if self._num_rows and is_drawable():
            threading.Thread(target=self._work, name="status", daemon=True).start()

    def end(self) -> None:
        """Stop drawing, and erase the status."""
        with self._shows:
            if not self._ends.is_set():
                self._ends.set()
                self._voice.show_status(())

    def close(self) -> None:
        """Stop drawing, and erase the status."""
        self.end()

    def _work(self) -> None:
        if self._ends.wait(_BEGIN_S):
            return
        from torchmuster.core.owner.record import DAMAGED
        from torchmuster.launcher.ui.run_lines import status_rows
        from torchmuster.launcher.views.find import view_run
        from torchmuster.launcher.views.head_call import BoardWatch
        from torchmuster.launcher.views.live import LiveReader

        view = view_run(self._run_dir)
        watch = BoardWatch(view, ask_every_s=_EVERY_S)
        if view.has_ranks:
            watch.start()
        reader = LiveReader(self._run_dir, watch.newest)
        while not self._ends.wait(_EVERY_S):
            # A scheduler or a disk may not answer now.
            with suppress(MusterError, OSError, *DAMAGED):
                columns = os.get_terminal_size(2).columns
                rows = status_rows(reader.read(), columns or 80, self._num_rows)
                with self._shows:
                    if not self._ends.is_set():
                        plain = os.environ.get("NO_COLOR")
                        dim = [row if plain else f"\x1b[2m{row}\x1b[0m" for row in rows]
                        self._voice.show_status(dim)
        watch.close()


def is_drawable() -> bool:
    """Return whether standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def status_screen(plan: Any, run_dir: "RunDir", voice: "TerminalVoice") -> StatusLine:
    """Return the status of a followed run; it is off if `muster doctor` or pdb has the terminal."""
    is_quiet = getattr(plan, "preflight", "") in ("long", "only")
    is_quiet |= getattr(plan, "debugger", None) == "pdb"
    return StatusLine(voice, run_dir, "off" if is_quiet else ending.wanted())


class DebuggerScreen:
    """Connects the user's debugger to a rank that waits for it, while the run is followed here."""

    def __init__(self, plan: Any, run_dir: "RunDir", voice: "TerminalVoice") -> None:
        self._plan, self._run_dir, self._voice = plan, run_dir, voice
        self._server: DebuggerServer | None = None

    def start(self) -> None:
        """Start listening if the run has a debugger."""
        if getattr(self._plan, "debugger", None) is None:
            return
        from torchmuster.launcher.views.execute import DebuggerServer

        folder, voice = self._plan.program.cwd, self._voice
        self._server = DebuggerServer(self._run_dir, folder, voice.explain, voice.print)
        self._server.start()

    def end(self) -> None:
        """Do nothing: the debugger may still be in use until `close`."""

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
