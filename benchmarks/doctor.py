"""How long `muster doctor` takes, phase by phase, and what the look before a start adds to a run.

    python benchmarks/doctor.py [--only long,many,short] [--repeats 3] [--json FILE]

Simulated nodes of this machine, so all of them share its cores; on a cluster each has its own.

* long: `muster doctor --nodes 2`, with its tiny job. Beside it, in the same round, `python -c "import torch"` twice at
  the same time: what the job's two interpreters can't do without.
* many: `muster doctor --nodes 64 --no-job`.
* short: `muster run --nodes 2` of a script that imports torch, with the look before the start and without it, by turns.

Processor time is that of the command and of all that it has started. On a busy machine compare it, and the ratios.
"""

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmuster.run.record import read_events

GOAL_S = {"long": 5.0, "many": 15.0}
NUM_MANY = 64
LIMIT_S = 300.0
PHASES = ("agents", "nodes", "workers", "job")
Reading = dict[str, float]


def run_timed(
    argv: Sequence[str], environment: Mapping[str, str], folder: Path
) -> tuple[Reading, str]:
    """Run a command to its end; return its wall and processor seconds and what it printed."""
    with tempfile.TemporaryFile() as out:
        before = os.times()
        began = time.perf_counter()
        done = subprocess.run(
            argv,
            env=environment,
            cwd=folder,
            stdout=out,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
        wall_s, after = time.perf_counter() - began, os.times()
        out.seek(0)
        text = out.read().decode()
    if done.returncode > 1:
        raise RuntimeError(f"{' '.join(argv)} ended with exit code {done.returncode}")
    used_s = (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )
    return {"wall_s": wall_s, "cpu_s": used_s}, text


def muster(*words: str) -> list[str]:
    """Return the command line of a `muster` of this tree."""
    return [sys.executable, "-m", "torchmuster", *words]


def doctor(environment: Mapping[str, str], folder: Path, *words: str) -> Reading:
    """Return one run of `muster doctor`, with its phases."""
    reading, text = run_timed(muster("doctor", "--json", *words), environment, folder)
    seconds = json.loads(text)["seconds"]
    return reading | {f"{name}_s": seconds[name] for name in PHASES if name in seconds}


def measure_long(environment: Mapping[str, str], folder: Path) -> dict[str, Reading]:
    """Measure two nodes with a job, and the floor."""
    run_timed([sys.executable, "-c", "import torch"], environment, folder)  # fills caches
    both = "python=$0; $python -c 'import torch' & $python -c 'import torch'; wait"
    floor, _ = run_timed(["sh", "-c", both, sys.executable], environment, folder)
    return {
        "import torch, twice": floor,
        "doctor --nodes 2": doctor(environment, folder, "--nodes", "2"),
    }


def measure_many(environment: Mapping[str, str], folder: Path) -> dict[str, Reading]:
    """Measure many nodes without a job."""
    words = ("--nodes", str(NUM_MANY), "--no-job")
    return {f"doctor --nodes {NUM_MANY}": doctor(environment, folder, *words)}


def measure_short(environment: Mapping[str, str], folder: Path) -> dict[str, Reading]:
    """Measure the start of a run on two nodes with the look before it and without."""
    found = {}
    for name, more in (("with the look", ()), ("without", ("--no-preflight",))):
        words = ("run", "--nodes", "2", "--tee", "none", *more, "train.py")
        reading, _ = run_timed(muster(*words), environment, folder)
        home = Path(environment["MUSTER_HOME"])
        (run_dir,) = (home / "runs").iterdir()
        events = {event["event"]: event for event in read_events(str(run_dir / "events.jsonl"))}
        start_s = _at(events["workers_started"]) - _at(events["run_started"])
        look = events.get("preflight", {})
        held = {"held_s": float(look["held_s"]), "looked_s": float(look["took_s"])} if look else {}
        found[f"run --nodes 2, {name}"] = reading | {"start_s": start_s} | held
        shutil.rmtree(run_dir)
    return found


def _at(event: Mapping[str, Any]) -> float:
    return dt.datetime.fromisoformat(event["time"]).timestamp()


CASES: dict[str, Callable[[Mapping[str, str], Path], dict[str, Reading]]] = {
    "long": measure_long,
    "many": measure_many,
    "short": measure_short,
}


def summarize(readings: Mapping[str, Sequence[Reading]]) -> list[dict[str, Any]]:
    """Return the medians of every command, with all readings."""
    rows = []
    for name, found in readings.items():
        figures = sorted({figure for one in found for figure in one})
        medians = {
            f: round(statistics.median(one[f] for one in found if f in one), 3) for f in figures
        }
        rows.append({"command": name, **medians, "readings": list(found)})
    return rows


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the medians as Markdown."""
    figures = ("wall_s", "cpu_s", *(f"{name}_s" for name in PHASES), "start_s", "held_s")
    print(f"| command | {' | '.join(figures)} | lowest..highest wall_s |")
    print(f"|---|{'---:|' * (len(figures) + 1)}")
    for row in rows:
        cells = [f"{row[f]:.2f}" if f in row else "-" for f in figures]
        walls = [one["wall_s"] for one in row["readings"]]
        print(f"| {row['command']} | {' | '.join(cells)} | {min(walls):.2f}..{max(walls):.2f} |")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/doctor.json"))
    options = parser.parse_args()
    facts: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "load before": round(os.getloadavg()[0], 1),
    }
    facts |= {"python": platform.python_version()}
    readings: dict[str, list[Reading]] = {}
    with tempfile.TemporaryDirectory(prefix="muster-doctor-") as name:
        folder = Path(name)
        (folder / "train.py").write_text("import torch\n")
        environment = {**os.environ, "MUSTER_HOME": str(folder / "home"), "MUSTER_ON": "local"}
        for _ in range(options.repeats):
            for case in options.only.split(","):
                for command, reading in CASES[case](environment, folder).items():
                    print(f"{command}: {reading['wall_s']:.2f} s", file=sys.stderr)
                    readings.setdefault(command, []).append(reading)
    rows = summarize(readings)
    print_table(rows)
    print(
        f"goals: {GOAL_S['long']:g} s with 2 nodes, {GOAL_S['many']:g} s with {NUM_MANY}; {facts}"
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
