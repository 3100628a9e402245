"""Two published tutorials for Slurm, job file and script as printed, on the pretended cluster.

Changed: GPUs to CPUs, the data set to made-up data, the launcher's word to muster's.
"""

import shutil
import sys
from pathlib import Path

import pytest

from kit.command import ran
from kit.ports import reserve_port

MAIN = Path(__file__).with_name("tutorial_srun.py")
SRUN_JOB = r"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=00:15:00

set -e  # exit on error.
echo "Date:     $(date)"
echo "Hostname: $(hostname)"

# Stage dataset into $SLURM_TMPDIR (only on the first worker of each node)
srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 bash -c \
   'mkdir -p $SLURM_TMPDIR/data && ln -s /dev/null $SLURM_TMPDIR/data/archive'

# Get a unique port for this job based on the job ID
export MASTER_PORT=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Execute Python script in each task (one per GPU)
$MUSTER run --nproc-per-node 2 --tee all main.py --epochs 1
"""
TORCHRUN_JOB = r"""#!/bin/bash
# Number of Nodes
#SBATCH --nodes=3
# Number of tasks. 3 (1 per node)
#SBATCH --ntasks=3
# Number of GPU per node
#SBATCH --gpus-per-node=2
#SBATCH --mem=16G
# we need all nodes to be ready at the same time
#SBATCH --wait-all-nodes=1

# Setup our rendez-vous point
RDV_ADDR=$(hostname)
WORLD_SIZE=$SLURM_JOB_NUM_NODES
# -----

srun --label $MUSTER torchrun \
    --nproc_per_node=$SLURM_GPUS_PER_NODE \
    --nnodes=$WORLD_SIZE \
    --rdzv_id=$SLURM_JOB_ID \
    --rdzv_backend=c10d \
    --rdzv_endpoint=$RDV_ADDR:$FREE_PORT \
    training_script.py
"""
TRAINING_SCRIPT = """
import os
import torch
import torch.distributed as dist


class Trainer:
    def __init__(self):
        self.chk_path = "model.pt"
        self.model = torch.nn.Linear(2, 1)

    def should_checkpoint(self):
        # Note: only one worker saves its weights
        return self.global_rank == 0 and self.local_rank == 0

    def save_checkpoint(self):
        torch.save(self.model.state_dict(), self.chk_path)

    def load_checkpoint(self):
        self.model.load_state_dict(torch.load(self.chk_path))

    def initialize(self):
        self.global_rank = int(os.environ.get("RANK", -1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", -1))
        assert self.global_rank >= 0, "Global rank should be set"
        assert self.local_rank >= 0, "Local rank should be set"
        dist.init_process_group(backend="gloo")

    def sync_weights(self):
        if self.should_checkpoint():
            self.save_checkpoint()
        dist.barrier()
        if not self.should_checkpoint():
            self.load_checkpoint()
        dist.barrier()

    def train(self):
        self.sync_weights()
        ddp_model = torch.nn.parallel.DistributedDataParallel(self.model)
        ddp_model(torch.full((1, 2), float(self.global_rank))).sum().backward()
        return ddp_model.module.weight.grad[0, 0].item()


trainer = Trainer()
trainer.initialize()
mean = trainer.train()
os.write(1, f"rank {trainer.global_rank} of {dist.get_world_size()}: {mean}\\n".encode())
"""


@pytest.fixture
def submit(cluster, tmp_path):
    """Return a function that submits a job file and returns what the job wrote."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    muster = bin_folder / "muster"
    muster.write_text(f'#!/bin/sh\nexec {sys.executable} -m torchmuster "$@"\n')
    muster.chmod(0o755)
    environment = cluster.env | {
        "MUSTER": str(muster),
        "FREE_PORT": str(reserve_port()),
        "SLURM_TMPDIR": str(tmp_path / "local"),
    }

    def call(job):
        (tmp_path / "job.sh").write_text(job)
        words = ["sbatch", "job.sh"]
        done = ran(words, limit_s=30, cwd=tmp_path, env=environment)
        number = done.stdout.strip()
        cluster.wait_for_end(number)
        return (tmp_path / f"slurm-{number}.out").read_text()

    return call


def test_a_job_file_whose_script_asks_srun_for_its_rank(submit, tmp_path):
    shutil.copy(MAIN, tmp_path / "main.py")
    said = submit(SRUN_JOB)

    for rank in range(4):
        assert f"World size: 4, global rank: {rank}, local rank: {rank % 2}" in said, said
    assert "Effective batch size: 512" in said
    assert "Epoch 0: 40 samples validated" in said
    assert said.count("Done!") == 4
    assert "succeeded after" in said


def test_a_job_file_that_starts_torchrun_by_srun_on_each_node(submit, tmp_path):
    (tmp_path / "training_script.py").write_text(TRAINING_SCRIPT)
    said = submit(TORCHRUN_JOB)

    for rank in range(6):
        assert f"rank {rank} of 6: 2.5\n" in said, said
