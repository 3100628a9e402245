"""`muster restart`: a run that was stopped goes on from its snapshots, as a new run."""

import re

import pytest

from kit.command import muster_env, run_muster
from launching import EXACT, HERE, events_in

SCRIPT = HERE / "slow_script.py"


def records(home):
    """Return the training events of every run, in the order of their start."""
    paths = sorted(home.glob("runs/*/training.jsonl"), key=lambda p: p.stat().st_ctime)
    return [events_in(path) for path in paths]


def command(home, *words, **variables):
    return run_muster(*words, env=muster_env(home, **variables), limit_s=150)


def test_a_time_limit_ends_the_run_with_75_and_a_restart_goes_on_and_finishes(tmp_path):
    """Another attempt would have to stop at once, so none is made."""
    home = tmp_path / "home"
    line = ["run", "--nproc-per-node", "2", SCRIPT, "0.1"]
    stopped = command(home, *line, SLOW_LIMIT_S="5")
    assert stopped.returncode == 75, stopped.stderr
    assert "attempt 1" not in stopped.stderr
    (run_id,) = re.findall(r"^hint: muster restart (\S+)$", stopped.stderr, re.MULTILINE)
    step = int(re.search(r"stopped after step (\d+) ", stopped.stderr)[1])
    assert step < 60

    again = command(home, "restart", run_id)

    assert again.returncode == 0, again.stderr
    first, second = records(home)
    begun = [next(e for e in record if e["event"] == "resumed") for record in (first, second)]
    assert [event["step"] for event in begun] == [0, step]
    (epoch,) = [event for event in second if event["event"] == "epoch"]
    assert epoch["ledger"] == {"samples": 120, "lost": 0, "twice": 0, "whole": True}


def test_a_run_that_does_not_exist_is_refused(tmp_path):
    refused = command(tmp_path / "home", "restart", "nosuch")
    assert refused.returncode == 4
    assert "there is no run `nosuch`" in refused.stderr


def test_when_no_snapshot_is_good_the_run_ends_at_once_and_only_the_user_begins_anew(tmp_path):
    snapshots = tmp_path / "out" / "snapshots"
    names = ["step-000000004", "step-000000008"]
    for name in names:
        (snapshots / name).mkdir(parents=True)
        (snapshots / name / "manifest.json").write_bytes(b"x")

    failed = command(tmp_path / "home", "run", "--nproc-per-node", "2", EXACT, snapshots.parent)

    assert failed.returncode == 1
    assert "there is no good snapshot to resume from" in failed.stderr
    assert "none, because another attempt would end in the same way" in failed.stderr
    assert f"`mv {snapshots} {snapshots}-damaged`, then start the run again" in failed.stderr
    assert "nothing was saved" not in failed.stderr
    assert "muster restart" not in failed.stderr, "it would end in the same way"
    assert sorted(path.name for path in snapshots.glob("*step-*")) == names


VANISHING = """
import os, shutil, sys
import torch
import torchmuster.train as tm

folder, how = sys.argv[1:]
model = tm.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = tm.loader(torch.utils.data.TensorDataset(torch.ones(64, 1)), global_batch_size=4)
run = tm.resume(model=model, optimizer=optimizer, data=data, folder=folder, every_steps=4, asynchronous=False)
for epoch in run.epochs(2):
    for (x,) in data:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        if run.steps_done == 10:
            shutil.rmtree(folder)
            if how == "then-fails":
                os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["then-saves", "then-fails"])
def test_a_snapshot_folder_that_vanishes_ends_the_run_and_is_not_made_anew(tmp_path, how):
    script, folder = tmp_path / "train.py", tmp_path / "saved"
    script.write_text(VANISHING)

    failed = command(tmp_path / "home", "run", "--nproc-per-node", "1", script, folder, how)

    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.count("beginning at step 0") == 1
    assert "has vanished" in failed.stderr
    assert "another attempt would end in the same way" in failed.stderr
    assert not list(folder.glob("step-*"))


@pytest.mark.short
def test_a_restart_without_the_snapshots_that_were_saved_is_refused(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "saved"
    script.write_text(VANISHING)
    command(tmp_path / "home", "run", "--nproc-per-node", "1", script, folder, "then-fails")
    refused = command(tmp_path / "home", "restart", "last")
    assert refused.returncode == 2
    assert "are gone: the last was of step 8" in refused.stderr
