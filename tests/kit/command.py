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


def ran(argv, limit_s=240.0, **options):
    """Run a command to its end, with nothing on its standard input; return its exit code and what it said."""
    usual = {"capture_output": True, "text": True, "timeout": limit_s}
    usual |= {} if "input" in options else {"stdin": subprocess.DEVNULL}
    return subprocess.run([*map(str, argv)], **{**usual, **options})


def run_muster(*words, env, cwd=None, limit_s=240.0):
    """Run `muster WORDS` to its end; return its exit code and what it said."""
    return ran([*MUSTER, *words], limit_s, env=env, cwd=cwd)


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


def spawned(argv, **options):
    """Start a command with nothing on its standard input; what it says, also its standard error, is its `stdout`."""
    usual = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return Child([*map(str, argv)], **{**usual, "text": True, **options})


def finished(start, *words, stdin=None, limit_s=60.0, **options):
    """Let `start` start a command, and wait for its end; return its exit code and texts. A failure kills it."""
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["stdin"] = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    with start(*words, **options) as child:
        out, err = child.communicate(stdin, timeout=limit_s)
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def insist(process):
    """Press Ctrl-C again, so late that it counts as another one: the first has been taken."""
    taken_at = time.monotonic()
    wait_until(lambda: time.monotonic() - taken_at > AGAIN_AFTER_S, "a Ctrl-C that counts")
    process.send_signal(signal.SIGINT)
