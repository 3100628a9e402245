"""How fast `muster explain` reads: one training log of 1 GB, the logs of 512 ranks, and lines that never come twice.

    python benchmarks/explain.py [--repeats 3] [--only one,ranks,text] [--size-gb 1.0] [--ranks 512] [--json FILE]

The logs are written to a temporary folder: mostly progress lines, some progress bars, warnings and free text, and at the
end a failure that has to be found. Each reading is a fresh process, so that its memory is its own.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).parents[1] / "src")
RESULTS = Path(__file__).with_name("results") / "explain.json"
ERROR = """Traceback (most recent call last):
  File "/home/u/train.py", line 9, in <module>
    main()
ValueError: bad label 7
"""
PEER = """Traceback (most recent call last):
  File "/home/u/train.py", line 9, in <module>
    main()
RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:197.
"""
WORDS = [
    "the",
    "model",
    "sees",
    "a",
    "prompt",
    "and",
    "answers",
    "with",
    "words",
    "that",
    "nobody",
    "has",
    "written",
    "before",
    "today",
]


def block(seed: int) -> str:
    """Return about 1 MB of a training log."""
    dice = random.Random(seed)
    lines = []
    for step in range(11_000):
        kind = dice.random()
        if kind < 0.9:
            lines.append(
                f"2026-01-01 10:{step // 60 % 60:02d}:{step % 60:02d},{step % 1000:03d} INFO trainer"
                f" epoch {seed} step {step} loss {dice.random():.5f} lr {dice.random():.6f} 41.2k tok/s"
            )
        elif kind < 0.97:
            percent = step % 100
            lines.append(
                f"\rEpoch {seed}: {percent:3d}%|{'#' * (percent // 5)}| {step}/11000 [00:12<00:33]"
            )
        elif kind < 0.99:
            lines.append(f"sample {step}: {' '.join(dice.choices(WORDS, k=14))}")
        else:
            lines.append(
                "UserWarning: the given array is not writable, and torch does not support it"
            )
    return "\n".join(lines) + "\n"


def write_one(folder: Path, size_bytes: int, num_ranks: int) -> None:
    """Write one long log that ends with an exception."""
    del num_ranks
    fill(folder / "train.log", [block(seed).encode() for seed in range(8)], size_bytes, ERROR)


def write_ranks(folder: Path, size_bytes: int, num_ranks: int) -> None:
    """Write the log of each rank: one raised, the others lost their peer."""
    text = block(0).encode()
    for rank in range(num_ranks):
        end = ERROR if rank == num_ranks // 7 else PEER
        fill(folder / f"rank-{rank}.log", [text], size_bytes // num_ranks, end)


def write_text(folder: Path, size_bytes: int, num_ranks: int) -> None:
    """Write a log of free text, in which no line has the shape of another."""
    del num_ranks
    dice = random.Random(1)
    letters = "abcdeghkmpqsuvwz"

    def line() -> str:
        return " ".join("".join(dice.choices(letters, k=6)) for _ in range(14))

    blocks = ["".join(f"{line()}\n" for _ in range(10_000)).encode() for _ in range(24)]
    fill(folder / "text.log", blocks, size_bytes, ERROR)


def fill(path: Path, blocks: Sequence[bytes], size_bytes: int, end: str) -> None:
    """Write blocks in turn until a log has its size, then its end."""
    with open(path, "wb") as file:
        number = 0
        while file.tell() < size_bytes:
            file.write(blocks[number % len(blocks)][: size_bytes - file.tell()])
            number += 1
        file.write(b"\n" + end.encode())


def measure(path: Path) -> None:
    """Explain in this process, and print the result as JSON."""
    sys.path.insert(0, SOURCE)
    from torchmuster.doctor.explain.case import Case
    from torchmuster.doctor.explain.judge import judge
    from torchmuster.doctor.explain.scan import read_logs

    began, cpu = time.monotonic(), time.process_time()
    record = read_logs([str(path)], year=2026)
    verdict = judge(Case(record))
    wall_s = time.monotonic() - began
    used_s = time.process_time() - cpu
    size_bytes = sum(log.num_bytes for log in record.logs)
    found = verdict.first.sentence if verdict.first else "nothing"
    values = {
        "size_mb": round(size_bytes / 1e6, 1),
        "num_lines": record.num_lines,
        "cpu_s": round(used_s, 2),
        "wall_s": round(wall_s, 2),
        "mb_per_cpu_s": round(size_bytes / 1e6 / used_s, 1),
        "max_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "found": found,
    }
    print(json.dumps(values))


CASES: dict[str, tuple[str, float, Callable[[Path, int, int], None]]] = {
    "one": ("one log", 50.0, write_one),
    "ranks": ("a log for each rank", 25.0, write_ranks),
    "text": ("free text", 0.0, write_text),
}


def explain(path: Path) -> dict[str, Any]:
    """Return what one reading took, in a fresh process."""
    words = [sys.executable, __file__, "--measure", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=dict(os.environ))
    found: dict[str, Any] = json.loads(done.stdout)
    if "bad label 7" not in found["found"]:
        raise SystemExit(f"{path}: the cause was not found: {found['found']}")
    return found


def main() -> None:
    """Write the logs, explain them in turn, print the table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--size-gb", type=float, default=1.0, help="of each case; 1 if not given")
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        measure(given.measure)
        return
    names = given.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)}")
    readings: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="muster-explain-") as top:
        for name in names:
            (folder := Path(top, name)).mkdir()
            CASES[name][2](folder, int(given.size_gb * 1e9), given.ranks)
        for round_index in range(given.repeats):
            for name in names:
                readings[name].append(explain(Path(top, name)))
                print(f"round {round_index + 1}: {name}: {readings[name][-1]}", file=sys.stderr)
    report(given.json, readings, given.ranks)


def report(path: Path, readings: Mapping[str, Sequence[Mapping[str, Any]]], num_ranks: int) -> None:
    """Print the table, medians (lowest..highest), and write the file."""
    from launching.report import machine_facts

    machine = machine_facts()
    print(f"{', '.join(f'{key} {value}' for key, value in machine.items())}; {num_ranks} ranks\n")
    print(
        "| what                | MB   | lines      | MB/s of CPU | range        | wall    | RSS     | aim   |"
    )
    print(
        "|---------------------|-----:|-----------:|------------:|-------------:|--------:|--------:|------:|"
    )
    for name, found in readings.items():
        what, aim, _ = CASES[name]
        speeds = [one["mb_per_cpu_s"] for one in found]
        wall = statistics.median(one["wall_s"] for one in found)
        rss = max(one["max_rss_mib"] for one in found)
        spread = f"{min(speeds):.1f}..{max(speeds):.1f}"
        size, lines = found[0]["size_mb"], found[0]["num_lines"]
        print(
            f"| {what:19} | {size:4.0f} | {lines:10,} | {statistics.median(speeds):11.1f} | {spread:>12} |"
            f" {wall:5.1f} s | {rss:3.0f} MiB | {f'≥ {aim:g}' if aim else '':>5} |"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "machine": dict(machine),
        "cases": {key: list(all_) for key, all_ in readings.items()},
    }
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
