"""How long workflow files take: to plan many tasks, to start a group, to go from group to group.

    python benchmarks/workflows.py [--repeats 3] [--quick] [--json FILE] [--limit SECONDS]

There is no peer that runs such a file without a cluster, so the ratios are against the least that could be done: a
bash that starts the same commands.
"""

import argparse
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

CHAIN = """
workflow:
  name: chain
  groups:
  {% for i in range(num_groups) %}
  - name: group-{{ i }}
    tasks:
    - name: task-{{ i }}
      command: ["true"]
      {% if i %}
      inputs: [{task: task-{{ i - 1 }}}]
      {% endif %}
  {% endfor %}
default-values:
  num_groups: 10
"""
WIDE = """
workflow:
  name: wide
  groups:
  - name: all
    tasks:
    {% for i in range(num_tasks) %}
    - name: task-{{ i }}
      lead: {{ i == 0 }}
      command: [bash, -c, "date +%s.%N > FOLDER/began-{{ i }}"]
      files: [{path: FOLDER/many/new, contents: x}]
    {% endfor %}
default-values:
  num_tasks: 2
"""


def muster(folder: Path, *words: str) -> float:
    """Run a command to its end and return the seconds."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(folder / "home")}
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "torchmuster", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return time.time() - begin


def plan(folder: Path, text: str, number: str) -> float:
    """Return the seconds of `muster submit --dry-run`, the start of Python included."""
    (folder / "w.yaml").write_text(text)
    return muster(folder, "submit", "w.yaml", "--set", number, "--dry-run")


def start(folder: Path, num_tasks: int, num_entries: int = 0) -> float:
    """Return the seconds from typing `muster submit` to the first word of the last command.

    Each task has a file of its own in a folder of the machine with so many entries, which its view shows beside it.
    """
    (folder / "many").mkdir()
    for number in range(num_entries):
        (folder / "many" / str(number)).touch()
    (folder / "w.yaml").write_text(WIDE.replace("FOLDER", str(folder)))
    begin = time.time()
    muster(folder, "submit", "w.yaml", "--set", f"num_tasks={num_tasks}")
    return max(float(path.read_text()) for path in folder.glob("began-*")) - begin


def chain(folder: Path, num_groups: int) -> float:
    """Return the seconds of a whole chain of groups, one command each."""
    (folder / "w.yaml").write_text(CHAIN)
    return muster(folder, "submit", "w.yaml", "--set", f"num_groups={num_groups}")


def by_hand(num_commands: int) -> float:
    """Return the seconds in which bash starts so many commands one after the other."""
    begin = time.time()
    words = "; ".join(["bash -c true"] * num_commands)
    subprocess.run(["bash", "-c", words], check=True)
    return time.time() - begin


def all_cases(
    num_planned: int, num_tasks: int, num_groups: int
) -> dict[str, Callable[[Path], float]]:
    """Return the cases by name."""
    return {
        f"plan {num_planned:,} groups in a chain": lambda folder: plan(
            folder, CHAIN, f"num_groups={num_planned}"
        ),
        f"plan 1 group of {num_planned:,} tasks": lambda folder: plan(
            folder, WIDE, f"num_tasks={num_planned}"
        ),
        "submit to the first command, 1 task": lambda folder: start(folder, 1),
        "submit to the first command, 1 task with a file among 500": lambda folder: start(
            folder, 1, num_entries=500
        ),
        f"submit to the last command, {num_tasks} tasks": lambda folder: start(folder, num_tasks),
        f"{num_groups} groups in a chain": lambda folder: chain(folder, num_groups),
        f"{num_groups} commands by bash": lambda _: by_hand(num_groups),
    }


FULL = (1000, 8, 20)
QUICK = (10, 2, 2)


def main() -> None:
    """Measure every case in turn, again and again; print medians and write all readings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of small files")
    parser.add_argument("--json", type=Path, default=FOLDER / "workflows.json")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all of it")
    options = parser.parse_args()
    machine = machine_facts()
    repeats = 1 if options.quick else options.repeats
    cases = all_cases(*(QUICK if options.quick else FULL))
    with stage("workflows", options.limit) as running:
        rows = measure_all(running, cases, repeats)
    head = headline(machine, f"median (lowest..highest) of {repeats} rounds")
    save(options.json, {"machine": machine, "rows": rows}, f"{head}\n\n{table(rows)}")


def measure_all(
    running: Stage, cases: Mapping[str, Callable[[Path], float]], repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each case."""
    readings: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats):
        for name, measure in cases.items():
            running.step(f"round {number + 1} of {repeats}: {name}")
            with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
                readings[name].append(measure(Path(folder)))
    return [
        {"case": name, "median_s": statistics.median(found), "all_s": found}
        for name, found in readings.items()
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| what | seconds |", "|---|---:|"]
    for row in rows:
        low, high = min(row["all_s"]), max(row["all_s"])
        lines.append(f"| {row['case']} | {row['median_s']:.3f} ({low:.3f}..{high:.3f}) |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
