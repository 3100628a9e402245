#!/bin/bash -l
#PBS -N train
#PBS -S /bin/bash
#PBS -j oe
#PBS -o /runs/r1/job.log
#PBS -r y
#PBS -l nodes=4:ppn=1

# Python 3.11 or later, for muster's own processes; a line below may set another.
PYTHON=/usr/bin/python3

exec "$PYTHON" /opt/muster/programs/__main__.py conduct-group --group g
