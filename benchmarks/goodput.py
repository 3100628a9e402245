"""Measure the time to 5,000 useful steps under one fault a minute: muster beside torchrun and ft_launcher.

    python benchmarks/goodput.py [--seeds 10] [--first-seed 0] [--at-once 5] [--ft-launcher PATH] [--quick] [--json FILE]
                                 [--slurm] [--limit SECONDS]

Workers, nodes and the head are killed at times and of kinds that a seed decides (`training/faults.py` says how), the same on all
sides. A step is a small model's on two workers and a sleep of 45 ms, in which an accelerator would compute; so several jobs run
at once on the cores that there are, and what disturbs falls on all sides. An epoch has 2,500 steps, 125 s.

- torchrun, epochs: a snapshot at the end of each epoch, as in torch's tutorial;
- torchrun, every 20: one every 20 steps as well, renamed but not synced, and what the epoch has had is skipped: the best by hand;
- ft_launcher, every 20: NVIDIA's launcher with the same script, where `--ft-launcher` says where it is;
- torchmuster: snapshots in memory every 10 steps, and on disk at the end of each epoch; a spare node.

With `--slurm` nodes and the head are machines of a real Slurm in namespaces (root, slurm-wlm), which lose their power and boot
again (`training/machines.py` says how); what a scheduler and time-outs cost is in it.

What is redone costs little beside what an epoch costs, so the first ratio follows from how long an epoch is beside the time
between two faults: it is expected to be (e^x - 1) / x with x = 125 s / 60 s, if a start took no time.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launching import processes
from running.results import FOLDER, headline, machine_facts, save
from running.stage import MACHINE_PATH, Stage, stage
from training.faults import BEST, EPOCHS, FT_LAUNCHER, OURS
from training.useful import Work

FULL = Work(steps_per_epoch=2500, num_epochs=2, device_ms=45.0)
QUICK = Work(steps_per_epoch=300, num_epochs=1, device_ms=10.0)
MEAN_S, QUICK_MEAN_S = 60.0, 18.0
QUICK_SEED = 13  # its first fault is soon, its second one late
JOB_LIMIT_S, QUICK_LIMIT_S = 3000.0, 120.0
GOALS = {EPOCHS: 3.0, BEST: 1.3, FT_LAUNCHER: 1.3}

Readings = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Measure, print the table and write the file."""
    options = _parser().parse_args()
    work = QUICK if options.quick else FULL
    mean_s = QUICK_MEAN_S if options.quick else MEAN_S
    limit_s = QUICK_LIMIT_S if options.quick else JOB_LIMIT_S
    sides = [OURS, BEST] if options.quick else [EPOCHS, OURS, BEST]
    sides += [FT_LAUNCHER] if options.ft_launcher else []
    first, num = (QUICK_SEED, 1) if options.quick else (options.first_seed, options.seeds)
    seeds = range(first, first + num)
    machine = machine_facts()
    folder_of_ours = Path(__file__).parent
    script = folder_of_ours / "training" / ("machines.py" if options.slurm else "faults.py")
    command = [sys.executable, str(script)]
    if not options.slurm:  # a lab ends by itself, when whoever has its orphans reaps them
        processes.adopt_orphans()
    with stage("goodput", options.limit) as running, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(folder_of_ours)}
        if options.slurm:  # whose programs are hidden from everything but its lab
            environment["PATH"] = MACHINE_PATH

        def take(job: tuple[int, str]) -> dict[str, Any]:
            seed, side = job
            out = Path(folder) / f"{seed}-{side.replace(' ', '')}.json"
            words = [side, str(seed), json.dumps(asdict(work)), str(mean_s), str(limit_s), str(out)]
            words += [options.ft_launcher] if options.ft_launcher else []
            return _take(running, [*command, *words], environment, side, seed, out)

        pool = ThreadPoolExecutor(options.at_once)
        try:
            running.step(f"{len(seeds)} rounds, {len(sides)} sides, {options.at_once} at once")
            found = list(pool.map(take, itertools.product(seeds, sides)))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.kill_descendants()
    rows: Readings = {side: [one for one in found if one["side"] == side] for side in sides}
    document = {"machine": machine, "work": asdict(work), "mean_s": mean_s, "rows": rows}
    how = f"{work.num_steps} steps, a fault in {mean_s:g} s on the average, {len(seeds)} schedules, {options.at_once} jobs at once"
    how += ", machines of a real Slurm" if options.slurm else ""
    save(
        options.json or FOLDER / ("goodput_slurm.json" if options.slurm else "goodput.json"),
        document,
        f"{headline(machine, how)}\n\n{_table(rows, work, mean_s)}",
    )


def _take(
    running: Stage,
    command: list[str],
    environment: dict[str, str],
    side: str,
    seed: int,
    out: Path,
) -> dict[str, Any]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if not out.exists():
        lost = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        out.write_text(json.dumps({"side": side, "seed": seed, "lost": lost}))
    reading: dict[str, Any] = json.loads(out.read_text())
    words = reading.get("lost") or f"{reading['elapsed_s']:.1f} s, {len(reading['faults'])} faults"
    running.tell(f"schedule {seed}, {side}: {words}")
    return reading


def _table(rows: Readings, work: Work, mean_s: float) -> str:
    ours = {one["seed"]: one["elapsed_s"] for one in rows[OURS] if "lost" not in one}
    lines = [
        "| side | time | of it useful | steps again | faults | ours is faster by | all schedules together | asked |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lost = []
    for side, readings in rows.items():
        good = [one for one in readings if "lost" not in one]
        lost += [
            f"schedule {one['seed']}, {side}: lost: {one['lost']}"
            for one in readings
            if "lost" in one
        ]
        if not good:
            lines.append(f"| {side} | lost | | | | | | |")
            continue
        both = [(one["elapsed_s"], ours[one["seed"]]) for one in good if one["seed"] in ours]
        is_peer = side != OURS and bool(both)
        useful = [100 * work.num_steps * one["step_ms"] / 1e3 / one["elapsed_s"] for one in good]
        cells = [
            side,
            _spread([one["elapsed_s"] for one in good], ".1f", " s"),
            _spread(useful, ".0f", " %"),
            _spread([one["num_again"] for one in good], ".0f", ""),
            str(sum(len(one["faults"]) for one in good)),
            _spread([its / own for its, own in both], ".2f", " times") if is_peer else "",
            f"{sum(its for its, _ in both) / sum(own for _, own in both):.2f} times"
            if is_peer
            else "",
            f"{GOALS[side]:g} times" if side in GOALS else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    epoch_s = work.steps_per_epoch * statistics.median(
        [
            one["step_ms"] / 1e3
            for readings in rows.values()
            for one in readings
            if "lost" not in one
        ]
        or [math.nan]
    )
    x = epoch_s / mean_s
    expected = (math.exp(x) - 1) / x
    lines += [
        "",
        f"An epoch takes {epoch_s:.0f} s; expected where all since the last epoch is done again: {expected:.1f} times the quiet time.",
    ]
    return "\n".join([*lines, *(f"\n{line}" for line in lost)])


def _spread(values: Sequence[float], form: str, unit: str) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}}{unit} ({low:{form}}..{high:{form}})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure goodput under faults.")
    parser.add_argument("--seeds", type=int, default=10, help="schedules, 10 if not given")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=5, help="jobs at a time, 5 if not given")
    parser.add_argument("--ft-launcher", default="", metavar="PATH", help="of an environment")
    parser.add_argument("--quick", action="store_true", help="one short schedule of two sides")
    parser.add_argument("--slurm", action="store_true", help="machines of a Slurm in namespaces")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=9000.0, help="seconds for all of it")
    return parser


if __name__ == "__main__":
    main()
