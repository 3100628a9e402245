"""The owner of a workflow: more groups than may run at once, a disk that does not take what it writes."""

import json
import os
import sys
import threading

from kit.waiting import run
from kit.workflows import workflow_plan
from torchmuster.workflow.owner import workflow
from torchmuster.workflow.owner.capacity import Machine
from torchmuster.workflow.owner.workflow import WorkflowOwner, create_workflow_dir
from torchmuster.workflow.plan import GroupPlan, TaskPlan
from torchmuster.workflow.record import State

DEADLINE_S = 30.0


class Listening:
    """A display that keeps what is said."""

    def __init__(self):
        self.said = []

    def say(self, sentence):
        self.said.append(sentence)

    def show_task(self, task, stream, text, left_out):
        del task, stream, text, left_out


def alone(name, command):
    """Return a group of one task."""
    return GroupPlan(name=name, tasks=(TaskPlan(name=f"t{name}", lead=True, command=command),))


def own(tmp_path, monkeypatch, groups, spoil=lambda run_dir: None, display=None):
    """Own a workflow whose run directory `spoil` has changed; return result and lines."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    here = {"spec_path": str(tmp_path / "w.yaml"), "cwd": str(tmp_path)}
    plan = workflow_plan(*groups, python=(sys.executable,), uuid="u", **here)
    run_dir = create_workflow_dir(plan, "", "")
    spoil(run_dir)
    display = display or Listening()

    owner = WorkflowOwner(plan, run_dir, Machine(num_cpus=2), display)
    return run(owner.run(), DEADLINE_S), display.said


def test_a_group_whose_folder_can_not_be_made_fails_and_the_run_ends(tmp_path, monkeypatch):
    def spoil(run_dir):
        with open(os.path.join(run_dir.path, "groups"), "w") as file:
            file.write("in the way")

    result, _ = own(tmp_path, monkeypatch, [alone("g", ("true",))], spoil)
    assert result.state.is_failed
    assert "groups" in result.reports[0].error
    assert result.groups == {"g": State.FAILED_START_ERROR.value}


def test_an_outcome_that_could_not_be_written_is_taken_from_what_the_head_said(
    tmp_path, monkeypatch
):
    def spoil(run_dir):
        os.makedirs(os.path.join(run_dir.group("g").result, "in-the-way"))

    result, said = own(tmp_path, monkeypatch, [alone("g", ("sh", "-c", "exit 7"))], spoil)
    assert result.groups == {"g": State.FAILED.value}
    assert result.exit_code == 7
    assert any("could not be written" in line for line in said)
    assert not any("was lost" in line for line in said)


def test_groups_that_have_ended_make_room_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr(workflow, "MAX_GROUPS_AT_ONCE", 1)
    groups = [alone(name, ("true",)) for name in ("a", "b", "c")]
    result, _ = own(tmp_path, monkeypatch, groups)
    assert set(result.groups.values()) == {State.COMPLETED.value}


def test_a_disk_that_stands_still_does_not_keep_the_owner_from_its_heads(tmp_path, monkeypatch):
    """The record is a pipe that nobody reads, until the output of a task has come through."""
    read = []

    def read_late():
        with open(tmp_path / "events") as pipe:  # a view refuses a pipe
            read.extend(json.loads(line) for line in pipe)

    reader = threading.Thread(target=read_late)

    class ReadsLate(Listening):
        def show_task(self, task, stream, text, left_out):
            if not reader.is_alive() and not read:
                reader.start()

    def spoil(run_dir):
        os.mkfifo(tmp_path / "events")
        os.symlink(tmp_path / "events", run_dir.events)

    group = alone("g", ("sh", "-c", "echo heard"))
    result, said = own(tmp_path, monkeypatch, [group], spoil, ReadsLate())
    assert result.groups == {"g": State.COMPLETED.value}
    reader.join(DEADLINE_S)
    names = [event["event"] for event in read]
    assert names[0] == "workflow_started"
    assert names[-1] == "workflow_ended"
    states = [event["state"] for event in read if event["event"] == "group_state"]
    assert (states[0], states[-1]) == ("SCHEDULING", "COMPLETED")
    assert not any("can't be written" in line for line in said)
