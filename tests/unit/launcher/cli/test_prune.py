"""`muster prune` as typed."""

import json

import pytest

from kit import command
from torchmuster.core.files.atomic import write_json
from torchmuster.core.files.layout import RunDir
from torchmuster.errors import UsageError
from torchmuster.launcher.cli.prune import prune


@pytest.fixture
def run(home):
    folder = home / "runs/r"
    folder.mkdir(parents=True)
    write_json(RunDir(str(folder)).result, {"state": "succeeded"})
    return folder


def call(*words):
    return command.call(prune, *words)


def test_a_dry_run_shows_and_removes_nothing(run):
    done = call("--older", "0s", "--dry-run")
    assert "the whole run" in done.output
    assert "nothing was removed" in done.output
    assert run.is_dir()


def test_without_a_terminal_nothing_is_asked(run):
    done = call("--older", "0s")
    assert "freed" in done.output
    assert not run.exists()


def test_json_says_what_was_removed(run):
    plain = json.loads(call("--older", "0s", "--json").stdout)
    assert [entry["name"] for entry in plain["removals"]] == ["r"]
    assert plain["freed_bytes"] > 0


def test_young_runs_are_no_news(run):
    assert "nothing to remove" in call().output
    assert run.is_dir()


def test_a_time_that_is_none_is_refused(run):
    with pytest.raises(UsageError, match="not a valid duration"):
        call("--older", "soon")
