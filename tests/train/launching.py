"""Start training scripts in the ways that users do, and read what they wrote."""

import json
import subprocess
import sys
from pathlib import Path

import torch

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


def global_losses(out, batch=None):
    """Return the mean over the global batch, of that size, at each step that was recorded by any rank."""
    total, count = {}, {}
    for path in out.glob("losses-*.txt"):
        for step, (num, loss) in losses(out, path.stem.removeprefix("losses-")).items():
            if num:
                total[step] = total.get(step, 0.0) + num * loss
                count[step] = count.get(step, 0) + num
    assert batch is None or set(count.values()) <= {batch}
    return {step: total[step] / count[step] for step in total}


def weights(out, rank=0):
    """Return the digest of the final weights."""
    return (out / f"weights-{rank}.txt").read_text()


def same_weights(*folders):
    """Compare what two runs have trained, but for the last bits of sums in another order."""
    one, many = (torch.load(folder / "weights.pt") for folder in folders)
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def events_in(path, name=None):
    """Return the events of a record, or those of a name."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return found if name is None else [event for event in found if event["event"] == name]


def made(*folders):
    """Return folders, which are new."""
    for folder in folders:
        folder.mkdir()
    return folders
