"""The demonstration: two simulated nodes, one worker killed half-way, and what became of it.

`make demo` runs this. It starts `muster run` as a user would, then reads the run's own records.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from torchmuster.core.files.layout import RunDir, runs_dir

WANTED_ACCURACY = 0.97
TRAIN = Path(__file__).with_name("train.py")


def main() -> int:
    run_id = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = RunDir(str(Path(runs_dir()) / run_id))
    out = Path(run_dir.path) / "snapshots"
    launch = ["--nodes", "2", "--nproc-per-node", "2", "--run-id", run_id]
    script = [
        str(TRAIN),
        "--out",
        str(out),
        "--epochs",
        "20",
        "--kill-rank",
        "3",
        "--kill-epoch",
        "10",
    ]
    print("$ muster run", *launch, *script, "\n", flush=True)
    ended = subprocess.run(
        [sys.executable, "-m", "torchmuster", "run", *launch, *script], check=False
    )
    if ended.returncode != 0:
        return ended.returncode
    result = json.loads(Path(run_dir.result).read_text())
    summary = json.loads((out / "summary.json").read_text())
    print_table(result, summary, run_dir.path)
    return 0 if is_proof(result, summary) else 1


def print_table(result: dict, summary: dict, path: str) -> None:
    rows = [
        ("attempts", f"{result['attempts']} (rank 3 killed itself with SIGKILL in the first)"),
        ("seconds lost", f"{result['lost_s']:.2f} from the death to all workers started again"),
        ("steps per second", f"{summary['steps_per_second']:.0f} over both attempts"),
        ("steps", f"{summary['steps']}, of which {summary['steps_redone']} were redone"),
        ("samples seen", f"{summary['samples_seen']}, of which {summary['samples_redone']} again"),
        ("test accuracy", f"{summary['test_accuracy']:.2%}"),
        ("run directory", path),
    ]
    print()
    for name, value in rows:
        print(f"  {name:<18}{value}")


def is_proof(result: dict, summary: dict) -> bool:
    """Say whether the kill happened, the run recovered, and the network learned."""
    if result["attempts"] != 2:
        print(f"\nerror: expected 2 attempts, there were {result['attempts']}", file=sys.stderr)
        return False
    if summary["test_accuracy"] < WANTED_ACCURACY:
        print(f"\nerror: the accuracy is below {WANTED_ACCURACY:.0%}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
