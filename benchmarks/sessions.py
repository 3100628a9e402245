"""Measure a run in a session: from the command to its first all-reduce, beside torchrun and a run without a session.

Of `muster dev` it is from the saved file to the first all-reduce of the run that follows.

    python benchmarks/sessions.py [--rounds 100] [--memory-runs 1000] [--quick] [--json FILE] [--limit SECONDS]

Two nodes with two workers each, on this machine. Every round measures every side once, in random order; torchrun and accelerate, which have no
simulated nodes here, have four workers in one. Accelerate is left out where it is not installed. The last part runs an empty script again and
again and reads the doors' proportional share of memory. `--rounds 0` and `--memory-runs 0` leave a part out: the file keeps what it has of it.
"""

import argparse
import importlib.util
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
from typing import Any, Self

from launching import processes
from running.results import FOLDER, headline, machine_facts, save
from running.stage import stage

SOURCE = Path(__file__).parents[1] / "src"
MUSTER = [sys.executable, "-m", "torchmuster"]
SHAPE = ["--nodes", "2", "--nproc-per-node", "2"]
SCRIPT = """\
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    with open(os.environ["BENCH_OUT"], "w") as file:
        file.write(repr(time.time()))
dist.destroy_process_group()
"""
SIDES = {
    "muster run --session": [*MUSTER, "run", "--session", "bench", "train.py"],
    "muster run": [*MUSTER, "run", "--here", *SHAPE, "train.py"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", "4", "train.py"),
    ],
}
if importlib.util.find_spec("accelerate") is not None:
    SIDES["accelerate launch"] = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),  # also without GPUs
        *("--num_machines", "1", "--num_processes", "4"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "train.py"),
    ]
DEV = "muster dev, from the save"
_LIMIT_S = 120.0
_LOOK_S = 0.002


def main() -> None:
    """Measure, print the table and write the file."""
    options = _parser().parse_args()
    machine = machine_facts()
    num_rounds, num_runs = (3, 10) if options.quick else (options.rounds, options.memory_runs)
    processes.adopt_orphans()
    with (
        stage("sessions", options.limit) as running,
        tempfile.TemporaryDirectory(prefix="muster-bench-") as name,
    ):
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        environment = _environment(folder)
        _run([*MUSTER, "session", "start", "--name", "bench", *SHAPE], folder, environment)
        try:
            _first_all_reduce(SIDES["muster run --session"], folder, environment)
            samples: dict[str, list[float]] = {side: [] for side in (DEV, *SIDES)}
            order = random.Random(0)
            with _Dev(folder, environment) as dev:
                for number in range(num_rounds):
                    running.step(f"round {number + 1} of {num_rounds}")
                    for side in order.sample(list(samples), len(samples)):
                        took_s = (
                            dev.save(number)
                            if side == DEV
                            else _first_all_reduce(SIDES[side], folder, environment)
                        )
                        samples[side].append(took_s)
            running.step(f"{num_runs} runs of an empty script")
            memory = _memory(num_runs, folder, environment) if num_runs else {}
            _run([*MUSTER, "session", "end", "bench"], folder, environment)
        finally:
            processes.kill_descendants()
    kept = json.loads(options.json.read_text()) if options.json.exists() else {}
    parts = {
        "machine": machine,
        "times": {"machine": machine, "samples": samples} if num_rounds else kept.get("times"),
        "memory": {"machine": machine, **memory} if num_runs else kept.get("memory"),
    }
    save(options.json, parts, "\n\n".join([*_times(parts["times"]), *_share(parts["memory"])]))


def _environment(folder: Path) -> dict[str, str]:
    own = {"PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "BENCH_OUT": str(folder / "out")}


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        sys.exit(f"{command}: {done.stderr}")


def _first_all_reduce(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    began_at = time.time()
    _run(command, folder, environment)
    return float((folder / "out").read_text()) - began_at


class _Dev:
    """`muster dev` on the session, in a folder of its own: other sides' scripts are not saved there."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._script, self._out = folder / "dev" / "train.py", Path(environment["BENCH_OUT"])
        self._script.parent.mkdir()
        self._script.write_text(SCRIPT)
        self._said = folder / "dev-said"
        self._environment = environment  # the same: imports read it, perhaps

    def __enter__(self) -> Self:
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [*MUSTER, "dev", "--session", "bench", "train.py"],
                cwd=self._script.parent,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
            )
        self._wait_for_status(1)
        return self

    def save(self, number: int) -> float:
        """Save the script; return the seconds until the first all-reduce of the run that follows."""
        written = self._script.with_suffix(".saved")
        written.write_text(f"{SCRIPT}# {number}\n")
        began_at = time.time()
        written.replace(self._script)  # as editors do
        self._wait_for_status(number + 2)
        return float(self._out.read_text()) - began_at

    def _wait_for_status(self, number: int) -> None:
        until = time.monotonic() + _LIMIT_S
        while self._said.read_text().count("waiting for a change") < number:
            if time.monotonic() > until or self._process.poll() is not None:
                sys.exit(f"muster dev: {self._said.read_text()}")
            time.sleep(_LOOK_S)

    def __exit__(self, *reason: object) -> None:
        self._process.communicate(b"q")


def _memory(num_runs: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Return each door's proportional share of memory in bytes: at first, and after each tenth of so many runs."""
    (folder / "empty.py").write_text("")
    doors = [
        json.loads(path.read_text())["pid"]
        for path in sorted(folder.glob("home/runs/*-session-bench-*/doors/*.json"))
    ]
    command = [*MUSTER, "run", "--session", "bench", "--nproc-per-node", "1", "empty.py"]
    _run(command, folder, environment)
    shares = [[processes.pss_bytes(pid) for pid in doors]]
    for number in range(num_runs):
        _run(command, folder, environment)
        if (number + 1) % max(1, num_runs // 10) == 0:
            shares.append([processes.pss_bytes(pid) for pid in doors])
    return {"runs": num_runs, "shares": shares}


def _times(times: dict[str, Any] | None) -> list[str]:
    if times is None:
        return []
    samples = times["samples"]
    base = statistics.median(samples["muster run --session"])
    num_rounds = len(samples["muster run --session"])
    how = f"seconds from the command to the first all-reduce, {num_rounds} rounds, sides in random order"
    lines = ["| | median | p95 | times the session's |", "|---|---|---|---|"]
    for side, values in samples.items():
        ordered = sorted(values)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        median = statistics.median(values)
        lines.append(f"| {side} | {median:.2f} s | {p95:.2f} s | {median / base:.1f} |")
    return [headline(times["machine"], how), "\n".join(lines)]


def _share(memory: dict[str, Any] | None) -> list[str]:
    if memory is None:
        return []
    how = f"the doors' proportional share of memory (PSS), {memory['runs']} runs of an empty script"
    rows = zip(*memory["shares"], strict=True)
    lines = ["| | at first | half way | at the end | grown |", "|---|---|---|---|---|"]
    for number, row in enumerate(rows):
        first, half, last = (row[at] / 2**20 for at in (0, len(row) // 2, -1))
        words = " | ".join(f"{one:.1f} MiB" for one in (first, half, last))
        lines.append(f"| door {number} | {words} | {last - first:+.1f} MiB |")
    return [headline(memory["machine"], how), "\n".join(lines)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--memory-runs", type=int, default=1000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=FOLDER / "sessions.json")
    parser.add_argument("--limit", type=float, default=6000.0)
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
