"""`muster submit --dry-run --on ...`: what a scheduler would get."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import torchmuster
from kit.command import call
from torchmuster.errors import ManyErrors
from torchmuster.workflow.cli.submit import submit

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
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return lambda *words: call(submit, "flow.yaml", "--run-id", "r1", *words).stdout


def test_all_engines_are_shown(dry_run):
    heads = [line for line in dry_run("--dry-run", "--on", "all").splitlines() if "2 jobs" in line]
    assert heads == ["# slurm: 2 jobs", "# pbs: 2 jobs"]


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
    groups = [(entry["engine"], entry["group"]) for entry in shown]
    assert groups == [("pbs", "make-data"), ("pbs", "train")]
    assert shown[1]["submit"] == ["qsub", "-W", "depend=afterok:$JOB_make_data", "train.sh"]
    assert shown[0]["script"].startswith("#!/bin/bash -l\n#PBS -N flow-make-data\n")
    assert shown[0]["node_tasks"] == ["make"]


def test_nothing_is_made(dry_run, tmp_path):
    dry_run("--dry-run", "--on", "slurm")
    assert not (tmp_path / "home/runs/r1").exists()


@pytest.mark.parametrize("words", [("--on", "nope"), ("--on", "nope", "--dry-run")])
def test_engine_that_is_not_there_is_an_error(dry_run, words):
    with pytest.raises(ManyErrors, match="there is no engine"):
        dry_run(*words)


SITES = """\
[engines.gpu]
kind = "slurm"
partition = "gpu"
account = "proj123"
qos = "normal"
constraint = "a100"
time = "2h"
directives = ["--reservation=course", "#SBATCH --mail-type=NONE"]
chunk = { gpus-per-node = "a100:4" }
setup = ["module load cuda/12.6", "source 'my venv/bin/activate'"]
environment = { OMP_NUM_THREADS = 8, NOTE = "it's $HOME" }
warn = "5m"

[engines.olivia]
kind = "pbs"
queue = "workq"
account = "acct"
project = "proj"
time = "90m"
directives = ["-m n", "-l place=scatter:excl"]
chunk = { sales_op = "blanca" }
setup = ["module load cray-python"]

[engines.lab]
kind = "ssh"
hosts = ["n1"]
"""


@pytest.mark.parametrize("name", ["gpu", "olivia"])
def test_whole_scripts_of_a_site(dry_run, tmp_path, golden, name):
    (tmp_path / "muster.toml").write_text(SITES)
    shown = dry_run("--dry-run", "--on", name)
    shown = shown.replace(str(Path(torchmuster.__file__).parent), "/opt/torchmuster")
    shown = shown.replace(str(tmp_path), "/home/me")
    shown = re.sub(r"^PYTHON=.*$", "PYTHON=/usr/bin/python3", shown, flags=re.MULTILINE)
    golden("scripts/site.txt", name, shown)


def test_all_lists_the_sites_too(dry_run, tmp_path):
    (tmp_path / "muster.toml").write_text(SITES)
    shown = dry_run("--dry-run", "--on", "all")
    heads = re.findall(r"^# (.*): 2 jobs$", shown, re.MULTILINE)
    assert heads == ["slurm", "pbs", "gpu (slurm)", "olivia (pbs)"]


def test_json_names_the_site(dry_run, tmp_path):
    (tmp_path / "muster.toml").write_text(SITES)
    shown = json.loads(dry_run("--dry-run", "--on", "gpu", "--json"))
    assert {(entry["engine"], entry["site"]) for entry in shown} == {("slurm", "gpu")}


def test_a_mistake_in_the_file_stops_it(dry_run, tmp_path):
    (tmp_path / "muster.toml").write_text("[engines.gpu]\nkind = 'slrum'\n")
    with pytest.raises(ManyErrors, match="no kind of engine"):
        dry_run("--dry-run", "--on", "gpu")
