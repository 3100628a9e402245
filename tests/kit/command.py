"""Run `muster` as a user does: from this source, with a home of its own and one thread for each worker."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from click.testing import CliRunner

from kit.waiting import wait_until
from torchmuster.core.model.verdict import AGAIN_AFTER_S

SOURCE = Path(__file__).parents[2] / "src"
MUSTER = (sys.executable, "-m", "torchmuster")


def muster_env(home, **more):
    """Return the environment of a `muster` whose runs lie below `home`."""
    own = {"PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def run_muster(*words, env, cwd=None, limit_s=240.0):
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


def call(command, *words, stdin=None):
    """Return what a command of ours comes to in this process; its error is raised."""
    done = CliRunner().invoke(command, words, input=stdin, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done


class Child(subprocess.Popen):
    """A process that a failed `with` kills, instead of waiting for its end until the test's time is up."""

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, trace)


def insist(process):
    """Press Ctrl-C again, so late that it counts as another one: the first has been taken."""
    taken_at = time.monotonic()
    wait_until(lambda: time.monotonic() - taken_at > AGAIN_AFTER_S, "a Ctrl-C that counts")
    process.send_signal(signal.SIGINT)
