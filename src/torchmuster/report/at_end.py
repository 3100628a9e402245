"""Make the page of a failed run at its end; the client waits at most one second for it.

The client makes it after the verdict, so that nothing important waits. If it takes longer, a
separate process, `python -m torchmuster.report.at_end RUN_DIR`, makes it and outlives the client. If there
is no page, `report.log` has the reason.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, near, short_id
from torchmuster.errors import MusterError
from torchmuster.launcher.views.find import view_run

LIMIT_S = 1.0
_PROCESS_LIMIT_S = 300  # ends the process if a disk hangs, because nobody waits for it
_page_processes: list[
    proc.Child
] = []  # processes that make pages; a notebook, which lives on, reaps them at its next run's end


def report_at_end(run_dir: RunDir, run_id: str, *, limit_s: float = LIMIT_S) -> str:
    """Make the page of a run; return a line with its path, or with the command that makes it."""
    is_late, has_failed = threading.Event(), threading.Event()

    def make() -> None:
        if not make_page(run_dir, is_late):
            has_failed.set()

    making = threading.Thread(target=make, name="report", daemon=True)
    making.start()
    making.join(limit_s)
    if has_failed.is_set():
        return f"report: muster report {short_id(run_id)}"
    if not making.is_alive():
        return f"report: {near(run_dir.report)}"
    is_late.set()
    if not _continue_in_process(run_dir):
        return f"report: muster report {short_id(run_id)}"
    return f"report: {near(run_dir.report)} (it is being made)"


def make_page(run_dir: RunDir, is_late: threading.Event | None = None) -> bool:
    """Make the page of a run and return whether that worked; write errors to `report.log`.

    If `is_late` is set in the meantime, don't write the page.
    """
    try:
        from torchmuster.report.find import read_story
        from torchmuster.report.page import render_page

        page = render_page(read_story(view_run(run_dir))).encode(errors="replace")
        if is_late is None or not is_late.is_set():
            atomic.replace_file(run_dir.report, page, mode=0o600)
    except Exception:  # noqa: BLE001 - must not disturb the end of a run; the log has it
        _note(run_dir, traceback.format_exc())
        return False
    return True


def _note(run_dir: RunDir, why: str) -> None:
    with contextlib.suppress(OSError):  # the folder may be what has failed
        atomic.replace_file(run_dir.report_log, why.encode(errors="replace"), mode=0o600)


def _continue_in_process(run_dir: RunDir) -> bool:
    """Start a process that makes the page and outlives this one; return whether it has started."""
    words = [sys.executable, "-m", "torchmuster.report.at_end", run_dir.path]
    try:
        env, out = proc.own_package_environment(), proc.NOWHERE
        child = proc.start(words, env=env, cwd="/", stdout=out, stderr=out)
        proc.leave_sessions([child.pid])
        _page_processes[:] = [one for one in (*_page_processes, child) if one.poll() is None]
    except MusterError as error:
        _note(run_dir, f"{error.what}: {error.why}\n")
        return False
    return True


def main(folder: str) -> int:
    """Make the page of a run whose client has ended; return the exit code."""
    signal.alarm(_PROCESS_LIMIT_S)
    os.nice(10)
    return 0 if make_page(RunDir(folder)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
