"""Saves beside the loop, as the script sees them: failures come to light, busy means what it says."""

import errno
import gc
import os
import re
import signal
import threading

import pytest
import torch
from torch import nn

from kit.training import view_training
from launching import events_in
from torchmuster.errors import UsageError
from torchmuster.train.preempt import STOP_SIGNALS
from torchmuster.train.snapshot import folder as fileops
from torchmuster.train.snapshot.state import SnapshotError
from torchmuster.train.snapshot.writer import Saver

NUM_STEPS = 6


def train(world, folder, *, at_step=lambda step: None, **options):
    """Train six steps, saving after each; `at_step` is called in the loop's body."""
    model = world.wrap(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = torch.utils.data.TensorDataset(torch.ones(NUM_STEPS, 3), torch.zeros(NUM_STEPS, 1))
    data = world.loader(samples, global_batch_size=1)
    run = world.resume(
        model=model,
        optimizer=optimizer,
        data=data,
        folder=str(folder),
        every_steps=1,
        keep=100,
        **options,
    )
    for _ in run.epochs(1):
        for x, y in data:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            at_step(run.steps_done)


def saved_steps(folder):
    return sorted(int(p.name.removeprefix("step-")) for p in folder.glob("step-*"))


def before(monkeypatch, operation, steps, action):
    """Let an action come before an operation on the files of these steps' snapshots."""

    def hook(given, path):
        found = re.search(r"/\.step-(\d+)\.", path)
        if given == operation and found and int(found[1]) in steps:
            action()

    monkeypatch.setattr(fileops, "before", hook)


def fail_in(monkeypatch, *steps, after_s=0.0):
    """Let the disk be full for the snapshots of these steps, which shows after so long."""

    def fail():
        threading.Event().wait(after_s)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before(monkeypatch, "write", steps, fail)


def hold(monkeypatch, step, released, timeout_s):
    """Let the write of one step's snapshot last until an event, or so long."""
    before(monkeypatch, "fsync", [step], lambda: released.wait(timeout_s))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_failed_is_raised_in_the_loop(world, tmp_path, monkeypatch, asynchronous):
    fail_in(monkeypatch, 3)
    folder = tmp_path / "s"
    with pytest.raises(
        SnapshotError, match="the snapshot of step 3 could not be written"
    ) as caught:
        train(world, folder, asynchronous=asynchronous)
    assert "No space left on device" in caught.value.why
    assert "free some space" in caught.value.fix
    world.close()
    assert [step for step in saved_steps(folder) if step <= 3] == [0, 1, 2]


def test_a_last_save_that_failed_is_raised_too(world, tmp_path, monkeypatch):
    fail_in(monkeypatch, NUM_STEPS)
    with pytest.raises(SnapshotError, match="step 6 could not be written"):
        train(world, tmp_path / "s")


def end_of_save(_step):
    """Return when the save beside the loop has ended."""
    for saver in [one for one in gc.get_objects() if type(one) is Saver]:
        assert saver._idle.wait(30)


@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_with_warn_the_loop_trains_on_and_says_what_failed(
    world, tmp_path, monkeypatch, capsys, after_s
):
    """The failure is known before the next save is due, or comes while that one waits."""
    fail_in(monkeypatch, 3, after_s=after_s)
    at_step = (lambda _: None) if after_s else end_of_save
    train(world, tmp_path / "s", on_save_error="warn", at_step=at_step)
    world.close()
    assert saved_steps(tmp_path / "s") == [0, 1, 2, 4, 5, 6]
    said = capsys.readouterr().err
    assert said.count("the snapshot of step 3 could not be written") == 1
    assert "No space left on device" in said


def test_with_warn_a_disk_that_stays_full_costs_snapshots_and_not_the_training(
    world, tmp_path, monkeypatch, capsys
):
    fail_in(monkeypatch, *range(4, NUM_STEPS + 1))
    folder = tmp_path / "s"
    train(world, folder, on_save_error="warn")
    world.close()
    assert saved_steps(folder) == [0, 1, 2, 3]
    last = [line for line in capsys.readouterr().err.splitlines() if "could not be" in line][-1]
    assert "step 6" in last
    assert "No space left on device" in last
    assert "the last snapshot is of step 3" in last
    assert view_training(events_in(folder / "training.jsonl")).saved_step == 3


def test_with_warn_a_stop_that_could_not_save_says_what_is_left(
    world, tmp_path, monkeypatch, capsys
):
    fail_in(monkeypatch, *range(4, NUM_STEPS + 1))

    def stop(step):
        if step == 4:
            signal.raise_signal(signal.SIGTERM)

    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    with pytest.raises(SystemExit) as left:
        train(world, tmp_path / "s", on_save_error="warn", at_step=stop)
    assert left.value.code == 75
    world.close()
    for signum, handler in handlers.items():  # ignored to the end of the process, which is ours
        signal.signal(signum, handler)
    assert re.search(
        r"stopped after step \d \(SIGTERM on rank 0\); the last snapshot is of step 3, exit code 75",
        capsys.readouterr().err,
    )


def test_the_last_save_is_never_left_out_because_one_still_runs(world, tmp_path, monkeypatch):
    hold(monkeypatch, NUM_STEPS - 1, threading.Event(), 0.5)
    train(world, tmp_path / "s", when_busy="skip")
    assert saved_steps(tmp_path / "s")[-1] == NUM_STEPS


def test_skip_leaves_saves_out_while_one_still_runs(world, tmp_path, monkeypatch, capsys):
    released = threading.Event()
    hold(monkeypatch, 2, released, 60)

    def at_step(step):
        if step == 5:
            released.set()
        if step not in (3, 4):
            end_of_save(step)

    train(world, tmp_path / "s", when_busy="skip", at_step=at_step)
    world.close()
    assert saved_steps(tmp_path / "s") == [0, 1, 2, 5, 6]
    assert "step 3: a save is still running, this one is skipped" in capsys.readouterr().err


def test_wait_leaves_no_save_out(world, tmp_path, monkeypatch):
    hold(monkeypatch, 2, threading.Event(), 0.3)
    train(world, tmp_path / "s", when_busy="wait")
    world.close()
    assert saved_steps(tmp_path / "s") == [0, 1, 2, 3, 4, 5, 6]


def test_the_loop_does_not_wait_for_the_disk(world, tmp_path, monkeypatch):
    """The steps up to the next save are done while the write of the first is held."""
    released, seen = threading.Event(), []
    hold(monkeypatch, 0, released, 60)

    def at_step(step):
        seen.append((step, released.is_set()))
        if step == 1:
            released.set()

    train(world, tmp_path / "s", at_step=at_step)
    assert seen[0] == (1, False)


@pytest.mark.parametrize("options", [{"when_busy": "never"}, {"on_save_error": "ignore"}])
def test_other_words_than_those_are_refused(world, tmp_path, options):
    with pytest.raises(UsageError, match="when_busy"):
        train(world, tmp_path / "s", **options)
