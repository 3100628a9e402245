"""Scripts of other frameworks run under muster as they are, and lose nothing to a killed worker."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kill_once import CHECKPOINT_EVERY

torch = pytest.importorskip("torch", reason="the extra `frameworks` is not installed: no torch")

HERE = Path(__file__).parent
# Four restarts, because Gloo's threads sometimes abort a rank that has finished, while its interpreter
# ends (pytorch/pytorch#179291); the next life finds the last checkpoint and only saves the weights.
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--max-restarts", "4"]
MUSTER = ["torchmuster", "run", "--nodes", "2", "--nproc-per-node", "2"]
TIMEOUT_S = 80.0

pytestmark = pytest.mark.frameworks


@pytest.fixture(params=["lightning", "accelerate", "transformers"])
def framework(request):
    # Not importorskip: importing Lightning and Transformers here would cost six seconds.
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"the extra `frameworks` is not installed: no {request.param}")
    return request.param


@pytest.fixture
def torchrun_weights(framework, tmp_path):
    return weights_of_run(TORCHRUN, framework, tmp_path / "torchrun")


def test_a_killed_worker_changes_nothing_in_the_weights_that_torchrun_gives(
    framework, torchrun_weights, tmp_path
):
    marker = tmp_path / "killed"

    weights = weights_of_run(
        MUSTER,
        framework,
        tmp_path / "muster",
        KILL_ONCE=str(marker),
        MUSTER_HOME=str(tmp_path / "muster_home"),
    )

    assert marker.exists(), "rank 3 was never killed"
    first_step = int(marker.read_text().split()[0])
    assert first_step == CHECKPOINT_EVERY, "the run did not go on from its checkpoint"
    # Not bitwise: DDP rebuilds its buckets after a process's first backward, so a restarted rank
    # sums its first gradients in another order (torch, reducer.cpp, `Reducer::rebuild_buckets`).
    torch.testing.assert_close(weights, torchrun_weights, rtol=1e-5, atol=1e-6)


def weights_of_run(launcher, framework, out_dir, **variables):
    """Run the framework's script to its end and return the weights that it saved."""
    out_dir.mkdir()
    environment = os.environ | {
        "HF_HOME": str(out_dir / "huggingface"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else torchrun's restart can't succeed with Gloo
        **variables,
    }
    command = [sys.executable, "-m", *launcher, HERE / f"{framework}_fit.py", out_dir]
    run = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout
    return torch.load(out_dir / "final.pt")
