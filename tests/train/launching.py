"""Start training scripts in the ways that users do, and read what they wrote."""

import subprocess
import sys
from pathlib import Path

from kit.command import MUSTER, muster_env, ran

HERE = Path(__file__).parent
EXACT = HERE / "exact_script.py"
PYTHON = sys.executable


def muster(home, num_workers, *script, restarts=0, nodes=1, check=True, timeout_s=150):
    """Run a script under `muster run` on this machine."""
    line = [*MUSTER, "run", "--nodes", nodes, "--nproc-per-node", num_workers]
    line += ["--max-restarts", restarts, *script]
    return run(line, muster_env(home), check=check, timeout_s=timeout_s)


def run(line, environment, *, check=True, timeout_s=150):
    """Run a command to its end; its output is in the failure's message."""
    ended = ran(line, limit_s=timeout_s, env=environment)
    if check:
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def run_each(environments, *script, timeout_s=150):
    """Start one process an environment, as srun or mpiexec would; return their exit codes."""
    workers = [
        subprocess.Popen([PYTHON, *map(str, script)], env=environment, stderr=subprocess.PIPE)
        for environment in environments
    ]
    try:
        said = [worker.communicate(timeout=timeout_s)[1].decode() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    codes = [worker.returncode for worker in workers]
    assert not any(codes), "\n".join(said)


def losses(out, rank=0):
    """Return `{step: (samples, loss)}`; a step that was done again must have given the same."""
    found = {}
    for line in (out / f"losses-{rank}.txt").read_text().splitlines():
        if line.count(" ") != 2:
            continue  # cut short by a kill
        step, count, loss = line.split()
        row = (int(count), float.fromhex(loss))
        assert found.setdefault(int(step), row) == row, f"step {step} differs when done again"
    return found


def weights(out, rank=0):
    """Return the digest of the final weights."""
    return (out / f"weights-{rank}.txt").read_text()
