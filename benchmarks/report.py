"""How long the page of a large run takes and how large it is: 512 ranks, 100,000 steps, six metrics of each step.

    python benchmarks/report.py [--ranks 512] [--steps 100000] [--quick] [--json FILE]

The record is written as the head and the library write it: a line of metrics for each step, samples of all ranks as often as the
head keeps them, one restart. `read` and `page` are processor time of one process; the page is opened in Chromium where there is one.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launching.report import aligned
from running.results import headline, machine_facts, save
from torchmuster.core.files.layout import RunDir
from torchmuster.report.find import find_story
from torchmuster.report.page import render_page

BEGAN, STEP_S, PER_NODE = 1_800_000_000.0, 0.9, 8
DOUBLE_EVERY_BYTES = 4 << 20  # as core/head/training_head.py
METRICS = ("loss", "accuracy", "perplexity", "grad_norm", "lr", "perf/step_seconds")
COLUMNS = (
    "data_s",
    "forward_s",
    "rest_s",
    "wait_s",
    "cpus",
    "rss_mib",
    "io_mib",
    "gpu_percent",
    "gpu_mib",
)


def main() -> int:
    """Measure, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="16 ranks, 1,000 steps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    ranks, steps = (16, 1000) if args.quick else (args.ranks, args.steps)
    machine = machine_facts()
    with tempfile.TemporaryDirectory(prefix="muster-report-") as folder:
        rows = measure(Path(folder) / "run", ranks, steps)
    how = f"{ranks} ranks, {steps:,} steps, {len(METRICS)} metrics of each step"
    table = aligned([["", "muster report"], *([name, value] for name, value in rows.items())])
    text = f"{headline(machine, how)}\n\n{table}"
    document = {"machine": machine, "ranks": ranks, "steps": steps, "rows": rows}
    if args.json:
        save(args.json, document, text)
    else:
        print(text)
    return 0


def measure(folder: Path, ranks: int, steps: int) -> dict[str, str]:
    """Return what was measured, in words."""
    run_dir = RunDir(str(folder))
    size = write_record(run_dir, ranks, steps)
    began = time.process_time()
    story = find_story(run_dir.path)
    read = time.process_time()
    page = render_page(story).encode()
    made = time.process_time()
    path = folder / "report.html"
    path.write_bytes(page)
    return {
        "record": f"{size / 2**20:.1f} MiB",
        "read": f"{read - began:.2f} s",
        "page": f"{made - read:.2f} s",
        "size of the page": f"{len(page) / 2**20:.2f} MiB",
        "opened by Chromium": open_page(path),
    }


def open_page(path: Path) -> str:
    """Return how long the browser took from its request to a page that is drawn."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return "there is none"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.goto(path.as_uri())
        done = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        browser.close()
    return f"{done / 1000:.2f} s"


def write_record(run_dir: RunDir, ranks: int, steps: int) -> int:
    """Write the record of a run; return its size in bytes."""
    Path(run_dir.path).mkdir(parents=True)
    draw = random.Random(0)
    lasted = steps * STEP_S
    nodes = [f"n{rank // PER_NODE + 1}" for rank in range(ranks)]
    failed = lasted / 3
    events = [*attempt(0, 0.0, nodes), failure(failed, nodes), *attempt(1, failed + 1, nodes)]
    events.append(line(lasted + 60, "run_ended", state="succeeded"))
    result = {
        "run_id": "run",
        "state": "succeeded",
        "exit_code": 0,
        "attempts": 2,
        "restarts_spent": 1,
        "elapsed_s": lasted,
    }
    Path(run_dir.result).write_text(json.dumps(result))
    Path(run_dir.plan).write_text("{}")
    write(run_dir.events, events)
    write(run_dir.training, training(steps, draw))
    write(run_dir.samples, samples(nodes, steps, lasted, draw))
    return sum(path.stat().st_size for path in Path(run_dir.path).iterdir())


def attempt(number: int, at: float, nodes: list[str]) -> list[dict[str, Any]]:
    """Return the events of the start of an attempt."""
    places = [
        {"node": name, "host": name, "ranks": str(nodes.index(name))}
        for name in dict.fromkeys(nodes)
    ]
    started = line(
        at,
        "attempt_started",
        attempt=number,
        world_size=len(nodes),
        num_nodes=len(places),
        nodes=places,
    )
    return [started, line(at + 20, "workers_started", attempt=number)]


def failure(at: float, nodes: list[str]) -> dict[str, Any]:
    """Return the event of its end."""
    cause = {"rank": len(nodes) - 1, "node": nodes[-1], "kind": "signal"}
    return line(
        at,
        "attempt_failed",
        attempt=0,
        what=f"SIGKILL in rank {cause['rank']} on {nodes[-1]}",
        cause=cause,
    )


def training(steps: int, draw: random.Random) -> list[dict[str, Any]]:
    """Return the lines of the library."""
    rows = [line(30, "resumed", step=0)]
    for step in range(1, steps + 1):
        if step == steps // 3:
            rows.append(line(30 + step * STEP_S, "resumed", step=step - steps // 30))
        values = {name: draw.random() / (1 + step / 1000) for name in METRICS}
        rows.append(line(30 + step * STEP_S, "metrics", step=step, values=values))
    return rows


def samples(
    nodes: list[str], steps: int, lasted: float, draw: random.Random
) -> list[dict[str, Any]]:
    """Return how the ranks stood, as often as a head keeps it."""
    rows: list[dict[str, Any]] = []
    at, size, every = 30.0, 0, 10.0
    while at + every < lasted:
        at += every
        columns = {name: [round(draw.random() * every / 4, 3) for _ in nodes] for name in COLUMNS}
        done = [int(steps * at / lasted)] * len(nodes)
        row = line(
            at,
            "",
            attempt=0,
            over_s=every,
            nodes=nodes,
            states=["R"] * len(nodes),
            steps=done,
            steps_here=done,
            **columns,
        )
        size += len(json.dumps(row))
        every = 10.0 * 2 ** (size // DOUBLE_EVERY_BYTES)
        rows.append(row)
    return rows


def line(at: float, event: str, **fields: Any) -> dict[str, Any]:
    """Return a line of a record."""
    stamp = datetime.fromtimestamp(BEGAN + at, UTC).isoformat(timespec="milliseconds")
    return {"time": stamp, **({"event": event} if event else {}), **fields}


def write(path: str, rows: list[dict[str, Any]]) -> None:
    """Write lines."""
    with open(path, "w") as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
