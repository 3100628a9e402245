#!/bin/bash -l
#SBATCH --job-name=train
#SBATCH --output=/runs/r1/job.log
#SBATCH --open-mode=append
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --mem=1024M
#SBATCH --tmp=10240M
#SBATCH --time=1440
#SBATCH hetjob
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --sales_op=blanca
#SBATCH --time=1440

# Python 3.11 or later, for muster's own processes; a line below may set another.
PYTHON=/usr/bin/python3
export MUSTER_JOB_ENDS_AT=$(($(date +%s) + 86400))

exec "$PYTHON" /opt/muster/programs/__main__.py conduct-group --group g
