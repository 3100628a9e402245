"""Sweeps in pods: each pod is a slot, the first one owns the sweep and has the record of all members."""

import hashlib
import json
import signal
from pathlib import Path

import pytest

from cluster.netns import Nodes
from kit import missing
from kit.namespaces import why_no_networks
from kit.waiting import wait_until
from places.pods import PodWorld
from torchmuster.api.call import pack
from torchmuster.model.plan import FunctionCall
from torchmuster.model.states import RunState
from torchmuster.owner.sweep.members import member_dir
from torchmuster.owner.views.record import read_events, read_result
from torchmuster.owner.views.sweep_view import read_sweep, view_sweep
from torchmuster.spec.launch import RunRequest, plan_run
from torchmuster.spec.problems import Problems
from torchmuster.spec.sweep_plan import MetricChoice, SweepPlan

# A member prints where it runs, writes a file, and fails, or waits for a file of the test.
SCRIPT = """
import argparse, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--n", type=int)
parser.add_argument("--folder")
given = parser.parse_args()
print("host", os.uname().nodename, flush=True)
print(f"loss={10 - given.n}", flush=True)
open(f"made-{given.n}.txt", "w").write(str(given.n))
open(f"{given.folder}/begun-{given.n}-{os.uname().nodename}", "w").close()
while os.path.exists(f"{given.folder}/hold-{given.n}"):
    time.sleep(0.02)
if os.path.exists(f"{given.folder}/fail-{given.n}"):
    raise ValueError("a member that fails")
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    if (reason := why_no_networks()) is not None:
        missing.stop(reason)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    code = tmp_path / "code"
    code.mkdir()
    (code / "fit.py").write_text(SCRIPT)
    made = []

    def make(members=4, slots=2, workers="1", call=None):
        request = RunRequest(
            script="fit.py" if call is None else "fit:square",
            args=("--folder", str(tmp_path)) if call is None else (),
            call=call,
            nproc_per_node=workers,
            cwd=str(code),
            tee="none",
            start="fork",
        )
        problems = Problems()
        run = problems.checked(plan_run(request, "s", (), problems, simulated=False))
        plan = SweepPlan(
            run=run,
            names=("n",),
            members=tuple((str(n),) for n in range(members)),
            slots=slots,
            metric=MetricChoice(name="loss"),
        )
        made.append(PodWorld.of_sweep(network, tmp_path, plan))
        return made[-1]

    with Nodes(3) as network:
        yield make
        for one in made:
            one.close()


def view(pods):
    return view_sweep(pods.run_dir(0), is_alive=True)


def states(pods):
    seen = view(pods)  # nothing before the first pod has made its folder
    return [member.state for member in seen.members] if seen is not None else [None] * 4


def log_of(pods, number, attempt=0):
    run_dir = pods.run_dir(0)
    return Path(member_dir(run_dir, read_sweep(run_dir), number).rank_log(attempt, 0)).read_text()


def hosts_that_began(pods, number):
    return {path.name.split("-", 2)[2] for path in pods.folder.glob(f"begun-{number}-*")}


def hold(pods, *numbers):
    for number in numbers:
        (pods.folder / f"hold-{number}").touch()


def release(pods, *numbers):
    for number in numbers:
        (pods.folder / f"hold-{number}").unlink()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_members_run_in_all_pods_and_their_records_are_in_the_first(world, workers):
    pods = world(workers=workers)
    pods.know(p0=1, p1=2)
    hold(pods, 0, 1)
    pods.start(0)
    pods.start(1)
    wait_until(lambda: hosts_that_began(pods, 1), "the second member")
    wait_until(lambda: hosts_that_began(pods, 0), "the first member")
    assert hosts_that_began(pods, 0) | hosts_that_began(pods, 1) == {"run-0", "run-1"}
    release(pods, 0, 1)
    assert pods.wait(0) == 0
    assert states(pods) == [RunState.SUCCEEDED] * 4
    assert [member.value for member in view(pods).members] == [10.0, 9.0, 8.0, 7.0]
    for number in (0, 1):
        assert f"host {next(iter(hosts_that_began(pods, number)))}" in log_of(pods, number)
        member = member_dir(pods.run_dir(0), read_sweep(pods.run_dir(0)), number)
        assert read_result(member).state is RunState.SUCCEEDED
        assert Path(member.path, "output", f"made-{number}.txt").read_text() == str(number)


def test_functions_go_along_and_their_values_come_back(world, tmp_path):
    def square(n):
        return n * n

    packed = pack(square, (), {}, str(tmp_path), [{"n": n} for n in range(3)])
    path = tmp_path / "call"
    path.write_bytes(packed.data)
    sha = hashlib.sha256(packed.data).hexdigest()
    pods = world(members=3, call=FunctionCall(source=str(path), sha256=sha))
    pods.know(p0=1, p1=2)
    pods.start(0)
    pods.start(1)
    assert pods.wait(0) == 0
    assert [member.value for member in view(pods).members] == [0.0, 1.0, 4.0]


def test_a_sweep_begins_without_the_pods_that_have_no_room_yet(world):
    pods = world(members=2)
    pods.know(p0=1)
    pods.start(0)
    assert pods.wait(0) == 0
    assert states(pods) == [RunState.SUCCEEDED] * 2


def test_a_member_whose_pod_is_lost_starts_again_and_the_pod_that_comes_back_is_a_slot(world):
    pods = world(members=3)
    pods.know(p0=1, p1=2)
    hold(pods, 0, 1, 2)
    pods.start(0)
    pods.start(1)
    wait_until(lambda: hosts_that_began(pods, 0) and hosts_that_began(pods, 1), "two members")
    (lost,) = [n for n in (0, 1) if hosts_that_began(pods, n) == {"run-1"}]
    pods.kill(1)
    pods.know(p1=None)
    wait_until(lambda: states(pods)[lost] is RunState.WAITING, "the loss", 60)
    pods.know(p1=3)
    pods.start(1, node=3)
    wait_until(lambda: states(pods)[lost] is RunState.RUNNING, "its next attempt", 60)
    release(pods, 0, 1, 2)
    assert pods.wait(0) == 0
    assert states(pods) == [RunState.SUCCEEDED] * 3
    assert view(pods).members[lost].attempt == 1
    assert "host run-1" in log_of(pods, lost, attempt=1)


def test_a_pod_that_is_asked_to_end_gives_its_member_back_without_a_loss(world):
    pods = world(members=2)
    pods.know(p0=1, p1=2)
    hold(pods, 0, 1)
    pods.start(0)
    pods.start(1)
    wait_until(lambda: hosts_that_began(pods, 0) and hosts_that_began(pods, 1), "two members")
    for _ in range(3):  # more often than a member may be lost
        number = wait_until(
            lambda: [m.number for m in view(pods).members if is_in(pods, m, 1)], "a member there"
        )[0]
        pods.kill(1, signal.SIGTERM)
        assert pods.wait(1) == 75
        wait_until(lambda n=number: states(pods)[n] is RunState.WAITING, "that it waits", 60)
        pods.start(1)
    release(pods, 0, 1)
    assert pods.wait(0) == 0
    assert states(pods) == [RunState.SUCCEEDED] * 2


def is_in(pods, member, slot):
    """Say whether a member runs in a slot, and its script has begun there."""
    if member.state is not RunState.RUNNING:
        return False
    starts = [
        e
        for e in read_events(pods.run_dir(0).events)
        if e["event"] == "member_started" and e["member"] == member.number
    ]
    try:
        return starts[-1]["slot"] == slot and "loss=" in log_of(pods, member.number, member.attempt)
    except OSError:
        return False


def test_a_first_pod_that_is_made_again_goes_on_with_what_has_not_ended(world):
    pods = world(members=3)
    pods.know(p0=1, p1=2)
    hold(pods, 1, 2)
    pods.start(0)
    pods.start(1)
    wait_until(lambda: states(pods)[0] is RunState.SUCCEEDED, "the first end")
    copies = pods.folder / "disk-1-2" / "home" / "records"
    wait_until(
        lambda: any("member_ended" in p.read_text() for p in copies.glob("*/events.jsonl")),
        "a copy of the record on the other pod",
    )
    begun = sum(1 for _ in pods.folder.glob("begun-0-*"))
    pods.kill(0)
    release(pods, 1, 2)
    pods.start(0)
    assert pods.wait(0) == 0
    assert states(pods) == [RunState.SUCCEEDED] * 3
    assert sum(1 for _ in pods.folder.glob("begun-0-*")) == begun
    assert view(pods).members[0].attempt == 0


def test_a_failure_is_the_sweeps_and_its_last_message(world):
    pods = world(members=2)
    (pods.folder / "fail-1").touch()
    pods.know(p0=1, p1=2)
    pods.start(0)
    pods.start(1)
    assert pods.wait(0) == 113
    result = read_result(pods.run_dir(0))
    assert (result.state, result.exit_code) == (RunState.FAILED, 1)
    assert result.report.error == "1 of 2 members of the sweep failed"
    assert "ValueError: a member that fails" in " ".join(result.report.because)
    assert states(pods) == [RunState.SUCCEEDED, RunState.FAILED]


def test_a_cancel_ends_all_members_in_all_pods(world):
    pods = world(members=3)
    pods.know(p0=1, p1=2)
    hold(pods, 0, 1, 2)
    pods.start(0)
    pods.start(1)
    wait_until(lambda: states(pods).count(RunState.RUNNING) == 2, "two members")
    (Path(pods.run_dir(0).cancelled)).write_text(json.dumps({}))
    pods.kill(0, signal.SIGTERM)
    assert pods.wait(0) == 113
    assert states(pods) == [RunState.CANCELLED] * 3
    assert read_result(pods.run_dir(0)).state is RunState.CANCELLED
