"""Measure what a loss costs: from the kill to the first all-reduce of the attempt that follows, beside torchrun.

    python benchmarks/losses.py [--repeats 50] [--only worker,node,spare,head,power,torchrun] [--quick] [--json FILE] [--limit SECONDS]

Two nodes with one worker each, on this machine, where a death is proved by the process table; `spare` has one node more that
waits. Each run ranks its kill at a moment of its own, after ten to thirty steps of 20 ms, and SIGKILL hits: the worker of rank 1;
the agent of the second node, and with it the node; the agent of the first node, and with it the head. Sides take turns. torchrun,
which has no simulated nodes here, has two workers in one and loses one of them. `power` is a job on a real Slurm in namespaces
(root, slurm-wlm), whose first node, with the head and its owner, loses power and link at once: nothing proves that it is dead.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launching import processes
from running import power
from running.results import FOLDER, headline, machine_facts, save
from running.stage import Stage, stage

SOURCE = Path(__file__).parents[1] / "src"
SCRIPT = """\
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
for step in range(10**9):
    dist.all_reduce(torch.ones(1))
    if step == 0:
        path = os.path.join(os.environ["BENCH_OUT"], f"{rank}.{attempt}")
        with open(path + ".new", "w") as file:
            file.write(f"{time.time()!r} {os.getpid()}")
        os.replace(path + ".new", path)
    if attempt != "0":
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""
_RUN = [
    sys.executable,
    "-m",
    "torchmuster",
    "run",
    "--here",
    "--nproc-per-node",
    "1",
    "--nodes",
    "2",
]
SIDES: dict[str, list[str]] = {
    "worker": _RUN,
    "node": _RUN,
    "spare": [*_RUN, "--spares", "1"],
    "head": _RUN,
    "power": [],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.1"),
    ],
}
TITLES = {
    "worker": "a worker",
    "node": "a node, replaced",
    "spare": "a node, a spare one takes its place",
    "head": "the node of the head",
    "power": "the power of the head's node, in a job of Slurm",
    "torchrun": "torchrun, a worker",
}
_TRIAL_LIMIT_S = 120.0
_LOOK_S = 0.002


def main() -> None:
    """Measure, print the table and write the file."""
    options = _parser().parse_args()
    repeats = 2 if options.quick else options.repeats
    machine = machine_facts()
    draw = random.Random(0)
    samples: dict[str, list[float]] = {side: [] for side in options.only}
    lost: dict[str, str] = {}
    others = [side for side in options.only if side != "power"]
    with stage("losses", options.limit) as running:
        if "power" in options.only:
            _measure_power(repeats, draw, running, samples["power"], lost)
        processes.adopt_orphans()  # of the sides of this machine; a cluster reaps its own
        try:
            for number in range(repeats if others else 0):
                running.step(f"round {number + 1} of {repeats}")
                for side in draw.sample(others, len(others)):
                    try:
                        samples[side].append(_trial(side, draw.uniform(0.2, 0.6)))
                    except (TimeoutError, RuntimeError, subprocess.TimeoutExpired) as error:
                        lost[side] = str(error)
                        running.tell(f"{side} was lost: {error}")
                    processes.kill_descendants()
        finally:
            processes.kill_descendants()
    document = {"machine": machine, "samples": samples, "lost": lost}
    how = f"seconds from the kill to the next attempt's first all-reduce, {repeats} rounds"
    save(options.json, document, f"{headline(machine, how)}\n\n{_table(samples)}")


def _measure_power(
    repeats: int, draw: random.Random, running: Stage, values: list[float], lost: dict[str, str]
) -> None:
    if (reason := power.why_not()) is not None:
        lost["power"] = reason
        running.tell(f"power is not measured: {reason}")
        return
    with power.cluster() as lab:
        for number in range(repeats):
            running.step(f"power: round {number + 1} of {repeats}")
            try:
                values.append(power.trial(lab, SCRIPT, draw.uniform(2, 6)))
            except (TimeoutError, RuntimeError) as error:
                lost["power"] = str(error)
                running.tell(f"power was lost: {error}")


def _trial(side: str, after_s: float) -> float:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        own = {"PYTHONPATH": str(SOURCE), "MUSTER_HOME": f"{name}/home", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*SIDES[side], "train.py"],
            cwd=folder,
            env={**os.environ, **own, "BENCH_OUT": name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            pids = {rank: _wait(folder / f"{rank}.0", process)[1] for rank in (0, 1)}
            time.sleep(after_s)
            victim = _victim(side, folder, pids)
            killed_at = time.time()
            os.kill(victim, signal.SIGKILL)
            if process.wait(_TRIAL_LIMIT_S) != 0:
                raise RuntimeError(f"it ended with {process.returncode}")
            # The last attempt: torchrun's first one after a loss may fail, too.
            return max(_read(max(folder.glob(f"{rank}.[1-9]")))[0] for rank in (0, 1)) - killed_at
        finally:
            process.kill()
            process.wait()


def _victim(side: str, folder: Path, pids: dict[int, int]) -> int:
    if side in ("worker", "torchrun"):
        return pids[1]
    node = "n1" if side == "head" else "n2"
    (record,) = folder.glob("home/runs/*/events.jsonl")
    events = [json.loads(line) for line in record.read_text().splitlines()]
    joined = [e["pid"] for e in events if e["event"] == "agent_joined" and e["node"] == node]
    return int(joined[-1])


def _wait(path: Path, process: "subprocess.Popen[bytes]") -> tuple[float, int]:
    """Return when a rank has done its first all-reduce, and its process."""
    until = time.monotonic() + _TRIAL_LIMIT_S
    while not path.exists():
        if process.poll() is not None and not path.exists():
            raise RuntimeError(f"it ended with {process.returncode} before {path.name}")
        if time.monotonic() > until:
            raise TimeoutError(f"no {path.name} within {_TRIAL_LIMIT_S:g} s")
        time.sleep(_LOOK_S)
    return _read(path)


def _read(path: Path) -> tuple[float, int]:
    at, pid = path.read_text().split()
    return float(at), int(pid)


def _table(samples: dict[str, list[float]]) -> str:
    lines = ["| killed | median | p95 | highest | trials |", "|---|---|---|---|---|"]
    for side, values in samples.items():
        if not values:
            lines.append(f"| {TITLES[side]} | lost | | | 0 |")
            continue
        p95 = statistics.quantiles(values * 2, n=20, method="inclusive")[-1]
        words = " | ".join(f"{one:.2f} s" for one in (statistics.median(values), p95, max(values)))
        lines.append(f"| {TITLES[side]} | {words} | {len(values)} |")
    return "\n".join(lines)


def _sides(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SIDES]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure what a loss costs.")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--only", type=_sides, default=list(SIDES), help=f"of {','.join(SIDES)}")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--json", type=Path, default=FOLDER / "losses.json")
    parser.add_argument("--limit", type=float, default=3000.0, help="seconds for all of it")
    return parser


if __name__ == "__main__":
    main()
