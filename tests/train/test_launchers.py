"""The same program under muster, torchrun, srun's and mpiexec's variables: the same weights."""

import sys
from pathlib import Path

import pytest

from kit.command import muster_env
from kit.ports import reserve_port
from launching import EXACT, muster, run, run_each, weights

QUICK = ["--epochs", 1, "--samples", 40]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    out = tmp_path_factory.mktemp("muster")
    muster(out / "home", 2, EXACT, out, *QUICK)
    return weights(out)


def test_torchrun_gives_the_same_weights(tmp_path, reference):
    torchrun = Path(sys.executable).with_name("torchrun")
    line = [torchrun, "--standalone", "--nproc-per-node", 2, EXACT, tmp_path, *QUICK]
    run(line, muster_env(tmp_path / "home"))
    assert weights(tmp_path) == weights(tmp_path, 1) == reference


def test_srun_with_one_task_a_worker_gives_the_same_weights(tmp_path, reference):
    def task(rank):
        return muster_env(
            tmp_path / "home",
            SLURM_JOB_ID="4711",
            SLURM_STEP_ID="0",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NODEID="0",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_NUM_NODES="1",
            SLURM_STEP_TASKS_PER_NODE="2",
            SLURM_STEP_NODELIST="n1",
            MASTER_PORT=str(port),
        )

    port = reserve_port()
    run_each([task(rank) for rank in range(2)], EXACT, tmp_path, *QUICK)
    assert weights(tmp_path) == reference


def test_mpiexec_under_pbs_gives_the_same_weights(tmp_path, reference):
    node_file = tmp_path / "nodes"
    node_file.write_text("n1\nn1\n")

    def rank_of(rank):
        return muster_env(
            tmp_path / "home",
            PBS_JOBID="9.ctl",
            PBS_NODEFILE=str(node_file),
            PMI_RANK=str(rank),
            PMI_SIZE="2",
            PMI_LOCAL_RANK=str(rank),
            PMI_LOCAL_SIZE="2",
            MASTER_PORT=str(port),
        )

    port = reserve_port()
    run_each([rank_of(rank) for rank in range(2)], EXACT, tmp_path, *QUICK)
    assert weights(tmp_path) == reference


def test_no_launcher_is_a_world_of_one(tmp_path):
    run([sys.executable, EXACT, tmp_path, *QUICK], muster_env(tmp_path / "home"))
    one = weights(tmp_path)
    other = tmp_path / "muster"
    other.mkdir()
    muster(tmp_path / "home", 1, EXACT, other, *QUICK)
    assert weights(other) == one


@pytest.mark.parametrize("run_id", ["", "job-7"])
def test_who_waits_for_ranks_that_nobody_has_started_says_so(tmp_path, run_id):
    port, script = reserve_port(), tmp_path / "joins.py"
    script.write_text(
        "import torchmuster.train as tm\n"
        "from torchmuster.train import group\n"
        "group._WAIT_IS_SAID_S = 0.1\n"
        "tm.init(timeout_s=2)\n"
    )
    left = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    environment = muster_env(tmp_path / "home", TORCHELASTIC_RUN_ID=run_id, **left)

    ended = run([sys.executable, script], environment, check=False)

    assert ended.returncode == 1
    assert f"muster: rank 0 of 2 waits for the others at localhost:{port}" in ended.stderr
    assert ("unset RANK WORLD_SIZE" in ended.stderr) is (not run_id)
