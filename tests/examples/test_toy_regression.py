"""examples/toy_regression: one script for one device, several, and many nodes."""

import re
import subprocess

import pytest
from example_runs import EXAMPLES, bare, environment, muster, output_of

from kit.ports import reserve_port

TRAIN = EXAMPLES / "toy_regression" / "train.py"


def weights_in(output):
    """Return the pairs of true and learned weights that the script prints."""
    pairs = re.findall(r"true (\S+)  learned (\S+)", output)
    assert len(pairs) == 9, output
    return [(float(true), float(learned)) for true, learned in pairs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the weights that one process without a launcher learns."""
    folder = tmp_path_factory.mktemp("alone")
    return weights_in(output_of(bare(TRAIN, "--snapshots", folder), environment(folder)))


def test_the_true_weights_are_learned(alone):
    for true, learned in alone:
        assert learned == pytest.approx(true, abs=0.02)


@pytest.mark.parametrize(("nodes", "workers"), [(1, 2), (1, 3), (2, 1)])
def test_any_number_of_workers_learns_the_same_weights(alone, tmp_path, nodes, workers):
    line = muster(workers, TRAIN, nodes=nodes)
    for one, other in zip(alone, weights_in(output_of(line, environment(tmp_path))), strict=True):
        assert one == pytest.approx(other, abs=1e-6)


SRUN = {
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
MPIEXEC = {"PMI_RANK": "{rank}", "PMI_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("variables", [SRUN, MPIEXEC], ids=["srun", "mpiexec"])
def test_one_task_a_worker_needs_no_launcher_of_pytorchs(alone, tmp_path, variables):
    port = str(reserve_port())
    tasks = []
    for rank in range(2):
        own = {name: value.format(rank=rank) for name, value in variables.items()}
        env = environment(tmp_path, MASTER_PORT=port, **own)
        line = bare(TRAIN, "--snapshots", tmp_path / "snapshots")
        tasks.append(subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [task.communicate(timeout=180)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0]
    for one, other in zip(alone, weights_in(outputs[0]), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert outputs[1] == ""
