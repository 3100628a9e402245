#!/bin/bash -l
#SBATCH --job-name=m7_days__run
#SBATCH --output=/runs/r1/job.log
#SBATCH --open-mode=append
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --mem=65536M
#SBATCH --partition=gpu
#SBATCH --account=proj-1
#SBATCH --qos=high
#SBATCH --constraint=[a100|h100]&ib
#SBATCH --exclude=n3,n[7-8]
#SBATCH --time=61
#SBATCH --reservation=maintenance

# Python 3.11 or later, for muster's own processes; a line below may set another.
PYTHON='/opt/my python/bin/python3'
export MUSTER_JOB_ENDS_AT=$(($(date +%s) + 3660))
module load cuda/12.6
source '/home/me/my env/bin/activate'

# The head of group g.
exec "$PYTHON" -c 'print('"'"'$HOME'"'"')' 'a b'
