"""How long `muster doctor` takes, phase by phase, and what the look before a start adds to a run.

    python benchmarks/doctor.py [--only long,many,short] [--repeats 2] [--quick] [--json FILE] [--limit SECONDS]

Simulated nodes of this machine, so all of them share its cores; on a cluster each has its own.

* long: `muster doctor --nodes 2`, with its test job. Beside it, in the same round, `python -c "import torch"` twice at
  the same time: what the job's two interpreters can't do without.
* many: `muster doctor --nodes 64 --no-job`; 4 nodes with `--quick`.
* short: `muster run --nodes 2` of a script that imports torch, with the look before the start and without it, by turns.

Processor time is that of the command and of all that it has started. On a busy machine compare it, and the ratios.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from running.results import FOLDER, headline, machine_facts, save
from running.stage import REPOSITORY, Stage, stage
from torchmuster.core.files.layout import RunDir
from torchmuster.core.owner.record import read_events
from torchmuster.launcher.model.run import record_of

SOURCE = REPOSITORY / "src"

GOAL_S = {"long": 5.0, "many": 15.0}
NUM_MANY = 64
LIMIT_S = 300.0
PHASES = ("agents", "nodes", "workers", "job")
Reading = dict[str, float]


def run_timed(
    argv: Sequence[str], environment: Mapping[str, str], folder: Path
) -> tuple[Reading, str]:
    """Run a command to its end; return its wall and processor seconds and what it printed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        before = os.times()
        began = time.perf_counter()
        done = subprocess.run(
            argv,
            env=environment,
            cwd=folder,
            stdout=out,
            stderr=err,
            timeout=LIMIT_S,
        )
        wall_s, after = time.perf_counter() - began, os.times()
        out.seek(0)
        text = out.read().decode()
        err.seek(0)
        said = err.read().decode(errors="replace")
    if done.returncode > 1:
        raise SystemExit(
            f"{' '.join(argv)} ended with exit code {done.returncode}:\n{said[-2000:]}"
        )
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


def measure_many(
    environment: Mapping[str, str], folder: Path, num_nodes: int = NUM_MANY
) -> dict[str, Reading]:
    """Measure many nodes without a job."""
    words = ("--nodes", str(num_nodes), "--no-job")
    return {f"doctor --nodes {num_nodes}": doctor(environment, folder, *words)}


def measure_short(environment: Mapping[str, str], folder: Path) -> dict[str, Reading]:
    """Measure the start of a run on two nodes with the look before it and without."""
    found = {}
    for name, more in (("with the look", ()), ("without", ("--no-preflight",))):
        words = ("run", "--nodes", "2", "--tee", "none", *more, "train.py")
        reading, _ = run_timed(muster(*words), environment, folder)
        home = Path(environment["MUSTER_HOME"])
        (run_dir,) = (home / "runs").iterdir()
        found_at = {one.event.name: one.at for one in read_events(str(run_dir / "events.jsonl"))}
        start_s = found_at["workers_started"] - found_at["run_started"]
        look = record_of(RunDir(str(run_dir))).preflight
        held = {"held_s": look.held_s, "looked_s": look.took_s} if look is not None else {}
        found[f"run --nodes 2, {name}"] = reading | {"start_s": start_s} | held
        shutil.rmtree(run_dir)
    return found


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


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the medians as Markdown."""
    figures = ("wall_s", "cpu_s", *(f"{name}_s" for name in PHASES), "start_s", "held_s")
    lines = [f"| command | {' | '.join(figures)} | lowest..highest wall_s |"]
    lines.append(f"|---|{'---:|' * (len(figures) + 1)}")
    for row in rows:
        cells = [f"{row[f]:.2f}" if f in row else "-" for f in figures]
        walls = [one["wall_s"] for one in row["readings"]]
        spread = f"{min(walls):.2f}..{max(walls):.2f}"
        lines.append(f"| {row['command']} | {' | '.join(cells)} | {spread} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round, with 4 nodes for many")
    parser.add_argument("--json", type=Path, default=FOLDER / "doctor.json")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all of it")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    cases = CASES | {"many": partial(measure_many, num_nodes=4)} if options.quick else CASES
    machine = machine_facts()
    with stage("doctor", options.limit) as running:
        readings = measure_all(running, [cases[name] for name in options.only.split(",")], repeats)
    rows = summarize(readings)
    head = headline(machine, f"medians of {repeats} rounds")
    goals = f"goals: {GOAL_S['long']:g} s with 2 nodes, {GOAL_S['many']:g} s with {NUM_MANY}"
    document = {"machine": machine, "rows": rows}
    save(options.json, document, f"{head}; {goals}\n\n{table(rows)}")


def measure_all(
    running: Stage,
    cases: Sequence[Callable[[Mapping[str, str], Path], dict[str, Reading]]],
    repeats: int,
) -> dict[str, list[Reading]]:
    """Measure all cases in turn, again and again."""
    readings: dict[str, list[Reading]] = {}
    with tempfile.TemporaryDirectory(prefix="muster-doctor-") as name:
        folder = Path(name)
        (folder / "train.py").write_text("import torch\n")
        environment = {**os.environ, "MUSTER_HOME": str(folder / "home"), "PYTHONPATH": str(SOURCE)}
        for number in range(repeats):
            for measure in cases:
                what = measure.func if isinstance(measure, partial) else measure
                running.step(f"round {number + 1} of {repeats}: {what.__name__}")
                for command, reading in measure(environment, folder).items():
                    running.tell(f"  {command}: {reading['wall_s']:.2f} s")
                    readings.setdefault(command, []).append(reading)
    return readings


if __name__ == "__main__":
    main()
