"""FSDP2 and HSDP: saved by 4 ranks, loaded by 2, 3 and 4; what they need of the folder."""

import json
import shutil

import pytest

from launching import HERE, global_losses, muster

SCRIPT = HERE / "sharded_script.py"
NUM_STEPS, BATCH = 15, 12  # 3 epochs of 60 samples
STOP = 7
SHARDED = ["--sharded"]
REPLICATED = ["--sharded", "--replicas", 2]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the losses of a DDP run without an interruption."""
    out = tmp_path_factory.mktemp("ddp")
    muster(out / "home", 2, SCRIPT, out)
    found = global_losses(out, BATCH)
    assert sorted(found) == list(range(1, NUM_STEPS + 1))
    assert found[NUM_STEPS] < found[1] / 2
    return found


def stop_four_ranks(tmp_path_factory, options):
    """Return the folder of 4 ranks that stopped in mid-epoch, after a save."""
    out = tmp_path_factory.mktemp("stopped")
    muster(out / "home", 4, SCRIPT, out, *options, "--stop-after", STOP)
    return out


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    return stop_four_ranks(tmp_path_factory, SHARDED)


@pytest.fixture(scope="module")
def hsdp(tmp_path_factory):
    return stop_four_ranks(tmp_path_factory, REPLICATED)


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.lab)])
def test_evaluations_change_neither_what_is_saved_nor_what_is_resumed(
    tmp_path, num_workers, undisturbed
):
    options = [*SHARDED, "--evaluate", "--memory", 2]
    muster(tmp_path / "home", num_workers, SCRIPT, tmp_path, *options, "--stop-after", STOP)
    muster(tmp_path / "home", num_workers, SCRIPT, tmp_path, *options)
    assert global_losses(tmp_path, BATCH) == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_up_to_the_stop_four_ranks_train_what_ddp_trains(request, kind, undisturbed):
    want = {step: undisturbed[step] for step in range(1, STOP + 1)}
    assert global_losses(request.getfixturevalue(kind), BATCH) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_each_box_is_written_once(request, kind):
    stopped = request.getfixturevalue(kind)
    raw = (stopped / "snapshots" / f"step-{STOP:09d}" / "manifest.json").read_bytes()
    manifest = json.loads(raw.split(b"\n", 1)[1])
    assert manifest["kind"] == "sharded"
    assert manifest["world_size"] == 4
    weights = manifest["tensors"]["model.blocks.0.weight"][2]
    rows = sorted((offsets[0], sizes[0]) for offsets, sizes, _, _ in weights)
    assert rows[0][0] == 0
    assert [a[0] + a[1] for a in rows] == [*[b[0] for b in rows[1:]], 10]


@pytest.mark.parametrize(
    ("kind", "world_size", "options"),
    [
        ("fsdp", 2, SHARDED),
        ("fsdp", 3, SHARDED),
        ("fsdp", 4, SHARDED),
        ("hsdp", 3, SHARDED),
        ("hsdp", 2, REPLICATED),
        ("hsdp", 4, REPLICATED),
    ],
)
def test_any_number_of_ranks_goes_on_as_without_an_interruption(
    request, tmp_path, undisturbed, kind, world_size, options
):
    stopped = request.getfixturevalue(kind)
    shutil.copytree(stopped / "snapshots", tmp_path / "snapshots")
    ended = muster(tmp_path / "home", world_size, SCRIPT, tmp_path, *options)
    assert f"resuming after step {STOP}" in ended.stderr
    want = {step: undisturbed[step] for step in range(STOP + 1, NUM_STEPS + 1)}
    assert global_losses(tmp_path, BATCH) == pytest.approx(want, rel=1e-5)


def test_a_sharded_snapshot_does_not_load_into_a_whole_model(tmp_path, fsdp):
    shutil.copytree(fsdp / "snapshots", tmp_path / "snapshots")
    ended = muster(tmp_path / "home", 1, SCRIPT, tmp_path, check=False)
    assert ended.returncode
    assert f"the snapshot of step {STOP} is sharded, the model is whole" in ended.stderr
    assert global_losses(tmp_path, BATCH) == {}


def test_a_damaged_sharded_snapshot_costs_only_the_steps_since_the_last_good_one(
    tmp_path, fsdp, undisturbed
):
    shutil.copytree(fsdp / "snapshots", tmp_path / "snapshots")
    harmed = tmp_path / "snapshots" / f"step-{STOP:09d}" / "data-00001.bin"
    raw = bytearray(harmed.read_bytes())
    raw[5] ^= 1
    harmed.write_bytes(raw)
    ended = muster(tmp_path / "home", 2, SCRIPT, tmp_path, *SHARDED)
    assert f"snapshot step-{STOP:09d} is damaged" in ended.stderr
    assert f"{harmed}" in ended.stderr
    want = {step: undisturbed[step] for step in range(STOP, NUM_STEPS + 1)}
    assert global_losses(tmp_path, BATCH) == pytest.approx(want, rel=1e-5)


def test_a_sharded_model_without_a_shared_folder_is_refused_before_step_0(tmp_path):
    ended = muster(
        tmp_path / "home", 1, SCRIPT, tmp_path, *SHARDED, "--apart", nodes=2, check=False
    )
    assert ended.returncode
    assert "the nodes don't share the folder of the snapshots, and the model is sharded" in (
        ended.stderr
    )
    assert "choose a folder on a shared file system" in ended.stderr
    assert not list(tmp_path.glob("losses-*"))
    assert not list(tmp_path.glob("snapshots-*/step-*"))


def test_without_a_shared_folder_the_copy_of_the_other_node_is_enough(tmp_path, undisturbed):
    line = [SCRIPT, tmp_path, "--apart"]
    ended = muster(tmp_path / "home", 1, *line, "--stop-after", STOP, nodes=2)
    assert "each keeps a complete copy of every snapshot" in ended.stderr
    for node in range(2):
        assert (tmp_path / f"snapshots-{node}" / f"step-{STOP:09d}").is_dir()
    shutil.rmtree(tmp_path / "snapshots-0")  # that of rank 0
    ended = muster(tmp_path / "home", 1, *line, nodes=2)
    assert f"resuming after step {STOP}" in ended.stderr
    assert global_losses(tmp_path, BATCH) == pytest.approx(undisturbed, rel=1e-5)
    for node in range(2):
        assert (tmp_path / f"snapshots-{node}" / f"step-{NUM_STEPS:09d}").is_dir()
