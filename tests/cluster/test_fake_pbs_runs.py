"""`muster run --on pbs` against pretended commands that answer as a real server did."""

import json
import os
import subprocess
import sys

import pytest

from cluster.pbs import until
from cluster.test_fake_slurm import SCRIPT, SOURCE


@pytest.fixture
def muster(pbs, tmp_path):
    """Return a function that runs `muster` on the login node of the pretended PBS."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {
        **pbs.environment,
        "PYTHONPATH": str(SOURCE),
        "MUSTER_HOME": str(tmp_path / "home"),
    }

    def call(*words, limit_s=90):
        return subprocess.run(
            [sys.executable, "-m", "torchmuster", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )

    return call


ON = ("run", "--on", "pbs", "--nodes", "2", "--nproc-per-node", "1", "--run-id", "r")


def test_a_run_trains_on_two_hosts(muster):
    done = muster(*ON, "--tee", "all", "train.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2") == 2
    assert "is job" in done.stderr
    assert "succeeded after" in done.stderr


def test_lines_of_the_site_reach_the_workers_of_every_host(muster, tmp_path):
    (tmp_path / "muster.toml").write_text(
        """
[engines.olivia]
kind = "pbs"
setup = ["export MODULE=loaded"]
"""
    )
    (tmp_path / "show.py").write_text(
        "import os; print('module', os.environ['MODULE'], flush=True)"
    )
    done = muster(*ON[:1], "--on", "olivia", *ON[3:], "--tee", "all", "show.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("module loaded") == 2
    path = tmp_path / "home" / "runs" / "r" / "environment.json"
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_job_is_cancelled_by_the_runs_name(muster, tmp_path):
    assert muster(*ON, "--detach", "train.py", "wait").stdout == "r\n"
    log = tmp_path / "home/runs/r/logs/main/train/attempt-0/rank-0.log"
    until(lambda: log.exists() and "sum 2" in log.read_text(), "the first line", 60.0)

    assert json.loads(muster("status", "r", "--json").stdout)["state"] == "running"
    assert muster("cancel", "r").returncode == 0
    assert json.loads(muster("status", "r", "--json").stdout)["state"] == "cancelled"


def test_an_unknown_queue_is_explained(muster):
    done = muster(*ON, "--queue", "nope", "train.py")

    assert done.returncode == 14
    assert "Unknown queue" in done.stderr
    assert "Traceback" not in done.stderr


def test_groups_of_a_workflow_are_jobs_that_wait_for_each_other(muster, tmp_path):
    (tmp_path / "muster.toml").write_text(
        """
[engines.olivia]
kind = "pbs"
setup = ["export MODULE=loaded"]
"""
    )
    (tmp_path / "w.yaml").write_text(
        f"""
workflow:
  name: two
  groups:
  - name: make
    tasks:
    - name: first
      lead: true
      command: [bash, -c, "echo $MODULE > {{{{output}}}}/a"]
    - name: second
      command: [bash, -c, "echo $MODULE > {{{{output}}}}/b"]
    ignoreNonleadStatus: false
  - name: read
    tasks:
    - name: reader
      command: [bash, -c, "cat {{{{input:0}}}}/a {{{{input:1}}}}/b > {tmp_path}/end"]
      inputs: [{{task: first}}, {{task: second}}]
"""
    )
    done = muster("submit", "w.yaml", "--on", "olivia", "--run-id", "w")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "end").read_text() == "loaded\nloaded\n"
