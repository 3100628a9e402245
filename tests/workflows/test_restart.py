"""SIGKILL of the client in every state: `muster status` tells the truth, `muster restart` goes on."""

import json
import os
import signal

import pytest

from kit.waiting import wait_until

CHAIN = """
workflow:
  name: chain
  groups:
  - name: one
    tasks:
    - name: first
      command: [bash, -c, "echo x >> FOLDER/first.ran; echo one > {{output}}/word"]
  - name: two
    tasks:
    - name: second
      command: [bash, -c, "touch FOLDER/second.began; until [ -e FOLDER/go ]; do sleep 0.05; done; cp {{input:0}}/word {{output}}/word"]
      inputs: [{task: first}]
  - name: three
    tasks:
    - name: third
      command: [bash, -c, "cat {{input:0}}/word > FOLDER/end"]
      inputs: [{task: second}]
"""


def status(workflow):
    return json.loads(workflow.muster("status", "r", "--json").stdout)


def kill_owner(workflow):
    os.kill(workflow.process.pid, signal.SIGKILL)
    workflow.process.wait(60)
    wait_until(lambda: not workflow.processes(), "the end of all processes")


def restart(workflow):
    done = workflow.muster("restart", "r")
    assert done.returncode == 0, done.stderr
    return done


def test_killed_while_a_group_runs(start_workflow, tmp_path):
    workflow = start_workflow(CHAIN)
    workflow.wait_for_file("second.began")
    kill_owner(workflow)

    now = status(workflow)
    assert now["state"] == "lost"
    states = {group["name"]: group["state"] for group in now["groups"]}
    assert states == {"one": "COMPLETED", "two": "RUNNING", "three": "WAITING"}
    assert "killed" in now["groups"][1]["why"]
    assert workflow.muster("wait", "r").returncode != 0

    (tmp_path / "go").touch()
    restart(workflow)
    assert (tmp_path / "end").read_text() == "one\n"
    assert (tmp_path / "first.ran").read_text() == "x\n", "a finished group ran again"


def test_killed_before_anything_began(start_workflow, tmp_path):
    (tmp_path / "go").touch()
    workflow = start_workflow(CHAIN)
    wait_until((workflow.run_dir / "owner.json").exists, "the run directory")
    kill_owner(workflow)

    assert status(workflow)["state"] in ("lost", "succeeded")
    if status(workflow)["state"] == "lost":
        restart(workflow)
    assert (tmp_path / "end").read_text() == "one\n"


def test_killed_after_the_end_changes_nothing(run_workflow, tmp_path):
    (tmp_path / "go").touch()
    workflow = run_workflow(CHAIN)

    assert workflow.code == 0, workflow.out
    assert status(workflow)["state"] == "succeeded"
    done = workflow.muster("restart", "r")
    assert done.returncode == 2
    assert "all groups" in done.stderr


@pytest.mark.parametrize("delay", range(6))
def test_killed_at_any_moment_it_can_be_restarted(start_workflow, tmp_path, delay):
    """The more events it waits for, the later the kill."""
    (tmp_path / "go").touch()
    workflow = start_workflow(CHAIN)
    events = workflow.run_dir / "events.jsonl"

    def far_enough():
        lines = events.read_text().count("\n") if events.exists() else 0
        return lines > delay * 2 or workflow.process.poll() is not None

    wait_until(far_enough, f"{delay * 2} events")
    kill_owner(workflow)

    if status(workflow)["state"] == "lost":
        unfinished = [g["name"] for g in status(workflow)["groups"] if g["state"] != "COMPLETED"]
        done = workflow.muster("restart", "r")
        # Killed between the last group's end and the result: nothing is left to do.
        assert done.returncode == (0 if unfinished else 2), done.stderr
    assert (tmp_path / "end").read_text() == "one\n"


def test_a_failed_group_is_run_again_and_its_upstream_is_not(run_workflow, tmp_path):
    text = CHAIN.replace(
        "cat {{input:0}}/word > FOLDER/end", "[ -e FOLDER/mended ] && touch FOLDER/end"
    )
    (tmp_path / "go").touch()
    workflow = run_workflow(text)
    assert workflow.code == 1
    assert status(workflow)["state"] == "failed"

    (tmp_path / "mended").touch()
    restart(workflow)
    assert (tmp_path / "end").exists()
    assert (tmp_path / "first.ran").read_text() == "x\n"


def test_a_detached_workflow_is_cancelled_by_its_name(start_workflow, tmp_path):
    workflow = start_workflow(CHAIN, "--detach")
    assert workflow.wait() == 0
    wait_until((tmp_path / "second.began").exists, "the second group")

    assert status(workflow)["state"] == "running"
    assert workflow.muster("cancel", "r").returncode == 0
    assert status(workflow)["state"] == "cancelled"
    assert not (tmp_path / "end").exists()
    wait_until(lambda: not workflow.processes(), "the end of all processes")
