"""Groups of a workflow in pods: their tasks in other pods, what they read and make, pods that go, and a cancel."""

import os
import signal
from pathlib import Path

import pytest

from cluster.netns import Nodes
from kit import missing
from kit.namespaces import why_no_networks
from kit.packages import keep_package
from kit.waiting import wait_until
from kit.workflows import workflow_plan
from places.pods import PodWorld
from torchmuster.core.owner.record import read_lines
from torchmuster.workflow.plan import GroupPlan, InputKind, InputPlan, TaskPlan
from torchmuster.workflow.record import State, read_outcome

WAIT = 'until [ -e "{stop}" ]; do sleep 0.05; done; '
LEAD = (
    "echo lead {{attempt}} reads $(cat {{input:0}}/n) finds {{host:other}}; getent hosts {{host:other}}; "
    + WAIT
    + "echo 1 > {{output}}/lead"
)
OTHER = "echo other {{attempt}}; echo 2 > {{output}}/other; exec sleep 1000"


def bash(name, text, stop, **more):
    return TaskPlan(name=name, command=("bash", "-c", text.replace("{stop}", str(stop))), **more)


@pytest.fixture
def group(tmp_path, monkeypatch):
    yield from pods_of_group(tmp_path, monkeypatch, LEAD, OTHER)


@pytest.fixture
def meeting(tmp_path, monkeypatch):
    meets = "muster barrier --name met --timeout 60s && "
    yield from pods_of_group(
        tmp_path, monkeypatch, f"{meets} echo 1 > {{{{output}}}}/lead", f"{meets} sleep 1000"
    )


def pods_of_group(tmp_path, monkeypatch, lead, other):
    """Yield the pods of a group of two tasks, of which each has one."""
    if (reason := why_no_networks()) is not None:
        missing.stop(reason)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    keep_package(tmp_path / "home")
    stop = tmp_path / "stop"
    made = InputPlan(kind=InputKind.TASK, source="made")
    plan = workflow_plan(
        GroupPlan(name="before", tasks=(TaskPlan(name="made", command=("true",)),)),
        GroupPlan(
            name="work",
            tasks=(
                bash("lead", lead, stop, lead=True, inputs=(made,)),
                bash("other", other, stop),
            ),
            after=("before",),
        ),
        run_id="w",
        cwd=str(tmp_path),
        grace_s=2.0,
        backoff_s=0.1,
    )
    with Nodes(3) as network:
        world = PodWorld.of_group(network, tmp_path, plan, "work", {"made": {"n": "41"}})
        world.know(p0=1, p1=2)
        world.start(0)
        world.start(1)
        yield world
        world.close()


def said(world, task, attempt=0):
    try:
        with open(world.run_dir(0).task_log("work", task, attempt)) as log:
            return log.read()
    except OSError:
        return ""


def wait_for_other(world, attempt=0):
    """Wait until the log of the task in the other pod has come to the first one."""
    wait_until(lambda: f"other {attempt}" in said(world, "other", attempt), "the other task", 60)


def test_a_group_reads_finds_and_leaves_what_its_tasks_make(group):
    wait_for_other(group)
    listed = "for one in /proc/[0-9]*; do tr '\\0' ' ' <$one/cmdline; echo; done"
    lines = group.in_pod(0, listed).decode().splitlines()
    # The first pod of many has not several processes for each of the others.
    assert len([line for line in lines if " pod-task " in line]) == 1
    assert not [line for line in lines if " call --key " in line]
    (group.folder / "stop").touch()
    assert group.wait(0) == 0
    run_dir = group.run_dir(0)
    assert read_outcome(run_dir, "work").state is State.COMPLETED
    assert f"lead 0 reads 41 finds {group.job}-1.{group.job}\n10.10.0.2" in said(group, "lead")
    for task, made in (("other", "2\n"), ("lead", "1\n")):
        assert Path(run_dir.task_output(task), task).read_text() == made


def test_a_task_whose_pod_is_lost_runs_again_in_the_one_that_replaces_it(group):
    wait_for_other(group)
    group.kill(1)
    group.start(1)
    wait_for_other(group, 1)
    (group.folder / "stop").touch()
    assert group.wait(0) == 0
    assert [line.split()[1] for line in said(group, "lead").splitlines()[:1]] == ["0"]


def test_the_first_pod_made_again_goes_on_counting_and_a_cancel_is_final(group):
    wait_for_other(group)
    events = group.run_dir(0).group("work").events
    kept = group.in_pod
    wait_until(
        lambda: b"task_state" in kept(1, 'cat "$MUSTER_HOME"/records/*/groups/*/events.jsonl'),
        "the copy of the record on the other pod",
    )
    group.kill(0, signal.SIGTERM)
    assert group.wait(0) == 75
    assert any(e["event"] == "group_started" for e in read_lines(events))
    group.start(0)
    wait_for_other(group, 1)
    note = os.path.join(group.run_dir(0).group("work").path, "cancelled.json")
    group.in_pod(0, f'echo "{{}}" >"{note}" && kill -TERM $PPID')
    assert group.wait(0) == 113
    assert read_outcome(group.run_dir(0), "work").state is State.FAILED_CANCELED


def test_tasks_of_an_image_without_muster_meet_in_a_barrier(meeting):
    assert meeting.wait(0) == 0
    assert read_outcome(meeting.run_dir(0), "work").state is State.COMPLETED
    for task in ("lead", "other"):
        assert "barrier `met`: all have reached it after" in said(meeting, task)
