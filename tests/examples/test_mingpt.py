"""examples/mingpt: it learns, and a kill leaves no trace in what it has learned."""

import re
import signal

import example_runs
import pytest

TRAIN = example_runs.EXAMPLES / "mingpt" / "train.py"
TINY = [
    "--layers",
    "1",
    "--heads",
    "2",
    "--width",
    "32",
    "--context",
    "32",
    "--lr",
    "1e-2",
    "--letters",
    "40",
]
TINY += ["--epochs", "7", "--text", str(example_runs.EXAMPLES.parent / "LICENSE")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return what a run prints that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    script = [TRAIN, *TINY, "--snapshots", folder / "snapshots"]
    return example_runs.output_of(example_runs.bare(*script), example_runs.environment(folder))


def losses_in(output):
    """Return the loss of the model and that of a blind guess."""
    return [float(x) for x in re.search(r"loss (\S+) a .* has (\S+)", output).groups()]


def test_the_model_learns_and_writes(undisturbed):
    loss, guess = losses_in(undisturbed)
    assert loss < guess - 1
    assert len(undisturbed.split("\n", 1)[1]) >= 40


def test_a_run_that_was_killed_goes_on_and_ends_as_if_nothing_had_happened(tmp_path, undisturbed):
    script = [TRAIN, *TINY, "--save-every", 3, "--snapshots", tmp_path / "snapshots"]
    line, env = example_runs.bare(*script), example_runs.environment(tmp_path)
    record = tmp_path / "snapshots" / "training.jsonl"
    with example_runs.started(line, env) as process:
        example_runs.wait_until_saved(process, record, 9)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not example_runs.events(record, "finished")
    assert example_runs.output_of(line, env) == undisturbed
    assert example_runs.events(record, "resumed")[-1]["step"] >= 6


def test_two_workers_that_accumulate_learn_as_well(tmp_path, undisturbed):
    script = [TRAIN, *TINY, "--accumulate", "2", "--dropout", "0"]
    loss, guess = losses_in(
        example_runs.output_of(example_runs.muster(2, *script), example_runs.environment(tmp_path))
    )
    assert loss < guess - 1
    assert loss == pytest.approx(losses_in(undisturbed)[0], abs=0.2)
