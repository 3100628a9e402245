"""`muster report` as a user calls it."""

import json
import os

import pytest

from kit import command
from kit.records import make_run, result
from torchmuster.errors import RunDirectoryError, UsageError
from torchmuster.report.cli.report import report


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    folders = [tmp_path / "runs" / f"20260101-00000{n}-train-ab1{n}" for n in range(2)]
    return [make_run(folder, ended=result()) for folder in folders]


def call(*words):
    return command.call(report, *words).stdout


def test_the_page_lies_in_the_run_directory(runs):
    assert call("train-ab10") == f"{runs[0].report}\n"
    with open(runs[0].report) as page:
        assert page.read().startswith("<!DOCTYPE html>")


def test_without_a_name_it_is_the_last_run(runs):
    os.utime(runs[1].plan, (2e9, 2e9))

    assert call() == f"{runs[1].report}\n"


def test_the_page_goes_where_it_is_told(runs, tmp_path):
    assert call("train-ab10", "-o", str(tmp_path / "x.html")) == f"{tmp_path / 'x.html'}\n"
    assert not os.path.exists(runs[0].report)


def test_a_page_that_cannot_be_written_is_said(runs, tmp_path):
    with pytest.raises(RunDirectoryError, match="can't be written"):
        call("train-ab10", "-o", str(tmp_path / "no" / "x.html"))


def test_as_json_it_is_the_story_and_no_page(runs):
    story = json.loads(call("train-ab10", "--json"))

    assert (story["form"], story["name"], len(story["attempts"])) == (1, "train-ab10", 2)
    assert not os.path.exists(runs[0].report)


def test_two_runs_are_compared(runs):
    said = call("train-ab10", "train-ab11")

    assert said.splitlines()[-1] == os.path.join(runs[1].path, "report-train-ab10.html")
    assert "the same at all 4 steps" in said
    assert json.loads(call("train-ab10", "train-ab11", "--json"))["first"] is None


def test_three_runs_are_refused(runs):
    with pytest.raises(UsageError, match="at most two"):
        call("a", "b", "c")
