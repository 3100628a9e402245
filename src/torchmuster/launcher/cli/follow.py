"""What runs next to a followed run: the status below its output, its debuggers, its job."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchmuster.core.cli import ending
from torchmuster.errors import MusterError

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result
    from torchmuster.launcher.engines.base import Dialect
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
            with suppress(
                MusterError, OSError, *DAMAGED
            ):  # a scheduler or a disk that doesn't answer now
                columns = os.get_terminal_size(2).columns
                rows = status_rows(reader.read(), columns or 80, self._num_rows)
                with self._shows:
                    if not self._ends.is_set():
                        self._voice.show_status(_painted(rows))
        watch.close()


def is_drawable() -> bool:
    """Return whether standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _painted(rows: list[str]) -> list[str]:
    if os.environ.get("NO_COLOR"):
        return rows
    return [f"\x1b[2m{row}\x1b[0m" for row in rows]


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


def follow_job(
    plan: "RunPlan",
    run_dir: "RunDir",
    dialect: "Dialect",
    job_id: str,
    voice: "TerminalVoice",
    fix: "Callable[[], str]",
) -> "Result | None":
    """Follow a job to its end and return the result; None if it continues without us.

    Raises:
        MusterError: It ended without a result; `fix` returns the remedy.
    """
    import asyncio

    from torchmuster.core.files import atomic
    from torchmuster.core.files.layout import last_lines
    from torchmuster.core.model import codec
    from torchmuster.core.model.states import JobState
    from torchmuster.launcher.jobs.batch import JobFollower
    from torchmuster.launcher.jobs.jobs import cancelled_before_start

    follower = JobFollower(plan, run_dir, dialect, job_id, voice)
    try:
        result = asyncio.run(follower.follow())
    finally:
        follower.close()
    view = follower.view
    is_cancelled = view is not None and view.state is JobState.CANCELLED
    if result is None and is_cancelled and os.path.exists(run_dir.cancelled):
        result = cancelled_before_start(run_dir)  # it was still queued: there is no head
        atomic.write_json(run_dir.result, codec.to_plain(result))
    if result is None and view is not None and view.state.is_final:
        output = "\n".join(last_lines(run_dir.job_log, 12))
        silent = f"it has written nothing: its node may not see {run_dir.path}"
        checks = f"muster engines check {plan.engine}  # says what the nodes see"
        raise MusterError(
            f"job {job_id} ended without a result: {view.state.value}",
            where=run_dir.job_log,
            why=output or "\n".join(word for word in (view.reason, silent) if word),
            fix=fix() if output else checks,
        )
    return result


def ended_with_pods(run_dir: "RunDir", result: "Result") -> bool:
    """Return whether the files of a run in pods may be only on its cluster."""
    from torchmuster.core.model.states import RunState
    from torchmuster.errors import MissingRecordError
    from torchmuster.launcher.views.elsewhere import is_elsewhere

    is_left = result.state in (RunState.LOST, RunState.CANCELLED)
    is_left |= result.exit_code == MissingRecordError.exit_code
    return is_left and is_elsewhere(run_dir)
