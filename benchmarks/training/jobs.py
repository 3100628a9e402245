"""Runs the measured scripts, each in a folder of its own that is gone at the end."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launching.job import lost_with, scratch_folder
from launching.sides import SIDES, side_environment

HERE = Path(__file__).parent
TIMEOUT_S = 600.0

Values = dict[str, dict[str, list[float]]]  # "metric, unit", side, one value a pair of blocks


def measure(script: str, num_workers: int, what: dict[str, Any]) -> Values:
    """Return what a script of this folder has measured on `num_workers` workers of one node.

    Raises:
        LostError: It ended with another exit code than 0, or not in time.
    """
    options = ["--nproc-per-node", str(num_workers), "--max-restarts", "0"]
    command = [sys.executable, "-m", "torchmuster", "run", *options, str(HERE / script)]
    with scratch_folder() as folder:
        _run([*command, str(folder), json.dumps(what)], folder)
        values: Values = json.loads((folder / "values.json").read_text())
        return values


def _run(command: Sequence[str], folder: Path) -> None:
    with (folder / "log").open("wb") as log:
        try:
            ended = subprocess.run(
                command,
                env=_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                start_new_session=True,
            )
            what = f"exit code {ended.returncode}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            what = f"not ended after {TIMEOUT_S:.0f} s"
    if what:
        raise lost_with(f"muster: {what}", (folder / "log").read_text(errors="replace"))


def _environment(folder: Path) -> dict[str, str]:
    environment = side_environment(SIDES["muster"], folder)
    paths = [str(HERE.parent), environment["PYTHONPATH"]]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
