"""Runs in pods: names that come late or with another address, pods that go, and what the run makes of it."""

import json
import signal
from pathlib import Path

import pytest

from cluster.netns import Nodes
from kit import missing
from kit.namespaces import why_no_networks
from kit.packages import keep_package
from kit.waiting import wait_until
from places.pods import PodWorld
from torchmuster.core.model.states import RunState
from torchmuster.core.owner.record import read_lines, read_result
from torchmuster.core.spec.launch import RunRequest, plan_run
from torchmuster.core.spec.problems import Problems

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
sum = torch.ones(1)
dist.all_reduce(sum)
print("world", int(sum), "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
stop = sys.argv[1]
if stop == "raise":
    raise ValueError("the same each time")
told = torch.zeros(1)
while not told:  # all ranks leave after the same step
    time.sleep(0.05)
    told.fill_(os.path.exists(stop))
    dist.all_reduce(told)
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    if (reason := why_no_networks()) is not None:
        missing.stop(reason)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    keep_package(tmp_path / "home")
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    made = []

    def make(*, num_pods=2, nodes=2, until="stop", **limits):
        request = RunRequest(
            script="train.py",
            args=(until if until == "raise" else str(tmp_path / until),),
            nodes=str(nodes),
            nproc_per_node="1",
            cwd=str(code),
            **limits,
        )
        problems = Problems()
        plan = problems.checked(plan_run(request, "r", (), problems))
        made.append(PodWorld(network, tmp_path, plan, num_pods=num_pods))
        return made[-1]

    with Nodes(3) as network:
        yield make
        for one in made:
            one.close()


def events(world, name, index=0):
    return [e for e in read_lines(world.run_dir(index).events) if e["event"] == name]


def trains(world, attempt):
    """Say whether an attempt trains on the first pod."""
    log = Path(world.run_dir(0).rank_log(attempt, 0))
    return log.exists() and "world" in log.read_text()


def is_copied(world, word):
    """Say whether this much of the record is on the second pod's disk."""
    copies = (world.folder / "disk-1-2" / "home" / "records").glob("*/events.jsonl")
    return any(word in copy.read_text() for copy in copies)


def commands(world, index):
    """Return the command lines of the processes of a pod."""
    lines = world.in_pod(
        index, "for one in /proc/[0-9]*; do tr '\\0' ' ' <$one/cmdline; echo; done"
    )
    return lines.decode().splitlines()


def stop(world):
    (world.folder / "stop").touch()


def launched(pods, num=2, **addresses):
    """Return the pods of a run, of which DNS knows these, when they have been started."""
    pods.know(**(addresses or {"p0": 1, "p1": 2}))
    for index in range(num):
        pods.start(index)
    return pods


def training(pods):
    """Return the pods of a run when both train."""
    launched(pods)
    wait_until(lambda: trains(pods, 0), "the first attempt")
    return pods


def end_the_second_attempt(pods):
    wait_until(lambda: trains(pods, 1), "the second attempt", 90)
    stop(pods)
    assert pods.wait(0) == 0


def test_a_name_that_comes_late_is_waited_for_and_said(world):
    pods = launched(world(until="now"), p0=1)
    (pods.folder / "now").touch()
    wait_until(lambda: "run-1 (its name is not known)" in pods.log(0), "the reason of the wait")
    pods.know(p1=2)
    assert pods.wait(0) == 0
    result = read_result(pods.run_dir(0))
    assert (result.state, result.attempts) == (RunState.SUCCEEDED, 1)
    assert "world 2 attempt 0" in pods.log(0)


def test_a_name_that_never_comes_ends_the_run_with_its_pod(world):
    pods = launched(world(join_timeout="2s"), 1, p0=1)
    assert pods.wait(0) == 113
    result = read_result(pods.run_dir(0))
    assert result.report.error == "only 1 of 2 pods came within 2 s"
    assert result.report.because == ("run-1 (its name is not known)",)


def test_a_pod_that_is_lost_is_replaced_by_one_of_its_name_with_another_address(world):
    pods = training(world())
    pods.kill(1)
    pods.know(p1=None)
    wait_until(lambda: events(pods, "node_lost"), "the loss")
    pods.know(p1=3)
    pods.start(1, node=3)
    end_the_second_attempt(pods)
    assert read_result(pods.run_dir(0)).restarts_spent == 1


def test_a_pod_that_is_asked_to_end_costs_no_restart(world):
    pods = training(world())
    pods.kill(1, signal.SIGTERM)
    assert pods.wait(1) == 75
    pods.start(1)
    end_the_second_attempt(pods)
    assert read_result(pods.run_dir(0)).restarts_spent == 0


def test_the_owner_of_a_run_alone_may_open_as_much_as_many_pods_take(world):
    pods = launched(world(num_pods=1, nodes=1), 1, p0=1)
    wait_until(lambda: trains(pods, 0), "the first attempt")
    limits = "for one in /proc/[0-9]*; do tr '\\0' ' ' <$one/cmdline; grep 'open files' $one/limits; done"
    lines = pods.in_pod(0, limits).decode().splitlines()
    stop(pods)
    assert pods.wait(0) == 0
    (owner,) = [line for line in lines if " conduct-pods " in line]
    soft, hard = owner.split("Max open files")[1].split()[:2]
    assert soft == hard
    others = [
        line.split("Max open files")[1].split()[0] for line in lines if line and line != owner
    ]
    assert len(others) > 3
    assert set(others) == {"1024"}


@pytest.mark.lab
def test_a_spare_pod_takes_the_place_of_a_lost_one(world):
    pods = launched(world(num_pods=3), 3, p0=1, p1=2, p2=3)
    wait_until(lambda: trains(pods, 0), "the first attempt")
    (begun,) = events(pods, "attempt_started")
    used = [node["host"] for node in begun["nodes"]]
    pods.kill(int(used[1][-1]))
    end_the_second_attempt(pods)
    now = [node["host"] for node in events(pods, "attempt_started")[1]["nodes"]]
    assert {*used, *now} == {"run-0", "run-1", "run-2"}


def test_the_first_pod_made_again_goes_on_with_the_record_of_its_neighbours(world):
    pods = training(world())
    wait_until(lambda: is_copied(pods, "attempt_started"), "the copy")
    pods.kill(0)
    pods.start(0)
    end_the_second_attempt(pods)
    assert [e["attempt"] for e in events(pods, "attempt_started")] == [0, 1]
    assert read_result(pods.run_dir(0)).restarts_spent == 1


def test_of_two_first_pods_the_earlier_one_ends_by_itself(world):
    """As of a node that only seemed dead, and comes back with its pod when another one has the run."""
    pods = training(world())
    earlier = pods.pods[0]
    wait_until(lambda: is_copied(pods, "attempt_started"), "the copy")
    pods.know(p0=3)
    pods.start(0, node=3)
    assert earlier.wait(60) == 75
    end_the_second_attempt(pods)
    assert [e["attempt"] for e in events(pods, "attempt_started")] == [0, 1]
    assert "another first pod has this run now" in (pods.folder / "pod-0-1.log").read_text()


def test_the_first_pod_that_is_told_to_end_costs_no_restart(world):
    pods = training(world(max_restarts=0))
    pods.kill(0, signal.SIGTERM)
    assert pods.wait(0) == 75
    pods.start(0)
    end_the_second_attempt(pods)
    assert read_result(pods.run_dir(0)).restarts_spent == 0


def test_a_first_pod_that_is_killed_ends_a_run_without_restarts(world):
    pods = training(world(max_restarts=0))
    wait_until(lambda: is_copied(pods, "attempt_started"), "the copy")
    pods.kill(0)
    pods.start(0)
    assert pods.wait(0) == 113
    result = read_result(pods.run_dir(0))
    assert result.report.error == (
        "run-0 was lost: this pod, the first one, ended in the middle of the attempt"
    )
    assert (result.cause.rank, result.exit_code, result.attempts) == (0, 137, 1)


def test_a_failure_that_is_final_ends_the_job(world):
    pods = launched(world(until="raise"))
    assert pods.wait(0) == 113
    report = read_result(pods.run_dir(0)).report
    assert "ValueError: the same each time" in report.error
    assert json.loads((pods.secret / "order.json").read_text())["num_pods"] == 2


def test_agents_are_forks_of_what_has_imported_torch_since_the_pods_start(world):
    pods = launched(world(), p0=1)
    wait_until(lambda: "waiting for pods" in pods.log(0), "the wait")
    pods.know(p1=2)
    wait_until(lambda: trains(pods, 0), "the first attempt")
    for index in range(2):
        told = commands(pods, index)
        assert not [line for line in told if "__main__.py agent" in line]
        assert [line for line in told if "multirun/server/main.py" in line]
    assert "imported again" not in pods.log(0)
    stop(pods)
    assert pods.wait(0) == 0


@pytest.mark.lab
def test_a_pod_whose_import_was_killed_starts_its_agent_as_ever(world):
    pods = launched(world(), p0=1)
    wait_until(lambda: "sessions are served" in pods.log(1), "the door")
    pods.in_pod(1, "kill -9 ${MUSTER_WARM%% *}")
    pods.know(p1=2)
    wait_until(lambda: trains(pods, 0), "the first attempt")
    assert [line for line in commands(pods, 1) if "__main__.py agent" in line]
    stop(pods)
    assert pods.wait(0) == 0


@pytest.mark.lab
def test_a_first_pod_that_waits_for_others_ends_when_it_is_told(world):
    pods = launched(world(), 1, p0=1, p1=None)
    wait_until(lambda: "waiting for pods" in pods.log(0), "the wait")
    pods.kill(0, signal.SIGTERM)
    assert pods.wait(0, 30) == 75
