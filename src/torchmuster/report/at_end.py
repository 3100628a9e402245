"""The page of a run that has failed, made as it ends: the end waits a second for it, and no longer.

The client makes it, behind the verdict, so that nobody waits for what matters. What takes longer is made by a process
of its own, `python -m torchmuster.report RUN_DIR`, which outlives the client. Why there is no page is in `report.log`.
"""

import contextlib
import os
import sys
import threading
import traceback

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, near, short_id
from torchmuster.errors import MusterError
from torchmuster.launcher.views.find import view_run

LIMIT_S = 1.0
_apart: list[
    proc.Child
] = []  # that make pages; a notebook lives on, and takes their ends at its next run's


def report_at_end(run_dir: RunDir, run_id: str, *, limit_s: float = LIMIT_S) -> str:
    """Make the page of a run; return the line that says where it is or will be, or how to make it."""
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
    if not _go_on_apart(run_dir):
        return f"report: muster report {short_id(run_id)}"
    return f"report: {near(run_dir.report)} (it is being made)"


def make_page(run_dir: RunDir, is_late: threading.Event | None = None) -> bool:
    """Make the page of a run, unless it is late meanwhile; say whether that went well, and note in `report.log` why not."""
    try:
        from torchmuster.report.find import read_story
        from torchmuster.report.page import render_page

        page = render_page(read_story(view_run(run_dir))).encode(errors="replace")
        if is_late is None or not is_late.is_set():
            atomic.replace_file(run_dir.report, page, mode=0o600)
    except Exception:  # noqa: BLE001 - the end of a run is no place for it; the note is
        _note(run_dir, traceback.format_exc())
        return False
    return True


def _note(run_dir: RunDir, why: str) -> None:
    with contextlib.suppress(OSError):  # the folder may be what has failed
        atomic.replace_file(run_dir.report_log, why.encode(errors="replace"), mode=0o600)


def _go_on_apart(run_dir: RunDir) -> bool:
    """Start a process that makes the page when this one has gone; say whether that was possible."""
    words = [sys.executable, "-m", "torchmuster.report", run_dir.path]
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        env = proc.own_package_environment()
        child = proc.start(words, env=env, cwd="/", stdout=nowhere, stderr=nowhere)
        proc.leave_sessions([child.pid])
        _apart[:] = [one for one in (*_apart, child) if one.poll() is None]
    except MusterError as error:
        _note(run_dir, f"{error.what}: {error.why}\n")
        return False
    finally:
        os.close(nowhere)
    return True
