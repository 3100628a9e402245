"""A job on a real Slurm in namespaces whose first node loses its power: how long until another one has taken the head's place.

The cluster is that of the tests (`tests/cluster/slurm_lab.py`): three nodes, of which the run needs two and may have three.
"""

import collections
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from cluster.slurm_lab import SlurmLab, why_not  # type: ignore[import-not-found]  # noqa: E402

__all__ = ["ROOT", "SlurmLab", "cluster", "trial", "why_not"]
_LIMIT_S = 120.0
_LOOK_S = 0.02


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """Yield the cluster."""
    with SlurmLab(3, cpus=4, gpus=1) as lab:
        yield lab


def trial(lab: Any, script: str, after_s: float) -> float:
    """Return the seconds from the cut to the first all-reduce of the attempt that follows.

    Args:
        lab: The cluster.
        script: Writes `BENCH_OUT/RANK.ATTEMPT` behind its first all-reduce, and ends in the second attempt.
        after_s: When the power is cut, from that file of the first attempt on.

    Raises:
        RuntimeError: The run did not end well, or an event is missing or there twice.
        TimeoutError: Nothing followed.
    """
    folder = lab.shared / f"power-{time.monotonic_ns()}"
    folder.mkdir()
    (folder / "train.py").write_text(script)
    home = folder / "home"
    env = {"PYTHONPATH": str(ROOT / "src"), "MUSTER_HOME": str(home), "BENCH_OUT": str(folder)}
    words = ["run", "--on", "slurm", "--run-id", "r", "--detach", "--nodes", "2:3", "train.py"]
    submit = [sys.executable, "-m", "torchmuster", *words]
    try:
        if lab.run(submit, env=env, cwd=str(folder)).returncode:
            raise RuntimeError("it was not submitted")
        for rank in range(3):
            _wait(folder / f"{rank}.0")
        time.sleep(after_s)
        cut_at = time.time()
        lab.kill_node("n1", unplug=True)
        ends = [float(_wait(folder / f"{rank}.1").split()[0]) for rank in range(2)]
        result = json.loads(_wait(home / "runs/r/result.json"))
        _check(result, (home / "runs/r/events.jsonl").read_text().splitlines())
        return max(ends) - cut_at
    finally:
        lab.reset()
        shutil.rmtree(folder, ignore_errors=True)


def _check(result: dict[str, Any], lines: list[str]) -> None:
    if result["state"] != "succeeded":
        raise RuntimeError(f"it ended {result['state']}")
    counts = collections.Counter(lines)
    if twice := [line for line, count in counts.items() if count > 1]:
        raise RuntimeError(f"an event is there twice: {twice[0]}")
    events = [json.loads(line) for line in lines]
    wanted = {"attempt_started": 2, "workers_started": 2, "attempt_failed": 1, "head_replaced": 1}
    wanted |= {"run_started": 2, "run_ended": 1, "worker_ended": 2, "agent_joined": 5}
    for name, number in wanted.items():
        found = sum(event["event"] == name for event in events)
        if found != number:
            raise RuntimeError(f"{found} events {name}, not {number}")


def _wait(path: Path) -> str:
    until = time.monotonic() + _LIMIT_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no {path.name} within {_LIMIT_S:g} s")
        time.sleep(_LOOK_S)
    return path.read_text()
