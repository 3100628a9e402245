"""kill -9 at random steps: losses and weights are, bit for bit, those of a run nobody disturbed.

And worlds of 4, 3, 7, 1 and 8 in turn, changed in mid-epoch, train what one process trains.
"""

import os
import random

import pytest

from launching import EXACT, events_in, global_losses, losses, made, muster, same_weights, weights

# `make chaos` runs 100 seeds; `make test-all` as many as fit into half a minute.
SEEDS = range(int(os.environ.get("MUSTER_TRAIN_SEEDS", "2")))
NUM_STEPS = 24  # 3 epochs of 101 samples, 13 a step
_undisturbed = {}


@pytest.fixture
def undisturbed(tmp_path_factory):
    """Return the folder of a run without a kill, made once for each world size."""

    def get(world_size, workers):
        key = (world_size, workers)
        if key not in _undisturbed:
            out = tmp_path_factory.mktemp(f"undisturbed-{world_size}-{workers}")
            muster(out / "home", world_size, EXACT, out, "--workers", workers)
            assert len(losses(out)) == NUM_STEPS
            _undisturbed[key] = out
        return _undisturbed[key]

    return get


@pytest.mark.parametrize("seed", SEEDS)
def test_kills_at_random_steps_leave_no_trace_in_losses_and_weights(seed, tmp_path, undisturbed):
    draw = random.Random(seed)
    world_size, workers = (2, 3, 4)[seed % 3], seed % 2
    num_kills = draw.randint(1, 3)
    steps = sorted(draw.sample(range(1, NUM_STEPS), num_kills))
    kills = [f"{draw.randrange(world_size)}:{step}" for step in steps]
    script = [EXACT, tmp_path, "--workers", workers, "--every", draw.randint(1, 7)]
    script += ["--kill", *kills]
    ended = muster(tmp_path / "home", world_size, *script, restarts=num_kills)
    assert ended.stderr.count("SIGKILL in rank") == num_kills, ended.stderr
    quiet = undisturbed(world_size, workers)
    for rank in range(world_size):
        assert losses(tmp_path, rank) == losses(quiet, rank)
        assert weights(tmp_path, rank) == weights(quiet, rank)


def test_without_a_settled_layout_four_ranks_do_differ_after_a_restart(tmp_path):
    """What `settle` is for: were this to pass without it, the throw-away backward could go."""
    quiet, killed = made(tmp_path / "quiet", tmp_path / "killed")
    for out, more in ((quiet, ()), (killed, ("--kill", "1:10"))):
        line = [EXACT, out, "--unsettled", *more]
        muster(tmp_path / "home", 4, *line, restarts=1)
    assert weights(quiet) != weights(killed)


# A prime number of samples, a batch that divides nothing, no dropout; float64.
SHAPE = ["--samples", 101, "--batch", 11, "--dropout", 0, "--double", "--every", 3]


@pytest.mark.slow
def test_no_sample_is_lost_or_seen_twice_and_losses_are_those_of_one_process(tmp_path):
    alone, folder = made(tmp_path / "alone", tmp_path / "changing")
    muster(tmp_path / "home", 1, EXACT, alone, *SHAPE)
    want = global_losses(alone)
    assert len(want) == 30
    got = {}
    for world_size, workers, stop in ((4, 0, 4), (3, 2, 9), (7, 0, 15), (1, 4, 22), (8, 0, -1)):
        for old in folder.glob("losses-*"):
            old.unlink()
        line = [EXACT, folder, *SHAPE, "--workers", workers, "--stop-after", stop]
        muster(tmp_path / "changed", world_size, *line)
        got |= global_losses(folder)
    assert got == pytest.approx(want, rel=1e-6)
    same_weights(alone, folder)
    records = sorted(tmp_path.glob("changed/runs/*/training.jsonl"))
    assert [epoch["ledger"] for record in records for epoch in events_in(record, "epoch")] == [
        {"samples": 101, "lost": 0, "twice": 0, "whole": True}
    ] * 3
