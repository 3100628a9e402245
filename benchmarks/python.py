"""What it takes to launch a function from Python: from the call to the values of 8 workers, beside submitit and torchrunx.

    python benchmarks/python.py [--repeats 5] [--peers FOLDER] [--quick] [--json FILE] [--limit SECONDS]

The function imports torch and returns nothing. The session is there already, and one call has been made in it. Every trial is a client of its own that has imported its launcher before the time begins.
Every round measures every side once, and the next round begins with another side. The floor is one `import torch` (with the
modules that muster imports before it forks) in the same round. `--peers` is a folder of
`pip install --target FOLDER --no-deps submitit torchrunx && pip install --target FOLDER fabric`; without it muster is measured alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

from running.results import FOLDER, headline, machine_facts, save
from running.stage import REPOSITORY, Stage, stage

WORKERS = 8
_TRIAL_LIMIT_S = 120.0
_FUNCTION = """\
import sys, time
def empty():
    import torch
"""
_SAY = "print('took', time.perf_counter() - begun, len(values))\n"
FLOOR = "import torch"
CLIENTS = {
    FLOOR: (
        "import time\nbegun = time.perf_counter()\n"
        "import torch, torch.distributed, torch.nn.parallel, torch.utils.data.distributed\nvalues = []\n"
        + _SAY
    ),
    "muster": (
        f"{_FUNCTION}import torchmuster\nlaunch = torchmuster.launch\nbegun = time.perf_counter()\n"
        f"values = launch(empty, nproc_per_node={WORKERS}, here=True).results(90)\n{_SAY}"
    ),
    "muster, in a session": (
        f"{_FUNCTION}import torchmuster\n"
        f"with torchmuster.session(nproc_per_node={WORKERS}, here=True) as held:\n"
        "    held.launch(empty).results(90)\n"
        "    begun = time.perf_counter()\n"
        f"    values = held.launch(empty).results(90)\n    {_SAY}"
    ),
    "submitit": (
        f"{_FUNCTION}import submitit\nbegun = time.perf_counter()\n"
        "executor = submitit.LocalExecutor('jobs')\n"
        f"executor.update_parameters(tasks_per_node={WORKERS}, timeout_min=5)\n"
        f"values = executor.submit(empty).results()\n{_SAY}"
    ),
    "torchrunx": (
        f"{_FUNCTION}import torchrunx\nbegun = time.perf_counter()\n"
        f"launcher = torchrunx.Launcher(hostnames=['localhost'], workers_per_host={WORKERS}, backend=None)\n"
        f"values = launcher.run(empty).results['localhost']\n{_SAY}"
    ),
}


def main() -> None:
    """Measure, print the table and write the file."""
    options = _parser().parse_args()
    sides = [
        FLOOR,
        "muster",
        "muster, in a session",
        *(["submitit", "torchrunx"] if options.peers else []),
    ]
    repeats = 1 if options.quick else options.repeats
    machine = machine_facts()
    readings: dict[str, list[float]] = {side: [] for side in sides}
    lost: dict[str, str] = {}
    with stage("python", options.limit) as running:
        for number in range(repeats):
            first = number % len(sides)
            for side in [*sides[first:], *sides[:first]]:
                running.step(f"round {number + 1} of {repeats}: {side}")
                _measure(running, side, options.peers, readings, lost)
    how = f"seconds, median of {repeats} rounds, p95"
    document = {"machine": machine, "workers": WORKERS, "rows": readings, "lost": lost}
    save(options.json, document, f"{headline(machine, how)}\n\n{_table(readings, lost)}")
    if not readings["muster"]:
        sys.exit("python: nothing could be measured")


def _measure(
    running: Stage,
    side: str,
    peers: str | None,
    readings: dict[str, list[float]],
    lost: dict[str, str],
) -> None:
    path = [str(REPOSITORY / "src"), *([peers] if peers else [])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # In a file: torchrunx and submitit look for the source of what runs.
        client = Path(folder, "client.py")
        client.write_text(CLIENTS[side])
        own = {
            "PYTHONPATH": os.pathsep.join(path),
            "MUSTER_HOME": f"{folder}/home",
            "OMP_NUM_THREADS": "1",
        }
        try:
            done = subprocess.run(
                [sys.executable, str(client)],
                cwd=folder,
                env={**os.environ, **own},
                capture_output=True,
                text=True,
                timeout=_TRIAL_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            lost[side] = f"not done within {_TRIAL_LIMIT_S:g} s"
            return
    words = done.stdout.split()
    if done.returncode != 0 or "took" not in words:
        lost[side] = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
        running.tell(f"{side} was lost: {lost[side]}")
        return
    readings[side].append(float(words[words.index("took") + 1]))


def _table(readings: dict[str, list[float]], lost: dict[str, str]) -> str:
    floors = readings[FLOOR]
    rows = ["| | median | p95 | beyond the floor of its round, median |", "|---|---|---|---|"]
    for side, values in readings.items():
        if not values:
            rows.append(f"| {side} | lost | | |")
            continue
        beyond = [value - floor for value, floor in zip(values, floors, strict=False)]
        over = f"{median(beyond):.2f}" if side != FLOOR else ""
        rows.append(f"| {side} | {median(values):.2f} | {_p95(values):.2f} | {over} |")
    return "\n".join([*rows, *(f"\n{side}: {why}" for side, why in lost.items())])


def _p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", metavar="FOLDER")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=FOLDER / "python.json")
    parser.add_argument("--limit", type=float, default=1200.0)
    return parser


if __name__ == "__main__":
    main()
