"""Worlds of 4, 3, 7, 1 and 8 in turn, changed in mid-epoch, train what one process trains."""

import json

import pytest
import torch

from launching import EXACT, losses, muster

# A prime number of samples, a batch that divides nothing, no dropout; float64.
SHAPE = ["--samples", 101, "--batch", 11, "--dropout", 0, "--double", "--every", 3]
NUM_STEPS = 30


def global_losses(out, num_ranks):
    """Return the mean over the global batch at each step that was recorded."""
    total, count = {}, {}
    for rank in range(num_ranks):
        if not (out / f"losses-{rank}.txt").exists():
            continue
        for step, (num, loss) in losses(out, rank).items():
            if num:
                total[step] = total.get(step, 0.0) + num * loss
                count[step] = count.get(step, 0) + num
    return {step: total[step] / count[step] for step in total}


@pytest.mark.slow
def test_no_sample_is_lost_or_seen_twice_and_losses_are_those_of_one_process(tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    muster(tmp_path / "home", 1, EXACT, alone, *SHAPE)
    want = global_losses(alone, 1)
    assert len(want) == NUM_STEPS
    got = {}
    folder = tmp_path / "changing"
    folder.mkdir()
    for world_size, workers, stop in ((4, 0, 4), (3, 2, 9), (7, 0, 15), (1, 4, 22), (8, 0, -1)):
        for old in folder.glob("losses-*"):
            old.unlink()
        line = [EXACT, folder, *SHAPE, "--workers", workers, "--stop-after", stop]
        muster(tmp_path / "home", world_size, *line)
        got |= global_losses(folder, world_size)
    assert got == pytest.approx(want, rel=1e-6)
    one, many = (torch.load(out / "weights.pt") for out in (alone, folder))
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert [epoch["ledger"] for epoch in epochs(folder, tmp_path / "home")] == [
        {"samples": 101, "lost": 0, "twice": 0, "whole": True}
    ] * 3


def epochs(folder, home):
    """Return the epochs that all runs with this folder have recorded."""
    lines = []
    for record in sorted(home.glob("runs/*/training.jsonl")):
        lines += [json.loads(line) for line in record.read_text().splitlines()]
    ended = [line for line in lines if line["event"] == "epoch"]
    return ended[3:]  # the first three are those of the process alone
