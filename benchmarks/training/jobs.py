"""Runs the measured scripts, each in a folder of its own that is gone at the end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launching.job import lost_with, scratch_folder
from launching.sides import SIDES, TORCHRUN_OPTIONS, side_environment

HERE = Path(__file__).parent
TIMEOUT_S = 600.0
MAX_RESTARTS = 10

Values = dict[str, dict[str, list[float]]]  # "metric, unit", side, one value a pair of blocks


def measure(script: str, num_workers: int, what: dict[str, Any]) -> Values:
    """Return what a script of this folder has measured on `num_workers` workers of one node."""
    with scratch_folder() as folder:
        command = muster_command(script, num_workers, 0)
        run([*command, str(folder), json.dumps(what)], "muster", folder)
        values: Values = json.loads((folder / "values.json").read_text())
        return values


def muster_command(script: str, num_workers: int, max_restarts: int = MAX_RESTARTS) -> list[str]:
    """Return the line that starts a script with muster, without its arguments."""
    options = ["--nproc-per-node", str(num_workers), "--max-restarts", str(max_restarts)]
    return [sys.executable, "-m", "torchmuster", "run", *options, str(HERE / script)]


def torchrun_command(script: str, num_workers: int) -> list[str]:
    """Return the line that starts a script with torchrun, without its arguments."""
    options = ["--nproc-per-node", str(num_workers), "--max-restarts", str(MAX_RESTARTS)]
    options += ["--standalone", *TORCHRUN_OPTIONS]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(HERE / script)]


def run(command: Sequence[str], launcher: str, folder: Path) -> float:
    """Run a job to its good end; return CLOCK_MONOTONIC at its start, in seconds.

    Raises:
        LostError: It ended with another exit code than 0, or not in time.
    """
    with (folder / "log").open("wb") as log:
        started_s = time.monotonic()
        try:
            ended = subprocess.run(
                command,
                env=_environment(launcher, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                start_new_session=True,
            )
            exit_code = ended.returncode
        except subprocess.TimeoutExpired:
            exit_code = None
    if exit_code != 0:
        what = (
            f"not ended after {TIMEOUT_S:.0f} s" if exit_code is None else f"exit code {exit_code}"
        )
        raise lost_with(f"{launcher}: {what}", (folder / "log").read_text(errors="replace"))
    return started_s


def _environment(launcher: str, folder: Path) -> dict[str, str]:
    environment = side_environment(SIDES[launcher], folder)
    paths = [str(HERE.parent), environment["PYTHONPATH"]]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
