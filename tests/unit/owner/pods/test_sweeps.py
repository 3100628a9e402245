"""A sweep in pods as its client has it: what the pods bring along, the copies of members, and what goes on after an end."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from torchmuster.errors import UsageError
from torchmuster.files import atomic
from torchmuster.model import codec
from torchmuster.model.plan import Program, RunPlan, ScriptKind
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Result
from torchmuster.net.remote_messages import FilePiece, FrameError
from torchmuster.node.pod.order import SETTLED_FILE
from torchmuster.owner.create import create_sweep_dir
from torchmuster.owner.pods.copy import RunCopy, copied
from torchmuster.owner.pods.mirror import RecordMirror
from torchmuster.owner.pods.reach import pod_order
from torchmuster.owner.pods.sweep.bring import bring_sweep, job_again
from torchmuster.owner.pods.sweep.member_copies import MemberCopies
from torchmuster.owner.pods.watch import PodWatch
from torchmuster.owner.sweep.members import member_dir
from torchmuster.owner.views.record import read_result
from torchmuster.owner.views.sweep_view import view_sweep
from torchmuster.spec.sweep_plan import SweepPlan
from unit.engines.kubernetes.site_jobs import DEFAULT
from unit.owner.pods.conftest import JOB_ID
from unit.owner.pods.test_mirror import FirstPod

JOB = replace(DEFAULT, own_keys=(("image", "x"), ("context", "lab"), ("namespace", "research")))


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Return a sweep of three members, not submitted yet, with its plan."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    code = tmp_path / "code"
    code.mkdir()
    (code / "fit.py").write_text("print('hi')\n")
    return made(code, 3)


def made(code, members):
    program = Program(
        kind=ScriptKind.FILE, target="fit.py", args=(), python=("python3",), cwd=str(code)
    )
    run = RunPlan(run_id="s", program=program, min_nodes=1, max_nodes=1, workers_per_node=(1,))
    values = tuple((str(n),) for n in range(members))
    plan = SweepPlan(run=run, names=("n",), members=values, slots=2)
    return plan, create_sweep_dir(plan)


def result_of(run_id, state):
    return Result(
        run_id=run_id, state=state, exit_code=0, attempts=1, restarts_spent=0, elapsed_s=1.0
    )


def ended(number, state):
    return [
        {"event": "member_started", "time": "t", "member": number, "slot": 0, "attempt": 0},
        {
            "event": "member_ended",
            "time": "t",
            "member": number,
            "attempt": 0,
            "state": state,
            "exit_code": 0,
            "elapsed_s": 1.0,
            "why": None,
        },
    ]


def write_events(run_dir, *events):
    with open(run_dir.events, "a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)


# What goes along.


def test_the_plan_goes_along_in_the_secret(sweep):
    plan, run_dir = sweep
    job = bring_sweep(plan, run_dir, JOB)
    assert sorted(dict(job.brings)) == [
        "code.tar.gz", "key", "order.json", "package.txz", "start.py", "sweep.json",
    ]  # fmt: skip
    order = pod_order(run_dir)
    assert (order.is_sweep, order.num_pods, order.group) == (True, 2, None)


def test_values_that_have_no_room_in_a_secret_are_refused(sweep, tmp_path):
    plan, _ = sweep
    long = replace(plan, run=replace(plan.run, run_id="long"))
    long = replace(long, members=tuple((f"{n:0100}",) for n in range(5000)))
    run_dir = create_sweep_dir(long)
    with pytest.raises(UsageError, match="the values of 5,000 members take 5"):
        bring_sweep(long, run_dir, JOB)


# What comes back.


@pytest.fixture
def copies(sweep):
    plan, run_dir = sweep
    bring_sweep(plan, run_dir, JOB)
    return MemberCopies(run_dir, pod_order(run_dir))


def piece(path, data=b"x", offset=0):
    return FilePiece(path=path, offset=offset, data=data)


@pytest.mark.parametrize(
    "path",
    [
        "members/s.0/plan.json",
        "members/s.0/secret",
        "members/s.3/events.jsonl",  # there is no such member
        "members/other.0/events.jsonl",
        "members/s.00/events.jsonl",
        "members/s.0/code/fit.py",
    ],
)
def test_pods_write_the_record_of_members_and_nothing_else(copies, sweep, path):
    with pytest.raises(FrameError):
        copies.take(piece(path))
    assert not os.listdir(sweep[1].members)


def test_a_member_gets_its_folder_with_the_first_of_its_record(copies, sweep):
    plan, run_dir = sweep
    copies.take(piece("members/s.1/logs/main/train/attempt-0/rank-0.log", b"one\n"))
    copies.take(piece("members/s.1/logs/main/train/attempt-0/rank-0.log", b"two\n", 4))
    folder = member_dir(run_dir, plan, 1)
    assert Path(folder.rank_log(0, 0)).read_text() == "one\ntwo\n"
    assert os.path.exists(folder.plan)


def test_a_result_names_the_files_here(copies, sweep):
    plan, run_dir = sweep
    theirs = f"{pod_order(run_dir).run_dir.members}/s.1"
    result = codec.to_plain(result_of("s.1", RunState.FAILED))
    result["report"] = {"error": f"see {theirs}/logs/main", "at": None, "because": [], "hint": None}
    copies.take(piece("members/s.1/result.json", json.dumps(result).encode()))
    folder = member_dir(run_dir, plan, 1)
    assert read_result(folder).report.error == f"see {folder.path}/logs/main"


def test_only_members_that_are_over_need_not_come_again(copies, sweep):
    plan, run_dir = sweep
    for number, state in enumerate((RunState.SUCCEEDED, RunState.CANCELLED, RunState.FAILED)):
        plain = codec.to_plain(result_of(f"s.{number}", state))
        copies.take(piece(f"members/s.{number}/result.json", json.dumps(plain).encode()))
    whole = [os.path.dirname(path) for path in MemberCopies(run_dir, pod_order(run_dir)).whole()]
    assert whole == [member_dir(run_dir, plan, number).path for number in (0, 2)]


def test_a_later_record_of_a_member_takes_the_place_of_the_one_before(copies, sweep):
    plan, run_dir = sweep
    copies.take(piece("members/s.1/events.jsonl", b"a long line of a pod that is lost\n"))
    again = MemberCopies(run_dir, pod_order(run_dir))
    again.take(piece("members/s.1/events.jsonl", b"short\n"))
    assert Path(member_dir(run_dir, plan, 1).events).read_text() == "short\n"


def test_the_record_of_a_sweep_comes_through_one_connection(sweep, cluster, tmp_path, monkeypatch):
    from kit.ports import reserve_port

    plan, run_dir = sweep
    port = reserve_port()
    bring_sweep(plan, run_dir, JOB)
    cluster.say(pods="job-pods-running", forward=port)
    monkeypatch.setattr(
        "unit.owner.pods.test_mirror.order_of",
        lambda **given: replace(pod_order(run_dir), **given),
    )
    pod = FirstPod(run_dir, tmp_path / "pod", port)
    theirs = pod.order.run_dir
    try:
        pod.mark("disk-1")
        write_events(theirs, *ended(0, "succeeded"))
        for number in (0, 1):
            folder = member_dir(theirs, plan, number)
            os.makedirs(os.path.dirname(folder.rank_log(0, 0)))
            Path(folder.rank_log(0, 0)).write_text(f"member {number}\n")
        done = member_dir(theirs, plan, 0)
        atomic.write_json(done.result, codec.to_plain(result_of("s.0", RunState.SUCCEEDED)))
        os.makedirs(os.path.join(done.path, "output"))
        Path(done.path, "output", "model.bin").write_text("weights")
        pod.end(result_of("s", RunState.FAILED))
        mirror = RecordMirror(run_dir, pod.order, JOB_ID, PodWatch(JOB_ID), lambda _: None)
        mirror.catch_up()
    finally:
        pod.process.terminate()
        pod.process.wait(30)
        pod.process.stdout.close()
    assert read_result(run_dir).state is RunState.FAILED
    view = view_sweep(run_dir, is_alive=False)
    assert [m.state for m in view.members][:2] == [RunState.SUCCEEDED, RunState.WAITING]
    for number in (0, 1):
        log = member_dir(run_dir, plan, number).rank_log(0, 0)
        assert Path(log).read_text() == f"member {number}\n"
    here = member_dir(run_dir, plan, 0)
    assert Path(here.path, "output", "model.bin").read_text() == "weights"
    assert read_result(here).state is RunState.SUCCEEDED


def test_who_looks_at_a_member_copies_its_sweep(sweep, monkeypatch):
    plan, run_dir = sweep
    seen = []
    monkeypatch.setattr(RunCopy, "of", lambda folder, *_: seen.append(folder.path))
    with copied(member_dir(run_dir, plan, 1)), copied(run_dir):
        assert seen == [run_dir.path] * 2


# Again.


def test_what_has_not_succeeded_goes_into_another_job_of_another_name(sweep):
    plan, run_dir = sweep
    bring_sweep(plan, run_dir, JOB)
    write_events(run_dir, *ended(0, "succeeded"), *ended(1, "failed"))
    for number in (0, 1):
        os.makedirs(member_dir(run_dir, plan, number).path)
    atomic.write_json(run_dir.result, codec.to_plain(result_of("s", RunState.FAILED)))
    job = job_again(view_sweep(run_dir, is_alive=False), run_dir, JOB)
    assert (job.name, job.num_nodes) == ("s-1", 2)
    assert SETTLED_FILE in dict(bring_sweep(plan, run_dir, job).brings)
    view = view_sweep(run_dir, is_alive=True)
    assert [m.state for m in view.members] == [
        RunState.SUCCEEDED, RunState.WAITING, RunState.WAITING,
    ]  # fmt: skip
    assert sorted(os.listdir(run_dir.members)) == ["s.0"]
    assert sorted(os.listdir(os.path.join(run_dir.path, "earlier", "1"))) == [
        "events.jsonl", "result.json", "s.1",
    ]  # fmt: skip


def test_a_second_time_has_a_name_of_its_own_and_no_more_pods_than_members(sweep):
    plan, run_dir = sweep
    bring_sweep(plan, run_dir, JOB)
    write_events(run_dir, *ended(0, "succeeded"), *ended(1, "succeeded"))
    view = view_sweep(run_dir, is_alive=False)
    first = job_again(view, run_dir, JOB)
    second = job_again(view_sweep(run_dir, is_alive=False), run_dir, first)
    assert (first.name, first.num_nodes) == ("s-1", 1)
    assert (second.name, second.num_nodes) == ("s-2", 1)
