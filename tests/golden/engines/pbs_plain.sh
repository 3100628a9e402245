#!/bin/bash -l
#PBS -N train
#PBS -S /bin/bash
#PBS -j oe
#PBS -o /runs/r1/job.log
#PBS -k oed
#PBS -r y
#PBS -l select=2:ncpus=8:mpiprocs=1:ngpus=4:mem=65536mb
#PBS -l place=scatter

# Python 3.11 or later, for muster's own processes; a line below may set another.
PYTHON=/usr/bin/python3

exec "$PYTHON" /opt/muster/programs/__main__.py conduct-group --group g
