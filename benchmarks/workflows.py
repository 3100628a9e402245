"""How long workflow files take: to plan many tasks, to start a group, to go from group to group.

    python benchmarks/workflows.py [--repeats 5] [--json FILE]

There is no peer that runs such a file without a cluster, so the ratios are against the least that could be done: a
bash that starts the same commands.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"

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


def start(folder: Path, num_tasks: int) -> float:
    """Return the seconds from typing `muster submit` to the first word of the last command."""
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


CASES: dict[str, Callable[[Path], float]] = {
    "plan 1,000 groups in a chain": lambda folder: plan(folder, CHAIN, "num_groups=1000"),
    "plan 1 group of 1,000 tasks": lambda folder: plan(folder, WIDE, "num_tasks=1000"),
    "submit to the first command, 1 task": lambda folder: start(folder, 1),
    "submit to the last command, 8 tasks": lambda folder: start(folder, 8),
    "20 groups in a chain": lambda folder: chain(folder, 20),
    "20 commands by bash": lambda _: by_hand(20),
}


def main() -> None:
    """Measure every case in turn, again and again; print medians and write all readings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/workflows.json"))
    options = parser.parse_args()
    readings: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.repeats):
        for name, measure in CASES.items():
            with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
                readings[name].append(measure(Path(folder)))
    rows: list[dict[str, Any]] = [
        {"case": name, "median_s": statistics.median(found), "all_s": found}
        for name, found in readings.items()
    ]
    for row in rows:
        low, high = min(row["all_s"]), max(row["all_s"])
        print(f"{row['case']:40} {row['median_s']:8.3f} s   ({low:.3f} to {high:.3f})")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
