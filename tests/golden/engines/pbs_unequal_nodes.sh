#!/bin/bash -l
#PBS -N train
#PBS -S /bin/bash
#PBS -j oe
#PBS -o /runs/r1/job.log
#PBS -k oed
#PBS -r y
#PBS -l select=1:ncpus=16:mpiprocs=1:ngpus=8:mem=1024mb+3:ncpus=4:mpiprocs=1:sales_op=blanca
#PBS -l place=scatter
#PBS -l walltime=24:00:00

# Python 3.11 or later, for muster's own processes; a line below may set another.
PYTHON=/usr/bin/python3
export MUSTER_JOB_ENDS_AT=$(($(date +%s) + 86400))

exec "$PYTHON" /opt/muster/programs/__main__.py conduct-group --group g
