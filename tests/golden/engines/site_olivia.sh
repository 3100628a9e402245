# olivia (pbs): 2 jobs
JOB_make_data=$(qsub make-data.sh)
JOB_train=$(qsub -W "depend=afterok:$JOB_make_data" train.sh)

# ---- make-data.sh
#!/bin/bash -l
#PBS -N flow-make-data
#PBS -S /bin/bash
#PBS -j oe
#PBS -o /home/me/home/runs/r1/groups/make-data/job.log
#PBS -k oed
#PBS -r y
#PBS -l select=1:ncpus=1:mpiprocs=1:sales_op=blanca
#PBS -l walltime=01:30:00
#PBS -q workq
#PBS -A acct
#PBS -P proj
#PBS -m n
#PBS -l place=scatter:excl

# Python 3.11 or later, for muster's own processes.
PYTHON=/usr/bin/python3
# The agents run the setup lines on every node; here they are for a first node without that Python.
if ! "$PYTHON" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "muster: $PYTHON does not run on $(uname -n) ($(uname -m)): python3 of the setup lines is taken" >&2
  eval 'module load cray-python'
  PYTHON=$(command -v python3)
  if ! "$PYTHON" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    {
      echo 'error: this node has no Python for muster'
      echo "at: $(uname -n), ${PYTHON:-no python3 on PATH}"
      echo 'because: the first node of a job needs Python 3.11 or later'
      echo 'hint: `setup = [...]` of the site loads one: a module, or source VENV/bin/activate'
    } >&2
    exit 14
  fi
fi
export MUSTER_JOB_ENDS_AT=$(($(date +%s) + 5400))
MUSTER=/opt/torchmuster
if [ ! -r "$MUSTER/programs/__main__.py" ]; then
  COPY=/home/me/home/runs/r1/package
  echo "muster: $MUSTER is not on $(uname -n): the copy in $COPY is taken" >&2
  [ -d "$COPY" ] || { "$PYTHON" -I -m zipfile -e "$COPY.zip" "$COPY.$$/torchmuster" && mv -T "$COPY.$$" "$COPY"; }
  MUSTER=$COPY/torchmuster
fi

# The head of group make-data: it starts an agent on each node of this job, calls the roll, conducts the tasks, stores outputs; its exit code is the group's.
exec "$PYTHON" "$MUSTER/programs/__main__.py" conduct-group --run-dir /home/me/home/runs/r1 --group make-data --engine pbs

# ---- train.sh
#!/bin/bash -l
#PBS -N flow-train
#PBS -S /bin/bash
#PBS -j oe
#PBS -o /home/me/home/runs/r1/groups/train/job.log
#PBS -k oed
#PBS -r y
#PBS -l select=1:ncpus=1:mpiprocs=1:sales_op=blanca
#PBS -l walltime=01:30:00
#PBS -q workq
#PBS -A acct
#PBS -P proj
#PBS -m n
#PBS -l place=scatter:excl

# Python 3.11 or later, for muster's own processes.
PYTHON=/usr/bin/python3
# The agents run the setup lines on every node; here they are for a first node without that Python.
if ! "$PYTHON" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "muster: $PYTHON does not run on $(uname -n) ($(uname -m)): python3 of the setup lines is taken" >&2
  eval 'module load cray-python'
  PYTHON=$(command -v python3)
  if ! "$PYTHON" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    {
      echo 'error: this node has no Python for muster'
      echo "at: $(uname -n), ${PYTHON:-no python3 on PATH}"
      echo 'because: the first node of a job needs Python 3.11 or later'
      echo 'hint: `setup = [...]` of the site loads one: a module, or source VENV/bin/activate'
    } >&2
    exit 14
  fi
fi
export MUSTER_JOB_ENDS_AT=$(($(date +%s) + 5400))
MUSTER=/opt/torchmuster
if [ ! -r "$MUSTER/programs/__main__.py" ]; then
  COPY=/home/me/home/runs/r1/package
  echo "muster: $MUSTER is not on $(uname -n): the copy in $COPY is taken" >&2
  [ -d "$COPY" ] || { "$PYTHON" -I -m zipfile -e "$COPY.zip" "$COPY.$$/torchmuster" && mv -T "$COPY.$$" "$COPY"; }
  MUSTER=$COPY/torchmuster
fi

# The head of group train: it starts an agent on each node of this job, calls the roll, conducts the tasks, stores outputs; its exit code is the group's.
exec "$PYTHON" "$MUSTER/programs/__main__.py" conduct-group --run-dir /home/me/home/runs/r1 --group train --engine pbs

