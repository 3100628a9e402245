"""Run `muster` as a user does: from this source, with a home of its own and one thread for each worker."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
MUSTER = (sys.executable, "-m", "torchmuster")


def muster_env(home, **more):
    """Return the environment of a `muster` whose runs lie below `home`."""
    own = {"PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def run_muster(*words, env, cwd=None, limit_s=120.0):
    """Run `muster WORDS` to its end; return its exit code and what it said."""
    return subprocess.run(
        [*MUSTER, *map(str, words)],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
