"""How fast `muster explain` reads: a training log of 1 GB, and the logs of 512 ranks; memory as the kernel counts it.

    python benchmarks/explain.py [--size-gb 1.0] [--ranks 512]

The logs are written to a temporary folder first: mostly progress lines, some progress bars, warnings and free text, and
at the end a failure that has to be found. Speed is in megabytes per second of CPU time of one process.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = str(Path(__file__).parents[1] / "src")
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


def write_one(path: Path, size_bytes: int) -> None:
    """Write one long log that ends with an exception."""
    blocks = [block(seed).encode() for seed in range(8)]
    with open(path, "wb") as file:
        number = 0
        while file.tell() < size_bytes:
            file.write(blocks[number % len(blocks)])
            number += 1
        file.write(ERROR.encode())


def write_many(folder: Path, num_ranks: int) -> None:
    """Write the log of each rank: one raised, the others lost their peer."""
    text = block(0)[:200_000]
    for rank in range(num_ranks):
        (folder / f"rank-{rank}.log").write_text(text + (ERROR if rank == 77 else PEER))


def measure(path: Path) -> None:
    """Explain in this process, and print the result as JSON."""
    sys.path.insert(0, SOURCE)
    from torchmuster.doctor.explain.case import Case
    from torchmuster.doctor.explain.judge import judge
    from torchmuster.doctor.explain.scan import read_logs

    began, cpu = time.monotonic(), time.process_time()
    record = read_logs([str(path)], year=2026)
    verdict = judge(Case(record))
    used_s = time.process_time() - cpu
    size_bytes = sum(log.num_bytes for log in record.logs)
    found = verdict.first.sentence if verdict.first else "nothing"
    values = {
        "size_mb": round(size_bytes / 1e6, 1),
        "cpu_s": round(used_s, 2),
        "wall_s": round(time.monotonic() - began, 2),
        "mb_per_cpu_s": round(size_bytes / 1e6 / used_s, 1),
        "max_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "found": found,
    }
    print(json.dumps(values))


def explain(path: Path) -> None:
    """Measure in a fresh process, so that its memory is its own."""
    words = [sys.executable, __file__, "--measure", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=dict(os.environ))
    print(f"{path.name}: {done.stdout.strip()}")


def main() -> None:
    """Write the logs, explain them, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--measure", type=Path)
    given = parser.parse_args()
    if given.measure is not None:
        measure(given.measure)
        return
    with tempfile.TemporaryDirectory(prefix="muster-explain-") as name:
        folder = Path(name)
        write_one(folder / "train.log", int(given.size_gb * 1e9))
        explain(folder / "train.log")
        (folder / "train.log").unlink()
        (folder / "ranks").mkdir()
        write_many(folder / "ranks", given.ranks)
        explain(folder / "ranks")


if __name__ == "__main__":
    main()
