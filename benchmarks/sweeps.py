"""How much of their time the slots of a sweep stand idle: many tasks of 0.2 s on two slots.

    python benchmarks/sweeps.py [--tasks 1000] [--repeats 3] [--quick] [--json FILE] [--limit SECONDS]

The peer is `xargs -P2`, which starts a fresh interpreter for each task. `idle` is the share of the slots' time in which no
process of a task lives: from the end of one, as who reaped it saw it, to the start of the next. `beyond` is how much longer the whole took than the
tasks' own time divided by the slots; what Python needs to begin and to leave is in it, for both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from running.results import FOLDER, headline, machine_facts, save
from running.stage import REPOSITORY, Stage, stage

SOURCE = REPOSITORY / "src"
TASK_S, NUM_SLOTS = 0.2, 2
TASK = f"import time\ntime.sleep({TASK_S})\n"
TORCH_TASK = f"import time, torch\ntime.sleep({TASK_S})\n"


def sweep(folder: Path, text: str, num_tasks: int) -> tuple[float, float | None]:
    """Return the seconds of a sweep, and the share of the slots' time without a process."""
    (folder / "task.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(folder / "home")}
    words = ("sweep", "--here", "task.py", "--grid", f"n=0:{num_tasks}", "--style", "env")
    begin = time.time()
    subprocess.run(
        [
            *(sys.executable, "-m", "torchmuster"),
            *words,
            "--slots",
            str(NUM_SLOTS),
            "--run-id",
            "s",
        ],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    elapsed_s = time.time() - begin
    lines = (folder / "home" / "runs" / "s" / "events.jsonl").read_text().splitlines()
    ends = [event for line in lines if (event := json.loads(line))["event"] == "member_ended"]
    busy_s = sum(float(event["elapsed_s"]) for event in ends)
    began = next(e for line in lines if (e := json.loads(line))["event"] == "sweep_ended")
    return elapsed_s, 1 - busy_s / (NUM_SLOTS * float(began["elapsed_s"]))


def xargs(folder: Path, text: str, num_tasks: int) -> tuple[float, float | None]:
    """Return the seconds of the same tasks under `xargs -P2`."""
    (folder / "task.py").write_text(text)
    numbers = "\n".join(map(str, range(num_tasks)))
    begin = time.time()
    subprocess.run(
        ["xargs", f"-P{NUM_SLOTS}", "-n1", sys.executable, str(folder / "task.py")],
        input=numbers,
        text=True,
        check=True,
    )
    return time.time() - begin, None


def all_cases(num_tasks: int, num_torch: int) -> dict[str, tuple[int, Callable[[Path], Any]]]:
    """Return the cases by name, with how many tasks each has."""
    return {
        f"muster sweep, {num_tasks:,} tasks": (num_tasks, lambda f: sweep(f, TASK, num_tasks)),
        f"xargs -P2, {num_tasks:,} tasks": (num_tasks, lambda f: xargs(f, TASK, num_tasks)),
        f"muster sweep, {num_torch} tasks that import torch": (
            num_torch,
            lambda f: sweep(f, TORCH_TASK, num_torch),
        ),
        f"xargs -P2, {num_torch} tasks that import torch": (
            num_torch,
            lambda f: xargs(f, TORCH_TASK, num_torch),
        ),
    }


def measure_all(
    running: Stage, cases: Mapping[str, tuple[int, Callable[[Path], Any]]], repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each case."""
    readings: dict[str, list[tuple[float, float | None]]] = {name: [] for name in cases}
    for number in range(repeats):
        for name, (_, measure) in cases.items():
            running.step(f"round {number + 1} of {repeats}: {name}")
            with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
                readings[name].append(measure(Path(folder)))
    rows = []
    for name, found in readings.items():
        least_s = cases[name][0] * TASK_S / NUM_SLOTS
        idle = [share for _, share in found if share is not None]
        median_s = statistics.median(elapsed_s for elapsed_s, _ in found)
        rows.append(
            {
                "case": name,
                "median_s": median_s,
                "least_s": least_s,
                "beyond": median_s / least_s - 1,
                "idle": statistics.median(idle) if idle else None,
                "all": found,
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| what | seconds | tasks alone | beyond | idle |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        idle = f"{row['idle']:.1%}" if row["idle"] is not None else "-"
        seconds = f"{row['median_s']:.1f} | {row['least_s']:.1f} | {row['beyond']:.0%}"
        lines.append(f"| {row['case']} | {seconds} | {idle} |")
    return "\n".join(lines)


def main() -> None:
    """Measure every case in turn, again and again; print medians and write all readings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of few tasks")
    parser.add_argument("--json", type=Path, default=FOLDER / "sweeps.json")
    parser.add_argument("--limit", type=float, default=2400.0, help="seconds for all of it")
    options = parser.parse_args()
    machine = machine_facts()
    repeats = 1 if options.quick else options.repeats
    num_tasks = 20 if options.quick else options.tasks
    cases = all_cases(num_tasks, max(4, num_tasks // 50))
    with stage("sweeps", options.limit) as running:
        rows = measure_all(running, cases, repeats)
    head = headline(machine, f"median of {repeats} rounds")
    save(options.json, {"machine": machine, "rows": rows}, f"{head}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
