"""A world of one in the test's own process."""

import signal

import pytest
import torch

import torchmuster.train as tm

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_PROCID")


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Return a world of one whose default folder is the test's own; left at its end."""
    for name in (*_LAUNCHER, "TORCHMUSTER_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)}
    made = tm.init(seed=0)
    yield made
    made.close()
    torch.set_num_threads(before)
    assert {s: signal.getsignal(s) for s in handlers} == handlers
