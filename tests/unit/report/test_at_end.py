"""The page that a failed run leaves: at once, a little later, or the command that makes it."""

import contextlib
import os
import threading

import pytest

from kit.records import EVENTS, event, failure, make_run, result
from kit.waiting import wait_until
from torchmuster.files.layout import RunDir
from torchmuster.model.states import RunState
from torchmuster.report.at_end import report_at_end

ENDED = result(RunState.FAILED, "rank 3 was killed", exit_code=137)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    events = [*EVENTS[:-1], failure(25, 1), event(25, "run_ended", state="failed")]
    return make_run(tmp_path / "r", events=events, ended=ENDED)


def test_the_line_names_the_page(run_dir):
    assert report_at_end(run_dir, "r", limit_s=30.0) == "report: r/report.html"
    with open(run_dir.report) as page:
        assert "rank 3 was killed" in page.read()
    assert os.stat(run_dir.report).st_mode & 0o777 == 0o600


def test_a_record_that_takes_long_is_read_by_a_process_that_outlives_the_end(run_dir):
    os.rename(run_dir.events, f"{run_dir.events}.kept")
    os.mkfifo(run_dir.events)  # an open for reading waits for ever

    said = report_at_end(run_dir, "20260101-000000-train-ab12", limit_s=0.5)

    assert said == "report: r/report.html (it is being made)"
    (thread,) = [one for one in threading.enumerate() if one.name == "report"]
    kept = f"{run_dir.events}.kept"
    os.symlink(kept, f"{run_dir.events}.link")
    pipe = f"{run_dir.events}.pipe"
    os.rename(run_dir.events, pipe)
    os.rename(f"{run_dir.events}.link", run_dir.events)
    wait_until(lambda: let_go(pipe) or not thread.is_alive(), "the end of the thread")
    wait_until(lambda: let_go(pipe) or os.path.exists(run_dir.report), "the page")
    with open(run_dir.report) as page:
        assert "rank 3 was killed" in page.read()


def let_go(pipe):
    """Let a reader go on that waits for somebody to open the pipe for writing."""
    with contextlib.suppress(OSError):  # nobody reads now
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


def test_a_page_that_cannot_be_written_leaves_the_command(tmp_path):
    gone = RunDir(str(tmp_path / "gone"))

    assert report_at_end(gone, "r", limit_s=30.0) == "report: muster report r"


def test_a_bug_in_the_page_is_noted_and_ends_nothing(run_dir, monkeypatch):
    def fail(story):
        raise ZeroDivisionError("by a bug")

    monkeypatch.setattr("torchmuster.report.page.render_page", fail)
    assert report_at_end(run_dir, "r", limit_s=30.0) == "report: muster report r"
    with open(run_dir.report_log) as note:
        assert "ZeroDivisionError: by a bug" in note.read()
