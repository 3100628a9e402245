"""The page of a run that has failed, made as it ends: within a second, or not at all.

The client makes it, behind the verdict, so that nobody waits for what matters. A record that takes longer, a disk that
hangs or a bug here costs one second and leaves the command that makes the page instead.
"""

import threading

from torchmuster.files import atomic
from torchmuster.files.layout import RunDir, short_id
from torchmuster.owner.views.account import near
from torchmuster.owner.views.find import view_run

LIMIT_S = 1.0


def report_at_end(run_dir: RunDir, run_id: str, *, limit_s: float = LIMIT_S) -> str:
    """Make the page of a run; return the line that says where it is, or how to make it."""
    written: list[str] = []
    is_late = threading.Event()

    def make() -> None:
        try:
            from torchmuster.report.find import read_story
            from torchmuster.report.page import render_page

            page = render_page(read_story(view_run(run_dir))).encode(errors="replace")
            if not is_late.is_set():
                atomic.replace_file(run_dir.report, page, mode=0o600)
                written.append(run_dir.report)
        except Exception:  # noqa: BLE001 - the command says what is wrong; the end of a run is no place for it
            return

    making = threading.Thread(target=make, name="report", daemon=True)
    making.start()
    making.join(limit_s)
    is_late.set()
    return f"report: {near(written[0])}" if written else f"report: muster report {short_id(run_id)}"
