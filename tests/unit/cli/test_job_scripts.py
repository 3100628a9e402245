"""`muster submit --dry-run --on ...`: what a scheduler would get."""

import json
import subprocess

import pytest
from click.testing import CliRunner

from torchmuster.cli.submit import submit
from torchmuster.errors import ManyErrors

FILE = """\
workflow:
  name: flow
  groups:
  - name: make-data
    tasks:
    - name: make
      command: [make_data]
  - name: train
    tasks:
    - name: fit
      command: [fit]
      inputs:
      - task: make
"""


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    (tmp_path / "flow.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))

    def call(*words):
        line = ["flow.yaml", "--run-id", "r1", *words]
        done = CliRunner().invoke(submit, line, standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done.stdout

    return call


def test_all_engines_are_shown(dry_run):
    heads = [line for line in dry_run("--dry-run", "--on", "all").splitlines() if "2 jobs" in line]
    assert heads == ["# slurm: 2 jobs", "# pbs: 2 jobs", "# torque: 2 jobs"]


def test_shown_commands_pass_the_ids_of_the_jobs_before(dry_run, tmp_path):
    shown = dry_run("--dry-run", "--on", "slurm")
    commands = "\n".join(line for line in shown.splitlines() if line.startswith("JOB_"))
    fake = 'sbatch() { echo "$@" >>calls; echo 41; }\n'
    subprocess.run(["bash", "-c", fake + commands], check=True, cwd=tmp_path)
    assert (tmp_path / "calls").read_text().splitlines() == [
        "--parsable make-data.sh",
        "--parsable --dependency=afterok:41 --kill-on-invalid-dep=yes train.sh",
    ]


def test_json_has_whole_scripts(dry_run):
    shown = json.loads(dry_run("--dry-run", "--on", "pbs", "--json"))
    assert [(entry["engine"], entry["group"]) for entry in shown] == [
        ("pbs", "make-data"),
        ("pbs", "train"),
    ]
    assert shown[1]["submit"] == ["qsub", "-W", "depend=afterok:$JOB_make_data", "train.sh"]
    assert shown[0]["script"].startswith("#!/bin/bash -l\n#PBS -N flow-make-data\n")
    assert shown[0]["node_tasks"] == ["make"]


def test_nothing_is_made(dry_run, tmp_path):
    dry_run("--dry-run", "--on", "slurm")
    assert not (tmp_path / "home/runs/r1").exists()


@pytest.mark.parametrize("words", [("--on", "slurm"), ("--on", "nope", "--dry-run")])
def test_engine_that_is_not_there_yet_is_an_error(dry_run, words):
    with pytest.raises(ManyErrors, match="there is no engine"):
        dry_run(*words)
