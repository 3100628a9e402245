"""A run in pods that is started again: what it goes on from, and what has gone with the pods."""

import os
from dataclasses import replace

import pytest

from kit.records import lines
from kit.values import run_result
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.errors import MusterError, UsageError
from torchmuster.kubernetes.firstpod.conduct import link_earlier_snapshots
from torchmuster.kubernetes.pods.bring import EarlierRun, find_earlier_run
from torchmuster.launcher.model.job import JobRequest, NodeChunk
from torchmuster.launcher.views.account import find_saved, how_to_go_on
from unit.kubernetes.pods.conftest import RUN_ID, order_of

ON_VOLUME = order_of(home="/home/team/muster", has_volume=True)
OWN = f"/home/team/muster/runs/{RUN_ID}/snapshots"
GONE = f"/scratch/muster/runs/{RUN_ID}/snapshots"


def job(*claims, home=None):
    """Return what was asked of the cluster."""
    keys = {"image": "x", "claims": "\n".join(claims)} | ({"home": home} if home else {})
    chunks = (NodeChunk(num_nodes=2),)
    return JobRequest(name="run", chunks=chunks, head=(), log_path="", own_keys=tuple(keys.items()))


VOLUME = job("team:/home/team", home="/home/team/muster")


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


@pytest.mark.parametrize("keys", [job(), job("data:/data:ro")])
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
        find_earlier_run(run_dir, order_of(), job())
    assert (caught.value.where, caught.value.what[-1]) == (GONE, "9")


@pytest.mark.parametrize(
    ("folder", "step"),
    [("s3://bucket/mine", 60), ("/data/mine", 60), ("/data", 60), (GONE, None), (None, None)],
)
def test_what_pods_have_not_taken_along_begins_as_its_command_would(run_dir, folder, step):
    if folder is not None:
        leave(run_dir, folder, step)
    assert find_earlier_run(run_dir, order_of(), job("x:/data")) is None


@pytest.mark.parametrize(("order", "is_seen"), [(ON_VOLUME, True), (order_of(), False)])
def test_the_end_of_a_run_names_the_command_that_goes_on_where_that_finds_something(
    run_dir, order, is_seen
):
    folder = order.run_dir.snapshots
    atomic.write_json(os.path.join(run_dir.path, "pods", "order.json"), codec.to_plain(order))
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
