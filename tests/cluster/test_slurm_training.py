"""Training on a real Slurm without `muster run`: bare `srun`, and `srun muster torchrun`."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
pytestmark = pytest.mark.netns

TOY = Path(__file__).parents[2] / "examples" / "toy_regression" / "train.py"
WEIGHTS, LIMIT_S = 9, 150.0
# The job script of the documentation that people copy, with `muster` before torchrun and blanks
# before its backslashes.
TORCHRUN = """
RDV_ADDR=$(hostname)
WORLD_SIZE=$SLURM_JOB_NUM_NODES
srun --ntasks-per-node=1 muster torchrun \\
  --nproc-per-node 2 \\
  --nnodes $WORLD_SIZE \\
  --rdzv-id $SLURM_JOB_ID \\
  --rdzv-backend c10d \\
  --rdzv-endpoint $RDV_ADDR:29500 \\
  {script} --epochs 2
"""
# The other one of the same documentation: one task for each GPU, a port from the job's number.
BARE = """
set -e
export MASTER_PORT=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun python {script} --epochs 2 --snapshots bare
"""


@pytest.fixture(scope="module")
def expected(slurm_lab):
    """Return the weights that one process learns."""
    words = [sys.executable, TOY, "--epochs", 2, "--snapshots", "alone"]
    said = slurm_lab.run(words, limit_s=LIMIT_S)
    found = weights(said.stdout)
    assert len(found) == WEIGHTS, said.stderr
    return found


def test_bare_srun_with_one_task_a_worker_trains(slurm_lab, expected):
    words = ["srun", "-N2", "--ntasks-per-node=2", sys.executable, TOY, "--epochs", 2]
    said = slurm_lab.run([*words, "--snapshots", "interactive"], limit_s=LIMIT_S)
    assert weights(said.stdout) == expected, said.stdout + said.stderr


@pytest.mark.lab
def test_a_job_script_that_names_the_head_and_a_port_trains(slurm_lab, expected):
    job = slurm_lab.submit(BARE.format(script=TOY), "--nodes=2", "--ntasks-per-node=2")
    slurm_lab.wait_for_job(job, "COMPLETED", "FAILED", limit_s=LIMIT_S)
    assert weights(slurm_lab.output_of(job)) == expected, slurm_lab.output_of(job)


def test_srun_muster_torchrun_in_a_job_script_trains(slurm_lab, expected):
    job = slurm_lab.submit(TORCHRUN.format(script=TOY), "--nodes=2", "--ntasks=2")
    slurm_lab.wait_for_job(job, "COMPLETED", "FAILED", limit_s=LIMIT_S)
    assert weights(slurm_lab.output_of(job)) == expected, slurm_lab.output_of(job)


def weights(text):
    """Return the lines that give the weights: equal to nine digits or a test fails."""
    lines = [line.partition("weight ") for line in text.splitlines()]
    return [values for _, found, values in lines if found]
