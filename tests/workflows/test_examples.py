"""The examples in `examples/workflows` do what their first lines say."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from kit.command import SOURCE, muster_env, run_muster
from kit.waiting import wait_until

EXAMPLES = SOURCE.parent / "examples" / "workflows"


@pytest.fixture
def muster(tmp_path):
    """Return a function that runs `muster` beside a copy of the examples."""
    folder = tmp_path / "workflows"
    shutil.copytree(EXAMPLES, folder)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = muster_env(tmp_path / "home", PATH=path)

    def call(*words):
        return run_muster(*words, env=environment, cwd=folder)

    yield call
    runs = tmp_path / "home" / "runs"
    for run in os.listdir(runs) if runs.is_dir() else []:
        call("cancel", "--now", run)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_example_is_valid_without_a_warning(muster, name):
    done = muster("validate", name)

    assert (done.returncode, done.stderr) == (0, "")


def test_two_torchrun_tasks_train_together(muster):
    done = muster("submit", "two_nodes.yaml")

    assert done.returncode == 0, done.stderr
    assert re.search(r"\[first\] epoch 2: loss 0\.\d+ on 2 workers", done.stdout)
    info = json.loads(muster("dataset", "info", "two-nodes-model", "--json").stdout)
    assert [file["path"].split("/")[-1] for file in info["files"]] == ["model.pt"]


def test_the_template_trains_on_as_many_nodes_as_asked_for(muster):
    done = muster("submit", "n_nodes.yaml", "--set", "n_nodes=3", "n_epochs=1")

    assert done.returncode == 0, done.stderr
    assert "[node_0] epoch 0: loss" in done.stdout
    assert "on 3 workers" in done.stdout


def test_the_pipeline_hands_data_on_from_group_to_group(muster):
    done = muster("submit", "pipeline.yaml")

    assert done.returncode == 0, done.stderr
    order = [done.stdout.index(f"[{task}]") for task in ("make-data", "train", "evaluate")]
    assert order == sorted(order)
    assert "on 2 workers" in done.stdout
    assert re.search(r"\[evaluate\] mean squared error 0\.00", done.stdout)


def test_the_sweep_names_the_best_of_its_trials(muster):
    done = muster("submit", "sweep.yaml", "--set", "rates=[0.001, 0.5]")

    assert done.returncode == 0, done.stderr
    assert re.search(r"\[choose\] mean squared error 0\.00\d+ lr=0\.5", done.stdout)


def test_the_interactive_one_waits_until_somebody_ends_it(muster, tmp_path):
    run_id = muster("submit", "interactive.yaml", "--detach").stdout.strip()
    log = tmp_path / "home" / "runs" / run_id / "groups" / "desk-group" / "events.jsonl"
    wait_until(lambda: log.exists() and "task_started" in log.read_text(), "the desk")

    listed = muster("exec", run_id, "desk", "--", "ls")
    assert listed.stdout.split() == ["evaluate.py"]
    muster("exec", run_id, "desk", "--", "touch", "note.txt", "done")

    assert muster("wait", run_id).returncode == 0
    output = tmp_path / "home" / "runs" / run_id / "tasks" / "desk" / "output"
    assert (output / "note.txt").exists()
