"""`muster submit --on slurm` against pretended commands: a job for each group, and no client needed."""

import json
import os
import signal

import pytest

from cluster.test_fake_slurm import cluster, muster
from kit.waiting import wait_until

__all__ = ["cluster"]  # a fixture

PIPELINE = """
workflow:
  name: pipeline
  groups:
  - name: make
    tasks:
    - name: maker
      command: [bash, -c, "echo 7 > {{output}}/n; [ -e FOLDER/fail ] && exit 5; true"]
  - name: fit
    tasks:
    - name: training
      lead: true
      nodes: 2
      nproc_per_node: 1
      script: train.py
      inputs: [{task: maker}]
    - name: watcher
      command: [bash, -c, "echo watching from {{host:watcher}}; sleep 60"]
  - name: read
    tasks:
    - name: reader
      command: [bash, -c, "cp {{input:0}}/n FOLDER/end"]
      inputs: [{task: maker}, {task: training}]
  - name: alone
    tasks:
    - name: other
      command: [bash, -c, "echo alone > FOLDER/alone"]
"""


def write(folder):
    (folder / "w.yaml").write_text(PIPELINE.replace("FOLDER", str(folder)))


def states(cluster, folder):
    plain = json.loads(muster(cluster, folder, "status", "r", "--json").stdout)
    return plain["state"], {group["name"]: group["state"] for group in plain["groups"]}


def test_groups_are_jobs_that_wait_for_each_other(cluster, tmp_path):
    write(tmp_path)
    done = muster(cluster, tmp_path, "submit", "w.yaml", "--on", "slurm", "--run-id", "r")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "end").read_text() == "7\n"
    assert (tmp_path / "alone").exists()
    assert "sum 2 rank 0" in done.stdout
    starts = (tmp_path / "queue" / "srun.log").read_text().splitlines()
    nodes = {word for line in starts for word in json.loads(line) if "nodelist" in word}
    assert nodes == {"--nodelist=node2", "--nodelist=node3"}, "a task, and a node of the training"
    assert states(cluster, tmp_path)[0] == "succeeded"
    assert muster(cluster, tmp_path, "wait", "r").returncode == 0


@pytest.mark.lab
def test_no_client_has_to_live(cluster, tmp_path):
    write(tmp_path)
    done = muster(
        cluster, tmp_path, "submit", "w.yaml", "--on", "slurm", "--run-id", "r", "--detach"
    )
    assert done.stdout == "r\n"

    wait_until((tmp_path / "end").exists, "the last group")
    assert muster(cluster, tmp_path, "wait", "r").returncode == 0
    assert states(cluster, tmp_path)[0] == "succeeded"


def test_a_failed_group_takes_along_only_what_needs_it(cluster, tmp_path):
    write(tmp_path)
    (tmp_path / "fail").touch()
    done = muster(cluster, tmp_path, "submit", "w.yaml", "--on", "slurm", "--run-id", "r")

    assert done.returncode == 5
    assert "task maker failed: exit code 5" in done.stderr
    state, groups = states(cluster, tmp_path)
    assert state == "failed"
    assert groups == {
        "make": "FAILED",
        "fit": "FAILED_UPSTREAM",
        "read": "FAILED_UPSTREAM",
        "alone": "COMPLETED",
    }

    os.unlink(tmp_path / "fail")
    again = muster(cluster, tmp_path, "restart", "r")
    assert again.returncode == 0, again.stderr
    assert "alone" not in again.stderr.split("files in")[0], "it had completed"
    assert "is job" in again.stderr
    assert (tmp_path / "end").read_text() == "7\n"


def test_the_schedulers_warning_reaches_only_what_catches_it(cluster, tmp_path):
    (tmp_path / "w.yaml").write_text(
        f"""
workflow:
  name: warned
  tasks:
  - name: catcher
    command: [bash, -c, "trap 'echo saved > {tmp_path}/saved; exit 0' USR1; touch {tmp_path}/up; while true; do sleep 0.1; done"]
"""
    )
    muster(cluster, tmp_path, "submit", "w.yaml", "--on", "slurm", "--run-id", "r", "--detach")
    wait_until((tmp_path / "up").exists, "the command")
    job = json.loads((tmp_path / "queue" / "1.json").read_text())
    os.kill(job["pid"], signal.SIGUSR1)

    assert muster(cluster, tmp_path, "wait", "r").returncode == 0
    assert (tmp_path / "saved").exists()
