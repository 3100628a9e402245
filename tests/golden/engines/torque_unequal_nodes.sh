#!/bin/bash -l
#PBS -N train
#PBS -S /bin/bash
#PBS -j oe
#PBS -o /runs/r1/job.log
#PBS -r y
#PBS -l nodes=1:ppn=16:gpus=8+3:ppn=4:sales_op=blanca
#PBS -l mem=1024mb
#PBS -l walltime=24:00:00

# Python 3.11 or later, for muster's own processes; a line below may set another.
PYTHON=/usr/bin/python3
export MUSTER_JOB_ENDS_AT=$(($(date +%s) + 86400))

exec "$PYTHON" /opt/muster/programs/__main__.py conduct-group --group g
