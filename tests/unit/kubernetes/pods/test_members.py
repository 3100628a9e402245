"""Members of a sweep that are pods of one Job: what they bring along, what is taken of them here, and what another machine sees."""

import json
import os
import time
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from kit.packages import keep_package
from kit.records import start
from kit.training import view_training
from kit.values import run_plan, run_result
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.states import RunState
from torchmuster.core.owner.record import read_lines, read_result
from torchmuster.errors import UsageError
from torchmuster.kubernetes.node import order as orders
from torchmuster.kubernetes.node.order import place_member, read_order
from torchmuster.kubernetes.pods.copy import copied
from torchmuster.kubernetes.pods.elsewhere import find_on_clusters
from torchmuster.kubernetes.pods.members import (
    MemberCopies,
    bring_members,
    cancel_pods,
    catch_up_members,
    submit_pods,
)
from torchmuster.kubernetes.pods.reach import job_of, pod_order
from torchmuster.launcher.jobs.jobs import MIN_PERSIST_S, forget_views
from torchmuster.launcher.views.find import view_run
from torchmuster.multirun.sweep.arrays import read_arrays
from torchmuster.multirun.sweep.members import create_sweep_dir, member_dir
from torchmuster.multirun.sweep.plan import SweepPlan
from torchmuster.multirun.views import sweep_view
from unit.kubernetes.engine.site_jobs import DEFAULT
from unit.kubernetes.pods.conftest import shown_job, shown_pod

JOB = replace(DEFAULT, own_keys=(("image", "x"), ("context", "lab"), ("namespace", "research")))


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Return a sweep of three members, not submitted yet, with its plan."""
    keep_package(tmp_path / "home")
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sweep_view, "FIRST_POLL_S", 0.0)
    code = tmp_path / "code"
    code.mkdir()
    (code / "fit.py").write_text("print('hi')\n")
    run = run_plan(run_id="s", target="fit.py", cwd=str(code))
    plan = SweepPlan(run=run, names=("n",), members=(("0",), ("1",), ("2",)), slots=2)
    return plan, create_sweep_dir(plan)


def submitted(sweep, members=range(3)):
    plan, run_dir = sweep
    return submit_pods(plan, run_dir, JOB, members, detach=False)


@pytest.fixture
def running(sweep, cluster):
    """Return the same when all its members are submitted."""
    submitted(sweep)
    return sweep


def says(*pods, **status):
    """Return what the cluster says of the Job of the sweep."""
    return {"get jobs.batch,pods": {"items": [shown_job("s", 3, **status), *pods]}}


def pod(index, state):
    return shown_pod(state, index, "s")


def ended(code, number=None, state=RunState.SUCCEEDED, reason="Completed", **more):
    message = ""
    if number is not None:
        result = run_result(state, run_id=f"s.{number}", elapsed_s=2.0)
        message = json.dumps(codec.to_plain(result) | more)
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def states(run_dir):
    return [member.state for member in view_run(run_dir).sweep.members]


# What goes along.


def test_the_plan_and_the_numbers_of_the_members_go_along_in_the_secret(sweep):
    plan, run_dir = sweep
    job = bring_members(plan, run_dir, JOB, (0, 2), 1, detach=True)
    assert sorted(dict(job.brings)) == [
        "1/package.txz", "code.tar.gz", "key", "order.json", "start.py", "sweep.json",
    ]  # fmt: skip
    order = pod_order(run_dir)
    assert (order.is_sweep, order.num_pods, order.members) == (True, 2, (0, 2))
    assert (job.name, job.array.size, job.array.parallel) == ("s-1", 2, 2)


def test_a_time_limit_is_that_of_each_member_and_not_of_their_job(sweep):
    plan, run_dir = sweep
    job = bring_members(plan, run_dir, replace(JOB, time_limit_s=60.0), range(3), 0, detach=True)
    assert (job.time_limit_s, pod_order(run_dir).time_limit_s) == (None, 60.0)


def test_values_that_have_no_room_in_a_secret_are_refused(sweep):
    plan, _ = sweep
    long = replace(plan, run=replace(plan.run, run_id="long"))
    long = replace(long, members=tuple((f"{n:01000}",) for n in range(5000)))
    run_dir = create_sweep_dir(long)
    with pytest.raises(UsageError, match=r"the values of all members take 4\.8"):
        bring_members(long, run_dir, JOB, range(5000), 0, detach=False)


def test_code_that_a_client_has_to_send_is_refused_where_none_stays(sweep, cluster, tmp_path):
    plan, run_dir = sweep
    (tmp_path / "code" / "data.bin").write_bytes(os.urandom(5 << 20))
    with pytest.raises(UsageError, match="too large for Secrets"):
        bring_members(plan, run_dir, JOB, range(3), 0, detach=True)
    assert bring_members(plan, run_dir, JOB, range(3), 0, detach=False).brings
    assert pod_order(run_dir).code_bytes > 4 << 20


# In the pod.


def test_a_pod_is_the_only_one_of_the_run_that_its_member_is(sweep, tmp_path):
    plan, run_dir = sweep
    brought = tmp_path / "secret"
    brought.mkdir()
    for name, path in bring_members(plan, run_dir, JOB, (0, 2), 0, detach=True).brings:
        (brought / os.path.basename(name)).write_bytes(Path(path).read_bytes())
    order = replace(pod_order(run_dir), home=str(tmp_path / "volume"))
    atomic.write_json(str(brought / "order.json"), codec.to_plain(order))
    earlier = replace(order, job="earlier").of_member(1)
    os.makedirs(earlier.folder)
    for left in (earlier.ended, earlier.run_dir.result, earlier.run_dir.cancelled):
        atomic.write_json(left, {})

    path = place_member(
        str(brought / "order.json"), {"JOB_COMPLETION_INDEX": "1"}, str(tmp_path / "own")
    )

    mine = read_order(path)
    assert (mine.run_id, mine.num_pods, mine.address(0), mine.index) == ("s.2", 1, "s-1.s", 1)
    placed = codec.from_plain(RunPlan, atomic.read_json(str(tmp_path / "own" / orders.PLAN_FILE)))
    assert placed == plan.member_plan(2)
    assert (tmp_path / "own" / orders.CODE_FILE).exists()
    left = (mine.ended, mine.run_dir.result, mine.run_dir.cancelled)
    assert not any(map(os.path.exists, left))  # of the Job before
    atomic.write_json(mine.run_dir.result, {})
    place_member(str(brought / "order.json"), {"JOB_COMPLETION_INDEX": "1"}, str(tmp_path / "own"))
    assert os.path.exists(mine.run_dir.result)  # of this one, whose pod was made again


# What is taken here.


def test_verdict_and_log_of_a_pod_that_has_ended_are_taken_from_the_cluster(running, cluster):
    plan, run_dir = running
    gone = pod(1, ended(113, 1, RunState.FAILED, "Error"))
    waits = pod(2, {"waiting": {"reason": "ErrImagePull", "message": "no such image"}})
    answers = says(pod(0, ended(0, 0)), gone, waits, completedIndexes="0", failedIndexes="1")
    cluster.say(answers=answers, logs="loss=3\n")

    catch_up_members(run_dir)

    assert states(run_dir) == [RunState.SUCCEEDED, RunState.FAILED, RunState.WAITING]
    assert view_run(run_dir).sweep.members[2].why == "ErrImagePull: no such image"
    member = member_dir(run_dir, plan, 0)
    assert read_result(member).elapsed_s == 2.0
    assert Path(member.rank_log(0, 0)).read_text() == "loss=3\n"
    assert (job_of(member), pod_order(member).index) == ("lab/research/s", 0)
    assert Path(member.secret).read_text() == Path(run_dir.secret).read_text()
    asked = len(cluster.asked)
    with copied(member):
        pass
    assert any("get jobs.batch,pods" in line for line in cluster.asked[asked:])


def test_the_newest_metrics_are_in_the_last_message_of_a_pod_that_nobody_followed(running, cluster):
    plan, run_dir = running
    told = {"event": "metrics", "step": 40, "values": {"loss": 0.5, "lr": 1e-3}}
    finished = pod(0, ended(0, 0, training=told)), pod(1, ended(0, 1)), pod(2, ended(0, 2))
    member = member_dir(run_dir, plan, 0)
    os.makedirs(member.path)
    torn = {"event": "metrics", "step": 30, "values": {"loss": 0.75, "accuracy": 0.25}}
    Path(member.training).write_text(f"{json.dumps(torn)}\n{json.dumps(torn)[:20]}")
    cluster.say(answers=says(*finished, completedIndexes="0-2"))

    catch_up_members(run_dir)

    seen = view_training(read_lines(member.training))
    assert seen.step == 40
    assert dict(seen.values) == {"loss": 0.5, "accuracy": 0.25, "lr": 1e-3}


def test_a_job_stays_whose_pods_have_made_files_that_nobody_has_taken(running, cluster):
    plan, run_dir = running
    failed = pod(1, ended(113, 1, RunState.FAILED, "Error", num_files=1))
    done = pod(0, ended(0, 0, num_files=2)), failed, pod(2, ended(0, 2))
    cluster.say(answers=says(*done, completedIndexes="0,2", failedIndexes="1"))
    copies = MemberCopies.of(run_dir)
    copies.close()
    assert not any(line.startswith("delete") for line in cluster.asked)
    assert states(run_dir) == [RunState.SUCCEEDED, RunState.FAILED, RunState.SUCCEEDED]
    result = read_result(member_dir(run_dir, plan, 0))
    assert (result.exit_code, result.report.error) == (
        15, "2 files that it made did not come here, and went with pod s-0-x",
    )  # fmt: skip
    assert view_run(run_dir).result.exit_code == 1  # of the member that failed


def test_a_record_that_goes_on_on_a_volume_is_counted_though_only_its_end_has_come(
    running, cluster
):
    _, run_dir = running
    member = MemberCopies.of(run_dir).place(1)
    begun = [start(attempt, attempt) for attempt in range(2)]
    Path(member.events).write_text("".join(json.dumps(one) + "\n" for one in begun))
    done = says(pod(1, ended(0, 1, attempts=3)))
    cluster.say(answers=done, logs="loss=1\n")
    catch_up_members(run_dir)
    assert view_run(run_dir).sweep.members[1].attempt == 2
    assert Path(member.rank_log(2, 0)).read_text() == "loss=1\n"


def test_a_pod_that_is_lost_is_made_again_until_its_index_has_failed(running, cluster):
    _, run_dir = running
    lost = pod(0, ended(137, reason="OOMKilled"))
    cluster.say(answers=says(lost))
    catch_up_members(run_dir)
    assert states(run_dir)[0] is RunState.WAITING
    cluster.say(answers=says(lost, failedIndexes="0"))
    catch_up_members(run_dir)
    view = view_run(run_dir).sweep.members[0]
    assert (view.state, view.why) == (RunState.FAILED, "its pod left no result: OOMKilled")


def test_pods_that_can_never_start_end_the_sweep_with_the_clusters_sentence(running, cluster):
    plan, run_dir = running
    waits = {"waiting": {"reason": "InvalidImageName", "message": "no such name"}}
    cluster.say(answers=says(pod(0, waits), pod(1, waits)))
    forget_views()
    copies = MemberCopies.of(run_dir)
    copies.look(once=False)
    assert states(run_dir) == [RunState.WAITING] * 3
    copies._never.clock = lambda: time.monotonic() + MIN_PERSIST_S
    copies.look(once=False)
    result = read_result(member_dir(run_dir, plan, 2))
    assert "can never start" in result.report.error
    assert "InvalidImageName" in result.report.because[0]
    assert states(run_dir) == [RunState.FAILED] * 3
    assert any(line.startswith("delete") for line in cluster.asked)


def test_a_job_that_is_no_more_leaves_its_members_lost_or_cancelled(running, cluster):
    _, run_dir = running
    cluster.say(answers={"get jobs.batch,pods": {"items": []}})
    assert states(run_dir) == [RunState.LOST] * 3
    cancel_pods(run_dir)
    assert states(run_dir) == [RunState.CANCELLED] * 3
    assert [line.split()[1] for line in cluster.asked if line.startswith("delete")] == [
        "jobs.batch/s"
    ]


def test_members_that_run_again_are_another_job_and_the_one_before_goes(sweep, running, cluster):
    _, run_dir = running
    assert submitted(sweep, members=(1,)) == "lab/research/s-1"
    noted = read_arrays(run_dir)
    assert [(one.job_id, one.members) for one in noted.arrays] == [
        ("lab/research/s", (0, 1, 2)), ("lab/research/s-1", (1,)),
    ]  # fmt: skip
    assert any("delete jobs.batch/s " in line for line in cluster.asked)


def test_another_machine_finds_the_sweep_by_its_job(sweep, cluster, tmp_path, monkeypatch):
    plan, run_dir = sweep
    submitted(sweep, members=(0, 2))
    made = json.loads(Path(run_dir.job_script).read_text())["items"]
    job = next(one for one in made if one["kind"] == "Job")
    brought = {"order.json": os.path.join(run_dir.path, "pods", "order.json")}
    brought |= {"key": run_dir.secret, "sweep.json": run_dir.sweep}
    data = {name: b64encode(Path(path).read_bytes()).decode() for name, path in brought.items()}
    answers = {"get jobs.batch -l": {"items": [job]}, "get secret s": {"data": data}}
    cluster.say(answers={**answers, **says(pod(1, {"running": {}}))})
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "other"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "muster.toml").write_text('[engines.k]\nkind = "kubernetes"\nimage = "x"\n')

    found = find_on_clusters("s")

    view = view_run(found).sweep
    assert view.plan == plan
    assert [m.state for m in view.members] == [
        RunState.WAITING, RunState.SUCCEEDED, RunState.RUNNING,
    ]  # fmt: skip
    assert view.members[1].why == "it had ended before the others ran again"
