#!/bin/bash -l
#SBATCH --job-name=train
#SBATCH --output=/runs/r1/job.log
#SBATCH --open-mode=append
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --mem=65536M

# Python 3.11 or later, for muster's own processes; a line below may set another.
PYTHON=/usr/bin/python3

exec "$PYTHON" /opt/muster/programs/__main__.py conduct-group --group g
