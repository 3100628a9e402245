"""examples/cifar10_resnet18: staging, exact counts, a lost worker, archives that are refused."""

import importlib.util
import io
import os
import pickle
import re
import signal
from pathlib import Path

import example_runs
import numpy as np
import pytest
import torch
from archives import pickle_batch, pickle_call, write_archive

FOLDER = example_runs.EXAMPLES / "cifar10_resnet18"
TRAIN = FOLDER / "train.py"
SMALL = ["--width", "4", "--batch-size", "15", "--loader-workers", "0"]
NUM_TRAIN, NUM_VALID, NUM_TEST, STEPS_PER_EPOCH = 180, 20, 40, 12  # of 6 batches with 40 images


def load(name):
    """Return a module of the example, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"cifar10_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


data = load("data")


@pytest.fixture
def archive(tmp_path):
    return write_archive(tmp_path / "cifar-10-python.tar.gz", images_per_batch=40)


def test_a_killed_worker_costs_no_sample_and_nothing_is_staged_again(tmp_path, archive):
    epochs = 5
    script = [TRAIN, "--archive", archive, "--epochs", epochs, "--save-every", 2, *SMALL]
    run_dir = tmp_path / "home" / "runs" / "the-run"
    record = run_dir / "training.jsonl"
    with example_runs.started(
        example_runs.muster(2, *script, nodes=2), example_runs.environment(tmp_path)
    ) as process:
        example_runs.wait_until_saved(process, record, STEPS_PER_EPOCH + 4)
        os.kill(example_runs.a_worker_of(run_dir, "n2"), signal.SIGKILL)
        code = process.wait(timeout=90)
    output = (tmp_path / "out").read_text()
    assert code == 0, output
    assert "SIGKILL" in output

    first, second = (event["step"] for event in example_runs.events(record, "resumed"))
    assert first == 0
    assert STEPS_PER_EPOCH + 2 <= second < epochs * STEPS_PER_EPOCH
    exact = {"samples": NUM_TRAIN, "lost": 0, "twice": 0, "whole": True}
    ledgers = {event["epoch"]: event["ledger"] for event in example_runs.events(record, "epoch")}
    assert ledgers == dict.fromkeys(range(epochs), exact)
    assert example_runs.events(record, "finished")[0]["step"] == epochs * STEPS_PER_EPOCH
    assert output.count(f"valid_count {NUM_VALID}") >= epochs
    assert f"test_count {NUM_TEST}.0000" in output

    logs = run_dir / "logs" / "main" / "train"
    staged = [re.findall(r"unpacks .* into (\S+)", read_all(logs / f"attempt-{k}")) for k in (0, 1)]
    assert sorted(Path(path).name for path in staged[0]) == ["node-0", "node-1"]
    assert staged[1] == []


def read_all(folder):
    """Return the logs of all ranks of an attempt."""
    return "".join(path.read_text() for path in sorted(folder.glob("rank-*.log")))


def test_one_process_without_a_launcher_trains_too(tmp_path, archive):
    script = [TRAIN, "--archive", archive, "--epochs", 1, "--snapshots", tmp_path / "s", *SMALL]
    assert f"test_count {NUM_TEST}.0000" in example_runs.output_of(
        example_runs.bare(*script), example_runs.environment(tmp_path)
    )


def test_a_hostile_batch_ends_the_run_and_its_code_does_not_run(tmp_path):
    trap = tmp_path / "trap"
    hostile = {"data_batch_3": pickle_call("os", "mkdir", str(trap))}
    archive = write_archive(tmp_path / "bad.tar.gz", images_per_batch=2, batches=hostile)
    with pytest.raises(pickle.UnpicklingError, match=r"`os\.mkdir` has no place in a batch"):
        data.unpack(archive, tmp_path)
    assert not trap.exists()
    assert not list(tmp_path.glob("*.npy"))
    pickle.loads(hostile["data_batch_3"])  # an ordinary reader does run it
    assert trap.exists()


@pytest.mark.parametrize(
    "name",
    [
        ("builtins", "eval"),
        ("posix", "system"),
        ("_codecs", "encode"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "fromfile"),
        ("numpy", "ndarray.tofile"),
        ("torch", "load"),
    ],
)
def test_only_the_names_of_the_published_batches_are_known(name):
    with pytest.raises(pickle.UnpicklingError, match="has no place"):
        data.read_batch(io.BytesIO(pickle_call(*name, "x")))


def test_images_and_labels_come_back_as_they_were_written(tmp_path, archive):
    images = np.random.default_rng(3).integers(0, 256, (300, 3072)).astype(np.uint8)
    labels = [index % 10 for index in range(300)]
    read_images, read_labels = data.read_batch(io.BytesIO(pickle_batch(images, labels)))
    assert (read_images.reshape(300, 3072) == images).all()
    assert read_labels.tolist() == labels
    data.unpack(archive, tmp_path)
    assert len(data.Images(tmp_path, "train")) == NUM_TRAIN + NUM_VALID
    assert len(data.Images(tmp_path, "test")) == NUM_TEST


def test_a_batch_is_refused_when_its_labels_do_not_match_its_images():
    images = np.zeros((300, 3072), dtype=np.uint8)
    with pytest.raises(ValueError, match="3 labels"):
        data.read_batch(io.BytesIO(pickle_batch(images, [1, 2, 3])))


def test_an_augmented_image_is_a_part_of_the_padded_one_perhaps_mirrored():
    image = torch.arange(3 * 32 * 32).view(3, 32, 32) + 1
    padded = torch.nn.functional.pad(image, [4] * 4)
    wanted = padded.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).reshape(81, 3, 32, 32)
    torch.manual_seed(0)
    found = set()
    for _ in range(2000):
        one = data.crop_and_flip(image)
        for mirrored, parts in ((False, wanted), (True, wanted.flip(3))):
            found |= {
                (mirrored, at)
                for at in (parts == one).all(3).all(2).all(1).nonzero()[:, 0].tolist()
            }
    assert len(found) == 2 * 81


def test_training_and_validation_share_no_image():
    train, valid = data.split(50_000)
    assert len(valid) == 5_000
    assert sorted(train + valid) == list(range(50_000))


def test_the_model_is_resnet_18_for_small_images():
    model = load("model").ResNet18()
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
