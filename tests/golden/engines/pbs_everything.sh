#!/bin/bash -l
#PBS -N m7_days__run
#PBS -S /bin/bash
#PBS -j oe
#PBS -o /runs/r1/job.log
#PBS -k oed
#PBS -r n
#PBS -l select=2:ncpus=8:mpiprocs=1:ngpus=4:mem=65536mb
#PBS -l walltime=01:01:00
#PBS -q gpu
#PBS -A proj-1
#PBS -l place=excl
#PBS -P climate
#PBS -W sandbox=PRIVATE

# Python 3.11 or later, for muster's own processes; a line below may set another.
PYTHON=/usr/bin/python3
export MUSTER_JOB_ENDS_AT=$(($(date +%s) + 3660))
module load cuda/12.6

exec "$PYTHON" /opt/muster/programs/__main__.py conduct-group --group g
