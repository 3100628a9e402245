"""What a run brings along, and what is asked of a cluster before."""

import hashlib
import json
import os
import random
import subprocess
import sys
import tarfile
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest

from kit.packages import keep_package
from kit.records import lines
from kit.values import run_plan, run_result
from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.owner.create import create_run_dir
from torchmuster.errors import MusterError, UsageError
from torchmuster.kubernetes.engine.dialect import DIALECT
from torchmuster.kubernetes.firstpod.conduct import link_earlier_snapshots
from torchmuster.kubernetes.pods.bring import (
    EarlierRun,
    bring_run,
    check_code,
    find_earlier_run,
    lost_with_pods,
    settle_place,
    settle_site,
)
from torchmuster.kubernetes.pods.reach import pod_order
from torchmuster.launcher.views.account import find_saved, how_to_go_on
from unit.kubernetes.engine.site_jobs import DEFAULT, site
from unit.kubernetes.pods.conftest import RUN_ID, forbidden, order_of, site_of, write_order

PLAIN = replace(DEFAULT, own_keys=(("image", "x"),))


@pytest.fixture
def home(tmp_path):
    """A home that has torchmuster packed."""
    keep_package(tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def code(tmp_path, monkeypatch, home):
    monkeypatch.setenv("MUSTER_HOME", str(home))
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print('hi')\n")
    return folder


def plan_of(code):
    return run_plan(2, run_id=RUN_ID, target="train.py", cwd=str(code))


def bring(code, folder, job=DEFAULT, **given) -> tuple:
    plan = plan_of(code)
    run_dir = create_run_dir(plan, str(folder))
    return bring_run(plan, run_dir, job, 60.0, **given), run_dir


def test_small_code_travels_in_the_secret(code, tmp_path):
    job, run_dir = bring(code, tmp_path / "runs", start_limit_s=30.0)

    order = pod_order(run_dir)
    assert (order.job, order.num_pods, order.port) == ("run-7f3a", 2, 29417)
    assert (order.code_root, order.code_bytes) == (str(code), None)
    assert (order.home, order.warn_s, order.start_limit_s) == ("/scratch/muster", 60.0, 30.0)
    brings = dict(job.brings)
    assert sorted(brings) == [
        "1/package.txz", "code.tar.gz", "key", "order.json", "plan.json", "start.py",
    ]  # fmt: skip
    with open(brings["code.tar.gz"], "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == order.code_sha
    own = sum(os.path.getsize(path) for name, path in brings.items() if "/" not in name)
    assert own < 64 << 10


@pytest.mark.parametrize("seed", range(8))
def test_what_the_secrets_hold_is_whole_in_a_pod_whatever_its_sizes(code, tmp_path, seed):
    draw = random.Random(seed)
    for number in range(draw.randint(0, 6)):
        size = draw.choice([1, 60 << 10, 300 << 10, 900 << 10])
        (code / f"data-{number}").write_bytes(draw.randbytes(size))
    job, run_dir = bring(code, tmp_path / "runs")
    files = {name: Path(path).read_bytes() for name, path in job.brings}
    *secrets, _, made = json.loads(DIALECT.with_files(job, files))["items"]
    sizes = [sum(len(b64decode(data)) for data in one["data"].values()) for one in secrets]
    assert sizes[0] <= 64 << 10
    assert max(sizes) <= 1 << 20
    assert len(sizes) <= 5
    sources = made["spec"]["template"]["spec"]["volumes"][0]["projected"]["sources"]
    assert [one["secret"]["name"] for one in sources] == [s["metadata"]["name"] for s in secrets]
    # What a kubelet does, then the first lines of a pod.
    mounted, disk = tmp_path / "muster", tmp_path / "disk"
    mounted.mkdir(), disk.mkdir()
    for name, data in (pair for one in secrets for pair in one["data"].items()):
        (mounted / name).write_bytes(b64decode(data))
    gather = "import start; print(start.gather())"
    environment = {**os.environ, "MUSTER_POD_DISK": str(disk), "PYTHONPATH": str(mounted)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # nothing can be written where Secrets are
    argv = [sys.executable, "-c", gather]
    came = Path(subprocess.check_output(argv, env=environment, text=True).strip())
    archive = Path(run_dir.path) / "pods" / "code.tar.gz"
    is_brought = pod_order(run_dir).code_bytes is None
    assert is_brought == (came / "code.tar.gz").exists()
    assert not is_brought or (came / "code.tar.gz").read_bytes() == archive.read_bytes()
    (package,) = (data for name, data in files.items() if name.endswith("/package.txz"))
    assert (came / "package.txz").read_bytes() == package
    assert {path.name for path in came.iterdir()} - {"code.tar.gz"} == {
        "key", "order.json", "package.txz", "plan.json", "start.py"
    }  # fmt: skip


def test_torchmuster_may_grow_beyond_one_secret(code, tmp_path, monkeypatch):
    large = tmp_path / "large.txz"
    large.write_bytes(random.Random(2).randbytes(2 << 20))
    monkeypatch.setattr("torchmuster.kubernetes.pods.bring._package", lambda _: str(large))
    job, run_dir = bring(code, tmp_path / "runs")
    pieces = [path for name, path in job.brings if "package.txz.part-" in name]
    assert b"".join(Path(path).read_bytes() for path in pieces) == large.read_bytes()
    assert pod_order(run_dir).code_bytes is None


def test_a_function_that_has_no_room_in_the_secrets_is_refused_with_the_room(code, tmp_path):
    plan = plan_of(code)
    run_dir = create_run_dir(plan, str(tmp_path / "runs"))
    Path(run_dir.call).write_bytes(random.Random(3).randbytes(5 << 20))
    with pytest.raises(UsageError, match="the function and its arguments take 5 MiB") as caught:
        bring_run(plan, run_dir, DEFAULT, 60.0)
    assert "4 MiB with torchmuster itself" in caught.value.why


def test_the_same_code_is_the_same_archive_whatever_its_times_and_the_umask(code, tmp_path):
    shas = []
    for number in range(2):
        (code / "train.py").chmod(0o644 if number else 0o664)
        os.utime(code / "train.py", (1e9 + number, 1e9 + number))
        _, run_dir = bring(code, tmp_path / f"runs-{number}")
        shas.append(pod_order(run_dir).code_sha)
    (code / "train.py").chmod(0o755)
    _, run_dir = bring(code, tmp_path / "executable")
    assert shas[0] == shas[1] != pod_order(run_dir).code_sha


def test_the_same_torchmuster_is_packed_once_and_without_what_only_a_client_needs(code, tmp_path):
    first, _ = bring(code, tmp_path / "a")
    path = dict(first.brings)["1/package.txz"]
    before = os.stat(path).st_mtime_ns
    second, _ = bring(code, tmp_path / "b")
    assert dict(second.brings)["1/package.txz"] == path
    assert os.stat(path).st_mtime_ns == before
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert "torchmuster/kubernetes/node/start.py" in names
    of_clients = (
        "torchmuster/core/cli/run.py",
        "torchmuster/report/",
        "torchmuster/diagnose/lint/",
    )
    kept = [name for name in names if name.startswith(of_clients)]
    assert {name.rpartition("/")[2] for name in kept} <= {"__init__.py", "plug.py"}


@pytest.mark.parametrize(
    "module",
    [
        "torchmuster.workflow.data.__main__",
        "torchmuster.workflow.data.reference",
        "torchmuster.kubernetes.firstpod.conduct",
        "torchmuster.kubernetes.firstpod.conduct_group",
    ],
)
def test_what_comes_along_can_own_runs_and_move_data(code, tmp_path, module):
    job, _ = bring(code, tmp_path / "runs")
    with tarfile.open(dict(job.brings)["1/package.txz"]) as archive:
        archive.extractall(tmp_path / "package", filter="data")
    found = f"import sys; sys.path.insert(0, {str(tmp_path / 'package')!r}); import {module}"
    subprocess.run([sys.executable, "-I", "-S", "-c", found], check=True)


def test_large_code_is_sent_later_where_that_is_allowed(code, tmp_path, cluster):
    (code / "weights.bin").write_bytes(random.Random(1).randbytes(5 << 20))
    job, run_dir = bring(code, tmp_path / "runs")
    order = pod_order(run_dir)
    assert not [name for name in dict(job.brings) if "code.tar.gz" in name]
    archive = os.path.join(run_dir.path, "pods", "code.tar.gz")
    assert order.code_bytes == os.path.getsize(archive) > 4 << 20
    assert cluster.asked == ["auth can-i create pods --subresource=portforward"]


def test_large_code_without_a_way_is_refused_before_anything_is_made(code, tmp_path, cluster):
    (code / "weights.bin").write_bytes(random.Random(1).randbytes(5 << 20))
    cluster.say(answers={"can-i": "no"})
    with pytest.raises(UsageError) as caught:
        bring(code, tmp_path / "runs")
    assert "pods/portforward" in caught.value.why
    assert not any("create -f" in line for line in cluster.asked)


def test_what_nobody_could_take_is_refused_but_not_where_the_cluster_refuses_the_job_itself(
    cluster,
):
    job = settle_place(replace(PLAIN, name="train"), 2)
    cluster.say(answers={"create pods": "no", "create jobs.batch": "yes"})
    with pytest.raises(UsageError, match="nobody could take"):
        lost_with_pods(job)
    cluster.say(answers={"can-i": "no"})
    assert lost_with_pods(job) == []


def test_a_script_outside_of_the_code_is_refused(code, tmp_path):
    plan = plan_of(code)
    outside = replace(plan, program=replace(plan.program, target=str(tmp_path / "other.py")))
    with pytest.raises(UsageError):
        check_code(outside.program)


def test_what_a_site_does_not_say_is_that_of_kubectl(cluster):
    job = settle_place(replace(PLAIN, name="Train_7f3a"), 2)
    keys = dict(job.own_keys)
    assert (keys["context"], keys["namespace"], job.name) == ("lab", "research", "train-7f3a")
    assert "pod_security" not in keys


def test_what_a_site_says_is_not_asked_for(cluster):
    keys = (("image", "x"), ("context", "c"), ("namespace", "n"), ("pod_security", "baseline"))
    job = settle_place(replace(PLAIN, own_keys=keys), 2)
    assert dict(job.own_keys) == dict(keys)
    assert cluster.asked == []


def test_pods_fit_the_level_that_the_namespace_enforces(cluster):
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.say(answers={"get namespace": {"metadata": {"name": "research", "labels": labels}}})
    assert dict(settle_place(PLAIN, 1).own_keys)["pod_security"] == "restricted"


def test_who_may_not_read_the_namespace_may_still_run(cluster):
    refusal = forbidden('namespaces "research"', "get", "namespaces")
    cluster.say(refuse={"get namespace": refusal})
    assert "pod_security" not in dict(settle_place(PLAIN, 1).own_keys)


def test_mistakes_of_the_site_need_no_cluster(cluster):
    with pytest.raises(UsageError):
        settle_place(replace(PLAIN, own_keys=(("image", "x"), ("shm", "lots"))), 1)
    assert cluster.asked == []


# A queue that is not there is told in the words of `golden/test_kubernetes_messages.py`.
@pytest.mark.parametrize(
    "case",
    [
        {"queues": ["gpus"]},
        # Who may not list them is told by the Job's own state.
        {"refuse": {"localqueues": [1, "Error from server (Forbidden): no\n"]}},
    ],
)
def test_a_queue_that_is_there_or_may_not_be_looked_for_is_taken(cluster, case):
    cluster.say(**case)
    assert settle_place(replace(PLAIN, queue="gpus"), 1).queue == "gpus"


def test_the_queue_of_another_scheduler_is_not_kueues(cluster):
    keys = (*PLAIN.own_keys, ("gang", "volcano"))
    assert settle_place(replace(PLAIN, queue="gpus", own_keys=keys), 1).queue == "gpus"
    assert not any("localqueues" in line for line in cluster.asked)


# Recorded: kubectl of who may do everything, on a cluster without JobSet.
NO_JOBSETS = (
    b"Warning: the server doesn't have a resource type 'jobsets' in group 'jobset.x-k8s.io'\n\n"
)


def settled(**keys):
    settled = settle_site(site_of(image="x", **keys), has_kinds=True)
    return dict(settled.own_keys).get("jobset")


def test_pods_of_several_kinds_are_a_jobset_where_the_user_may_make_one(cluster):
    assert settled() == "yes"
    cluster.say(answers={"can-i delete jobsets.jobset.x-k8s.io": "no"})
    assert settled() == "no"


def test_a_right_to_everything_makes_no_jobsets_where_there_are_none(cluster, monkeypatch):
    def without(argv, request, limit_s):
        said = asks(argv, request, limit_s)
        return replace(said, stderr=NO_JOBSETS) if "can-i" in argv else said

    asks = proc.ask
    monkeypatch.setattr(proc, "ask", without)
    assert settled() == "no"


def test_the_users_own_word_on_jobsets_counts_and_nobody_is_asked(cluster):
    assert (settled(jobset="no"), settled(gang="volcano")) == ("no", None)
    assert not any("can-i" in line for line in cluster.asked)


# A run in pods that is started again: what it goes on from, and what has gone with the pods.


ON_VOLUME = order_of(home="/home/team/muster", has_volume=True)
OWN = f"/home/team/muster/runs/{RUN_ID}/snapshots"
GONE = f"/scratch/muster/runs/{RUN_ID}/snapshots"


VOLUME = site(claims="team:/home/team", home="/home/team/muster")


def leave(run_dir, folder, step):
    """Leave the record of a training that has saved into a folder of its pods."""
    saved = {"event": "saved", "step": step, "saved": step, "folder": folder}
    resumed = {"event": "resumed", "folder": folder, "step": 0}
    lines(run_dir.training, [resumed] if step is None else [resumed, saved])


def test_a_run_on_a_volume_goes_on_from_its_last_snapshot(run_dir):
    leave(run_dir, OWN, 60)
    before = find_earlier_run(run_dir, ON_VOLUME, VOLUME)
    assert before == EarlierRun(run_id=RUN_ID, saved_step=60)


def test_a_run_that_was_not_followed_goes_on_from_what_the_volume_has(run_dir):
    assert find_earlier_run(run_dir, ON_VOLUME, VOLUME) == EarlierRun(
        run_id=RUN_ID, saved_step=None
    )


@pytest.mark.parametrize("keys", [DEFAULT, site(claims="data:/data:ro")])
def test_what_was_on_the_disks_of_pods_is_refused_with_the_step_that_is_lost(run_dir, keys):
    leave(run_dir, GONE, 60)
    with pytest.raises(UsageError) as caught:
        find_earlier_run(run_dir, order_of(), keys)
    error = caught.value
    assert error.what == "the snapshots of train-7f3a are gone: the last was of step 60"
    assert (error.where, error.why) == (
        GONE,
        "they were on the disks of its pods and went with them",
    )
    assert "`claims` and `home`" in error.fix


def test_a_folder_of_the_script_on_no_volume_is_lost_although_the_run_is_on_one(run_dir):
    leave(run_dir, "/scratch/mine", 60)
    with pytest.raises(UsageError) as caught:
        find_earlier_run(run_dir, ON_VOLUME, VOLUME)
    assert caught.value.where == "/scratch/mine"


def test_a_step_that_only_the_result_tells_of_is_lost_too(run_dir):
    result = run_result(RunState.CANCELLED, 130, run_id=RUN_ID, saved_step=9)
    atomic.write_json(run_dir.result, codec.to_plain(result))
    with pytest.raises(UsageError) as caught:
        find_earlier_run(run_dir, order_of(), DEFAULT)
    assert (caught.value.where, caught.value.what[-1]) == (GONE, "9")


@pytest.mark.parametrize(
    ("folder", "step"),
    [("s3://bucket/mine", 60), ("/data/mine", 60), ("/data", 60), (GONE, None), (None, None)],
)
def test_what_pods_have_not_taken_along_begins_as_its_command_would(run_dir, folder, step):
    if folder is not None:
        leave(run_dir, folder, step)
    assert find_earlier_run(run_dir, order_of(), site(claims="x:/data")) is None


@pytest.mark.parametrize(("order", "is_seen"), [(ON_VOLUME, True), (order_of(), False)])
def test_the_end_of_a_run_names_the_command_that_goes_on_where_that_finds_something(
    run_dir, order, is_seen
):
    folder = order.run_dir.snapshots
    write_order(run_dir, order)
    leave(run_dir, folder, 60)
    assert find_saved(run_dir).is_seen == is_seen
    went = "saved at step 60, on the disk of a pod, and went with it: `claims` and `home` of the site keep snapshots"
    if not is_seen:
        assert how_to_go_on(run_dir) == went


def test_the_next_run_finds_the_snapshots_of_the_one_before_also_in_a_pod_made_again(tmp_path):
    order = replace(ON_VOLUME, home=str(tmp_path), run_id="next", saved_step=60)
    old = RunDir(str(tmp_path / "runs" / "before")).snapshots
    os.makedirs(os.path.join(old, "step-000000060"))
    os.makedirs(order.run_dir.path)
    for _ in range(2):
        link_earlier_snapshots(order, "before")
        assert os.listdir(order.run_dir.snapshots) == ["step-000000060"]
    assert os.path.realpath(order.run_dir.snapshots) == old


def test_snapshots_that_the_volume_has_lost_are_no_silent_start_at_step_0(tmp_path):
    order = replace(ON_VOLUME, home=str(tmp_path), run_id="next", saved_step=60)
    os.makedirs(order.run_dir.path)
    with pytest.raises(MusterError) as caught:
        link_earlier_snapshots(order, "before")
    assert caught.value.what == "the snapshots of before are gone: the last was of step 60"
    link_earlier_snapshots(replace(order, saved_step=None), "before")  # nothing had been saved
    assert os.listdir(order.run_dir.snapshots) == []
