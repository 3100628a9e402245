"""kill -9 at every file operation of a run's saves: a restart finds a whole snapshot, never a mix."""

import json
import sys

import pytest

from kit.command import muster_env
from launching import HERE, run

NUM_STEPS = 8


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("killed")
    line = [sys.executable, HERE / "kill_at_each_operation.py", out]
    run(line, muster_env(out / "home"))
    return json.loads((out / "report.json").read_text())


def test_every_kind_of_operation_was_met(report):
    """Five saves and two removals, from the claim of the folder to the removal's last part."""
    met = {words.split(" ")[0] for words in report["quiet"]["operations"]}
    assert met == {"claim", "create", "fsync", "mkdir", "remove", "rename", "write"}
    assert len(report["rows"]) == len(report["quiet"]["operations"]) > 50
    assert [row["codes"][0] for row in report["rows"]] == [-9] * len(report["rows"])


def test_a_restart_finds_the_state_of_one_step_and_ends_as_if_undisturbed(report):
    states = report["quiet"]["states"]
    assert len(set(states.values())) == NUM_STEPS + 1
    for row in report["rows"]:
        assert row["codes"][1] == 0, row
        for step, state in row["states"].items():
            assert state == states[step], (row["operation"], step)
        assert str(NUM_STEPS) in row["states"]


def test_a_restart_takes_the_newest_that_was_committed(report):
    began = set()
    for row in report["rows"]:
        committed = [int(name.removeprefix("step-")) for name in row["committed"]]
        assert row["began"] == max(committed, default=0), row
        began.add(row["began"])
    assert began == {0, 2, 4, 6, 8}


def test_nothing_half_written_stays_and_nothing_is_called_damaged(report):
    for row in report["rows"]:
        kept = [name for name in row["left"] if not name.startswith(("step-", "generation-"))]
        assert kept == ["training.jsonl"], row
        assert "step-000000008" in row["left"]
        # Retention is part of a save: a run that was killed behind its last one makes no other.
        limit = 3 if row["began"] == NUM_STEPS else 2
        assert len([name for name in row["left"] if name.startswith("step-")]) <= limit
