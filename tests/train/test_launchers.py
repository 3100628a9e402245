"""The same program under muster, torchrun, srun's and mpiexec's variables: the same weights. And compiled: the same losses."""

import shutil
import sys
from pathlib import Path

import pytest

from kit.command import muster_env
from kit.ports import reserve_port
from launching import EXACT, HERE, made, muster, run, run_each, weights

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


def of_slurm(rank, folder):
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "n1",
    }


def of_pbs(rank, folder):
    (folder / "nodes").write_text("n1\nn1\n")
    return {
        "PBS_JOBID": "9.ctl",
        "PBS_NODEFILE": str(folder / "nodes"),
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
        "PMI_LOCAL_RANK": str(rank),
        "PMI_LOCAL_SIZE": "2",
    }


@pytest.mark.parametrize(
    "task", [of_slurm, of_pbs], ids=["srun with one task a worker", "mpiexec under pbs"]
)
def test_the_variables_of_a_launcher_give_the_same_weights(tmp_path, reference, task):
    home, port = tmp_path / "home", str(reserve_port())
    tasks = [muster_env(home, MASTER_PORT=port, **task(rank, tmp_path)) for rank in range(2)]
    run_each(tasks, EXACT, tmp_path, *QUICK)
    assert weights(tmp_path) == reference


def test_no_launcher_is_a_world_of_one(tmp_path):
    run([sys.executable, EXACT, tmp_path, *QUICK], muster_env(tmp_path / "home"))
    (other,) = made(tmp_path / "muster")
    muster(tmp_path / "home", 1, EXACT, other, *QUICK)
    assert weights(other) == weights(tmp_path)


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


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_a_compiled_model_trains_as_a_plain_one_and_keeps_its_names(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    said = {}
    for kind in ("plain", "compiled"):
        ended = muster(tmp_path / kind, 2, HERE / "compile_script.py", kind)
        (said[kind],) = [line for line in ended.stdout.splitlines() if line.startswith("losses")]
    assert said["compiled"] == said["plain"]
    assert "'0.bias', '0.weight', '2.bias', '2.weight'" in said["plain"]
