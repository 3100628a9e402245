"""How the cost of looking grows with what there is: lines of training, attempts of thousands of ranks, runs, logs, files of a data set.

    python benchmarks/scale.py [--only training,attempts,runs,logs,files] [--most SIZE] [--quick] [--json FILE]

Records are written as rank 0 and the head write them. Of each command: its wall time, its processor time and the most memory that it
had; `again` is the second look, which finds what the first has folded. `growth` is the exponent between the two largest sizes: 1.0 is
linear.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launching.report import aligned
from running.results import headline, machine_facts, save
from running.stage import Stage, stage
from torchmuster.core.files.layout import RunDir
from torchmuster.core.head.attempt import EndReports
from torchmuster.core.model import events
from torchmuster.core.model.codec import event_line
from torchmuster.core.model.events import RecordEvent, fields_of
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.states import RunState

from kit.records import make_run, result  # type: ignore[import-not-found]  # isort: skip

RANKS, PER_NODE = 4096, 8
_AT = "2027-01-15T08:%02d:%02d.%03dZ"
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Axis:
    """What grows.

    Attributes:
        sizes: How much of it.
        make: Makes a home with so much of it, and returns how many bytes of records there are.
        commands: By the word of the table.
    """

    name: str
    sizes: Sequence[int]
    make: Callable[[Path, int], int]
    commands: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Look:
    """What a command has cost."""

    wall_s: float
    cpu_s: float
    mib: float


def main() -> int:
    """Measure, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="training,attempts,runs,logs,files", metavar="LIST")
    parser.add_argument("--most", type=int, default=10_000_000, metavar="SIZE")
    parser.add_argument("--quick", action="store_true", help="the two smallest sizes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    machine, rows = machine_facts(), []
    readings: list[dict[str, Any]] = []
    with stage("scale", _LIMIT_S * 10) as place:
        for axis in (one for one in AXES if one.name in args.only.split(",")):
            sizes = axis.sizes[:2] if args.quick else [n for n in axis.sizes if n <= args.most]
            rows += _measure(place, axis, sizes, readings)
    table = aligned([["", "size", "record", "wall", "processor", "memory", "growth"], *rows])
    text = f"{headline(machine, f'{RANKS} ranks an attempt')}\n\n{table}"
    if args.json:
        save(args.json, {"machine": machine, "rows": readings}, text)
    else:
        print(text)
    return 0


def _measure(
    place: Stage, axis: Axis, sizes: Sequence[int], readings: list[dict[str, Any]]
) -> list[list[str]]:
    before: dict[str, tuple[int, Look]] = {}
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="muster-scale-") as folder:
            place.step(f"{axis.name}: {size:,}")
            num_bytes = axis.make(Path(folder), size)
            for name, words in axis.commands.items():
                look = _run(words, Path(folder))
                growth = ""
                if name in before and size > before[name][0]:
                    least = max(before[name][1].cpu_s, 1e-9)
                    by = math.log(size / before[name][0])
                    growth = f"{math.log(max(look.cpu_s, 1e-9) / least) / by:.1f}"
                before[name] = size, look
                readings.append({"axis": axis.name, "size": size, "command": name} | _plain(look))
                rows.append(
                    [
                        f"{axis.name}: {name}",
                        f"{size:,}",
                        f"{num_bytes / 2**20:.1f} MiB",
                        f"{look.wall_s:.2f} s",
                        f"{look.cpu_s:.2f} s",
                        f"{look.mib:.0f} MiB",
                        growth,
                    ]
                )
    return rows


def _plain(look: Look) -> dict[str, float]:
    return {"wall_s": look.wall_s, "cpu_s": look.cpu_s, "mib": look.mib}


def _run(words: Sequence[str], home: Path) -> Look:
    """Run a command of muster in a home, and return what it has cost.

    Raises:
        RuntimeError: It has failed, other than by telling of a failure.
    """
    env = {**os.environ, "MUSTER_HOME": str(home), "MUSTER_ON": "local", "COLUMNS": "100"}
    began = time.monotonic()
    with tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            [sys.executable, "-m", "torchmuster", *words],
            env=env,
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        err.seek(0)
        said = err.read().decode(errors="replace")
    if child.returncode not in (0, 1) or "Traceback" in said:
        raise RuntimeError(f"muster {' '.join(words)} ended with {child.returncode}: {said[-500:]}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Look(time.monotonic() - began, cpu_s, usage.ru_maxrss / 1024)


# What is looked at.


def _make_run(home: Path, name: str = "20270115-080000-train-3f2a", nodes: int = 2) -> RunDir:
    failed = result(RunState.FAILED, "exit code 1 in rank 0 on n1", exit_code=1)
    size = {"run_id": name, "min_nodes": nodes, "max_nodes": nodes}
    made: RunDir = make_run(home / "runs" / name, events=(), training=None, ended=failed, **size)
    return made


def _time(number: int) -> str:
    return _AT % (number // 60000 % 60, number // 1000 % 60, number % 1000)


def make_training(home: Path, lines: int) -> int:
    """Make a run with so many lines of metrics, as `log_every=1` leaves them; it has failed."""
    run_dir = _make_run(home)
    _record(run_dir, _attempts(1, ranks=4))
    with open(run_dir.training, "w") as file:
        start = {"world_size": 4, "folder": run_dir.snapshots, "step": 0}
        file.write(event_line(_time(0), "resumed", start))
        for step in range(1, lines):
            values = {"loss": 1.0 / step, "accuracy": 0.5}
            file.write(event_line(_time(step), "metrics", {"step": step, "values": values}))
    return os.path.getsize(run_dir.training)


def make_attempts(home: Path, attempts: int) -> int:
    """Make a run with so many attempts of thousands of ranks, each ended by the kill of one of them."""
    run_dir = _make_run(home, nodes=RANKS // PER_NODE)
    _record(run_dir, _attempts(attempts, ranks=RANKS))
    return os.path.getsize(run_dir.events)


def make_runs(home: Path, runs: int) -> int:
    """Make a home with so many runs that have ended."""
    total = 0
    for number in range(runs):
        day, second = divmod(number, 86400)
        name = f"202701{day % 28 + 1:02}-{second:06}-train-{number % 65536:04x}"
        run_dir = _make_run(home, name)
        _record(run_dir, _attempts(2, ranks=4))
        total += os.path.getsize(run_dir.events)
    return total


def make_logs(home: Path, logs: int) -> int:
    """Make a folder with a log of 10 KB of each of so many ranks, one of which has failed."""
    folder = home / "logs"
    folder.mkdir()
    total = 0
    for rank in range(logs):
        lines = [
            f"[rank {rank}] {_time(step * 1000)} INFO step {step} loss {2 / (step + 1):.4f} tok/s {1000 + step}"
            for step in range(120)
        ]
        if rank == logs // 2:
            lines += [
                "Traceback (most recent call last):",
                '  File "train.py", line 10, in <module>',
            ]
            lines += [
                "    main()",
                "RuntimeError: CUDA error: an illegal memory access was encountered",
            ]
        total += (folder / f"rank-{rank}.log").write_text("\n".join(lines) + "\n")
    return total


def make_files(home: Path, files: int) -> int:
    """Make a folder with so many files of 0.3 kB."""
    for number in range(files):
        path = home / "set" / f"{number // 1000:03}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 300 + str(number))
    return 300 * files


def _record(run_dir: RunDir, told: Iterator[RecordEvent]) -> None:
    with open(run_dir.events, "w") as file:
        file.writelines(
            event_line(_time(number), event.name, fields_of(event))
            for number, event in enumerate(told)
        )


def _attempts(count: int, ranks: int) -> Iterator[RecordEvent]:
    """Yield what a head writes of attempts in which a worker is killed, and all others with it."""
    yield events.RunStartedEvent(run_id="r")
    for number in range(count):
        yield events.AttemptStartedEvent(
            attempt=number,
            world_size=ranks,
            num_nodes=-(-ranks // PER_NODE),
            why="start" if not number else "after SIGKILL",
            master="10.0.0.1:29500",
            nodes=tuple(
                events.AttemptNode(
                    node=f"node{n:04}", host=f"node{n:04}", ranks=f"{8 * n}-{8 * n + 7}"
                )
                for n in range(min(64, -(-ranks // PER_NODE)))
            ),
        )
        yield events.WorkersStartedEvent(attempt=number, restart_s=0.5)
        ends = EndReports()
        for rank in range(ranks):
            end = _end(number, rank, asked=rank != 3)
            if (told := ends.take(end)) is not None:
                yield told
        yield from ends.rest()
        yield events.AttemptFailedEvent(
            attempt=number,
            what="SIGKILL in rank 3 on node0000",
            cause=_end(number, 3, asked=False),
            restarts_left=count - number - 1,
        )


def _end(attempt: int, rank: int, *, asked: bool) -> WorkerEnd:
    return WorkerEnd(
        attempt=attempt,
        rank=rank,
        local_rank=rank % PER_NODE,
        node=f"node{rank // PER_NODE:04}",
        kind=EndKind.SIGNAL,
        asked=asked,
        elapsed_s=1234.5,
        signum=9,
        tail=("step 100",) * 20 if not asked else (),
    )


_VIEWS = {
    "status": ["status", "last"],
    "status again": ["status", "last"],
    "top": ["top", "--once", "last"],
    "explain": ["explain", "last"],
    "report": ["report", "last", "-o", "report.html"],
}
_UPLOAD = ["dataset", "upload", "set", "./set"]
AXES = (
    Axis("training", (10_000, 100_000, 1_000_000, 10_000_000), make_training, _VIEWS),
    Axis("attempts", (1, 10, 100, 1_000), make_attempts, _VIEWS),
    Axis(
        "runs",
        (10, 100, 1_000, 10_000),
        make_runs,
        {"ps": ["ps"], "ps again": ["ps"], "status": ["status", "last"]},
    ),
    Axis("logs", (64, 512, 4_096), make_logs, {"explain": ["explain", "logs"]}),
    Axis(
        "files",
        (100, 1_000, 10_000, 100_000),
        make_files,
        {"upload": _UPLOAD, "upload again": _UPLOAD, "upload, third time": _UPLOAD},
    ),
)

if __name__ == "__main__":
    sys.exit(main())
