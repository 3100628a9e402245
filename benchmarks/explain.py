"""How fast `muster explain` reads: one training log of 1 GB, the logs of 512 ranks, and lines that never come twice.

    python benchmarks/explain.py [--repeats 1] [--only one,ranks,text] [--size-gb 1.0] [--ranks 512] [--quick]
                                 [--json FILE] [--limit SECONDS]

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

from launching.report import aligned
from running.results import FOLDER, headline, machine_facts, save
from running.stage import REPOSITORY, Stage, stage

SOURCE = str(REPOSITORY / "src")
QUICK_GB, QUICK_RANKS = 0.002, 4
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
    from torchmuster.diagnose.explain.case import Case
    from torchmuster.diagnose.explain.judge import judge
    from torchmuster.diagnose.logs import read_logs

    began, cpu = time.monotonic(), time.process_time()
    record = read_logs([str(path)], year=2026)
    verdict = judge(Case(record))
    wall_s = time.monotonic() - began
    used_s = time.process_time() - cpu
    size_bytes = sum(log.num_bytes for log in record.logs)
    found = verdict.first.error if verdict.first else "nothing"
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
    done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ))
    if done.returncode != 0:
        raise SystemExit(
            f"{path.name}: explain ended with exit code {done.returncode}:\n{done.stderr[-2000:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    if "bad label 7" not in found["found"]:
        raise SystemExit(f"{path}: the cause was not found: {found['found']}")
    return found


def main() -> None:
    """Write the logs, explain them in turn, print the table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--size-gb", type=float, default=1.0, help="of each case; 1 if not given")
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="one round of small logs")
    parser.add_argument("--json", type=Path, default=FOLDER / "explain.json")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all of it")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        measure(given.measure)
        return
    names = given.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)}")
    size_gb, num_ranks, repeats = given.size_gb, given.ranks, given.repeats
    if given.quick:
        size_gb, num_ranks, repeats = QUICK_GB, QUICK_RANKS, 1
    machine = machine_facts()
    with stage("explain", given.limit) as running:
        readings = measure_all(running, names, int(size_gb * 1e9), num_ranks, repeats)
    head = headline(machine, f"{num_ranks} ranks, median (lowest..highest) of {repeats} rounds")
    save(given.json, {"machine": machine, "cases": readings}, f"{head}\n\n{table(readings)}")


def measure_all(
    running: Stage, names: Sequence[str], size_bytes: int, num_ranks: int, repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Write the logs of each case and explain them again and again; one case's lie on the disk at a time."""
    readings: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="muster-explain-") as top:
            running.step(f"{name}: writing {size_bytes / 1e9:g} GB")
            CASES[name][2](Path(top), size_bytes, num_ranks)
            for number in range(repeats):
                running.step(f"{name}: round {number + 1} of {repeats}")
                readings.setdefault(name, []).append(explain(Path(top)))
                running.tell(f"  {readings[name][-1]}")
    return readings


def table(readings: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the rows as Markdown."""
    rows = [
        ["what", "MB", "lines", "MB/s of CPU", "range", "wall", "RSS", "aim"],
    ]
    for name, found in readings.items():
        what, aim, _ = CASES[name]
        speeds = [one["mb_per_cpu_s"] for one in found]
        rows.append(
            [
                what,
                f"{found[0]['size_mb']:.0f}",
                f"{found[0]['num_lines']:,}",
                f"{statistics.median(speeds):.1f}",
                f"{min(speeds):.1f}..{max(speeds):.1f}",
                f"{statistics.median(one['wall_s'] for one in found):.1f} s",
                f"{max(one['max_rss_mib'] for one in found):.0f} MiB",
                f"≥ {aim:g}" if aim else "",
            ]
        )
    return aligned(rows)


if __name__ == "__main__":
    main()
