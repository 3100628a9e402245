"""The page that a failed run leaves: at once, a little later, or the command that makes it."""

import os
import threading

import pytest

from kit.records import EVENTS, failure, make_run, over, result
from kit.waiting import wait_until
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.states import RunState
from torchmuster.launcher.views.find import view_run
from torchmuster.report import at_end
from torchmuster.report.at_end import report_at_end

ENDED = result(RunState.FAILED, "rank 3 was killed", exit_code=137)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    events = [*EVENTS[:-1], failure(25, 1), over(25, "failed")]
    return make_run(tmp_path / "r", events=events, ended=ENDED)


def test_the_line_names_the_page(run_dir):
    assert report_at_end(run_dir, "r", limit_s=30.0) == "report: r/report.html"
    with open(run_dir.report) as page:
        assert "rank 3 was killed" in page.read()
    assert os.stat(run_dir.report).st_mode & 0o777 == 0o600


def test_a_record_that_takes_long_is_read_by_a_process_that_outlives_the_end(run_dir, monkeypatch):
    go_on = threading.Event()

    def read_slowly(folder):
        go_on.wait()
        return view_run(folder)

    monkeypatch.setattr(at_end, "view_run", read_slowly)  # here, and not in the other process

    said = report_at_end(run_dir, "20260101-000000-train-ab12", limit_s=0.1)

    assert said == "report: r/report.html (it is being made)"
    wait_until(lambda: os.path.exists(run_dir.report), "the page, by the other process")
    with open(run_dir.report) as page:
        assert "rank 3 was killed" in page.read()
    (thread,) = [one for one in threading.enumerate() if one.name == "report"]
    go_on.set()
    thread.join()


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
