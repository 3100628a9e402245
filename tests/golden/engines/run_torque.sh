$ qsub /home/me/home/runs/r1/job.sh

#!/bin/bash -l
#PBS -N r1
#PBS -S /bin/bash
#PBS -j oe
#PBS -o /home/me/home/runs/r1/job.log
#PBS -r y
#PBS -l nodes=2:ppn=1

# Python 3.11 or later, for muster's own processes.
PYTHON=/usr/bin/python3
if ! "$PYTHON" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "muster: $PYTHON does not run on $(uname -n) ($(uname -m)): python3 on PATH is taken" >&2
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
MUSTER=/opt/torchmuster
if [ ! -r "$MUSTER/programs/__main__.py" ]; then
  COPY=/home/me/home/runs/r1/package
  echo "muster: $MUSTER is not on $(uname -n): the copy in $COPY is taken" >&2
  [ -d "$COPY" ] || { "$PYTHON" -I -m zipfile -e "$COPY.zip" "$COPY.$$/torchmuster" && mv -T "$COPY.$$" "$COPY"; }
  MUSTER=$COPY/torchmuster
fi

# The head of the run: it starts an agent on every node, restarts what dies, leaves the result.
exec "$PYTHON" "$MUSTER/programs/__main__.py" conduct /home/me/home/runs/r1 --engine torque --warn 120 --submitted-from x86_64
