"""What a scheduler's job pays for muster: until the user's first line, until submitted, and in questions asked.

    python benchmarks/engines.py [--repeats 2] [--only slurm,pbs,submit,poll] [--quick] [--json FILE] [--limit SECONDS]

A real Slurm of 2 nodes in network namespaces of this machine (root, Debian's slurm-wlm) and the tests' pretended PBS;
`tests/cluster/slurm_lab.py` says why it can't touch another cluster, and refuses to start beside one.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from running.results import FOLDER, headline, machine_facts, save
from running.stage import REPOSITORY, Stage, stage

from cluster.pbs import FakePbs  # type: ignore[import-not-found]  # isort: skip
from cluster.slurm_lab import SlurmLab, why_not  # type: ignore[import-not-found]  # isort: skip
from kit.world import MACHINE_PATH  # type: ignore[import-not-found]  # isort: skip

SOURCE = REPOSITORY / "src"
NODES, WORKERS, RUNS = 2, 4, 100
LIMIT_S = 120.0
NOW = "date +%s.%N"
# Each rank's first line takes the time; torch comes behind it, as in everybody's script.
SCRIPT = """\
import time; first = time.time()
import os, torch
ready = time.time()
with open(f"{FOLDER}/rank-{os.environ['RANK']}.new", "w") as file:
    file.write(f"{first} {ready}")
os.rename(file.name, file.name[:-4])
"""
IMPORT = "import time; t = time.time(); import torch; print(time.time() - t)"
TORCHRUN = (
    "torchrun --nnodes {nodes} --nproc-per-node {workers} --rdzv-backend c10d"
    " --rdzv-endpoint $(hostname):29500 --rdzv-id $SLURM_JOB_ID {script}"
)
Readings = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of a case, once in each round.

    Attributes:
        unit: "s", "times" or "commands".
        aim: The most, or with `times` the least, that it should be; None where nothing was promised.
    """

    name: str
    unit: str
    aim: float | None = None


ROWS = (
    Row(name="slurm: srun true", unit="s"),
    Row(name="slurm: import torch, alone on a node", unit="s"),
    Row(name="slurm: muster, last rank's first line", unit="s"),
    Row(name="slurm: muster, beyond srun true", unit="s", aim=1.5),
    Row(name="slurm: muster, beyond that and the import", unit="s"),
    Row(name="slurm: muster, last rank has torch", unit="s"),
    Row(name="slurm: torchrun, last rank's first line", unit="s"),
    Row(name="slurm: torchrun, last rank has torch", unit="s"),
    Row(name="slurm: torchrun / muster, both with torch", unit="times", aim=3.0),
    Row(name="pbs: pbsdsh true", unit="s"),
    Row(name="pbs: muster, last rank's first line", unit="s"),
    Row(name="pbs: muster, beyond pbsdsh true", unit="s", aim=1.5),
    Row(name="submit: muster run --detach", unit="s"),
    Row(name="submit: sbatch's own part", unit="s"),
    Row(name="submit: muster beyond sbatch", unit="s", aim=0.5),
    Row(name=f"poll: commands for {RUNS} runs", unit="commands", aim=1.0),
)


class Bench:
    """A Slurm lab and a folder on it, with a site that writes down when its job began."""

    def __init__(self, lab: SlurmLab) -> None:
        self.lab = lab
        (lab.folder / "bin" / "sbatch").write_text(_timed("sbatch", lab.shared / "sbatch"))
        for name in ("squeue", "sacct", "scontrol"):
            (lab.folder / "bin" / name).write_text(_timed(name, lab.shared / "asked"))
        for path in (lab.folder / "bin").iterdir():
            path.chmod(0o755)

    def folder(self) -> Path:
        """Return a new folder with the script and the site."""
        path: Path = self.lab.shared / uuid.uuid4().hex
        return prepared(
            path, "slurm", f"partition = 'main'\nchunk = {{ cpus-per-task = {WORKERS} }}\n"
        )

    def muster(self, folder: Path, *words: str) -> float:
        """Run muster on the login node and return the seconds; its runs are in the folder."""
        begin = time.time()
        argv = [sys.executable, "-m", "torchmuster", *words]
        env = {"MUSTER_HOME": str(folder / "home")}
        said = self.lab.run(argv, env=env, cwd=str(folder), limit_s=LIMIT_S)
        checked(said)
        return time.time() - begin

    def batch(self, folder: Path, line: str) -> None:
        """Run a job of one line on all nodes to its end; the time before it is in `began`."""
        shape = [f"-N{NODES}", "--ntasks-per-node=1", f"--cpus-per-task={WORKERS}"]
        job = self.lab.submit(f"cd {folder}\n{NOW} > began\n{line}\n", *shape)
        state = self.lab.wait_for_job(job, "COMPLETED", "FAILED", limit_s=LIMIT_S)["JobState"]
        if state != "COMPLETED":
            raise SystemExit(f"the job {line!r} {state}:\n{self.lab.output_of(job)}")


def prepared(folder: Path, kind: str, more: str) -> Path:
    """Make a folder with the script and a site whose jobs write down when they began."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.replace("{FOLDER}", str(folder)))
    text = f"[engines.bench]\nkind = '{kind}'\nsetup = [\"{NOW} > {folder}/began\"]\n{more}"
    (folder / "muster.toml").write_text(text)
    (folder / "muster.toml").chmod(0o644)
    return folder


def _timed(name: str, log: Path) -> str:
    """Return a command in front of a scheduler's own that writes down when it began and ended."""
    real = shutil.which(name, path=MACHINE_PATH)
    return (
        f'#!/bin/bash\nb=$({NOW})\n{real} "$@"\ncode=$?\n'
        f'echo "$b $({NOW}) $*" >> {log}\nexit $code\n'
    )


def checked(said: subprocess.CompletedProcess[str]) -> None:
    """Leave with what a failed command said."""
    if said.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, said.args))}: {said.stderr}")


def ranks(folder: Path, num_ranks: int) -> tuple[float, float]:
    """Return from the job's first line to the last rank's first line, and to its torch, in seconds."""
    began = float((folder / "began").read_text())
    found = [path.read_text().split() for path in folder.glob("rank-*")]
    if len(found) != num_ranks:
        raise SystemExit(f"{len(found)} of {num_ranks} ranks wrote their times in {folder}")
    first, ready = (max(float(times[k]) for times in found) - began for k in (0, 1))
    return first, ready


def measure_floor(bench: Bench) -> Readings:
    """Measure what Slurm itself takes, and the import."""
    folder = bench.folder()
    bench.batch(folder, f"srun true\n{NOW} > ended\nsrun python -c '{IMPORT}' > imported")
    began, ended = (float((folder / name).read_text()) for name in ("began", "ended"))
    imported = max(float(line) for line in (folder / "imported").read_text().split())
    return {
        "slurm: srun true": ended - began,
        "slurm: import torch, alone on a node": imported,
    }


def measure_muster(bench: Bench) -> Readings:
    """Measure `muster run --on`."""
    folder = bench.folder()
    shape = ("--nodes", str(NODES), "--nproc-per-node", str(WORKERS))
    bench.muster(folder, "run", "--on", "bench", *shape, "train.py")
    first, ready = ranks(folder, NODES * WORKERS)
    return {
        "slurm: muster, last rank's first line": first,
        "slurm: muster, last rank has torch": ready,
    }


def measure_torchrun(bench: Bench) -> Readings:
    """Measure `srun torchrun` in a job script."""
    folder = bench.folder()
    line = TORCHRUN.format(nodes=NODES, workers=WORKERS, script=folder / "train.py")
    bench.batch(folder, f"srun {line}")
    first, ready = ranks(folder, NODES * WORKERS)
    return {
        "slurm: torchrun, last rank's first line": first,
        "slurm: torchrun, last rank has torch": ready,
    }


def measure_slurm(bench: Bench, round_index: int) -> Readings:
    """Measure all sides once, another first in each round."""
    sides: list[Callable[[Bench], Readings]] = [measure_floor, measure_muster, measure_torchrun]
    found: Readings = {}
    for k in range(len(sides)):
        found |= sides[(round_index + k) % len(sides)](bench)
    ours = "slurm: muster, last rank"
    beyond = found[f"{ours}'s first line"] - found["slurm: srun true"]
    imported = found["slurm: import torch, alone on a node"]
    ratio = found["slurm: torchrun, last rank has torch"] / found[f"{ours} has torch"]
    return found | {
        "slurm: muster, beyond srun true": beyond,
        "slurm: muster, beyond that and the import": beyond - imported,
        "slurm: torchrun / muster, both with torch": ratio,
    }


def measure_pbs(_bench: Bench, _round_index: int) -> Readings:
    """Measure `pbsdsh true` and `muster run` on the pretended PBS, whose hosts are all this machine."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        pbs = FakePbs(Path(name))
        try:
            return _on_pbs(pbs, prepared(Path(name) / "site", "pbs", ""))
        finally:
            pbs.close()


def _on_pbs(pbs: FakePbs, folder: Path) -> Readings:
    words = ("-l", f"select={NODES}:ncpus={WORKERS}:mpiprocs=1", "-l", "place=scatter")
    job = pbs.submit(f"{NOW}\npbsdsh /bin/true\n{NOW}", *words)
    pbs.wait(job)
    began, ended = (float(line) for line in pbs.output(job).split())
    environment = pbs.environment | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    environment["MUSTER_HOME"] = str(folder / "home")
    shape = ("--nodes", str(NODES), "--nproc-per-node", str(WORKERS))
    argv = [sys.executable, "-m", "torchmuster", "run", "--on", "bench", *shape, "train.py"]
    checked(
        subprocess.run(
            argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    )
    first, _ = ranks(folder, NODES * WORKERS)
    return {
        "pbs: pbsdsh true": ended - began,
        "pbs: muster, last rank's first line": first,
        "pbs: muster, beyond pbsdsh true": first - (ended - began),
    }


def measure_submit(bench: Bench, _round_index: int) -> Readings:
    """Measure from typing the command to its end, the entry into the lab left out."""
    folder, log = bench.folder(), bench.lab.shared / "sbatch"
    begin = time.time()
    bench.lab.run(["true"])
    entry_s = time.time() - begin
    log.unlink(missing_ok=True)
    took = bench.muster(folder, "run", "--on", "bench", "--detach", "--run-id", "r", "train.py")
    sbatch_began, sbatch_ended = map(float, log.read_text().split()[:2])
    bench.lab.reset()
    own = sbatch_ended - sbatch_began
    return {
        "submit: muster run --detach": took - entry_s,
        "submit: sbatch's own part": own,
        "submit: muster beyond sbatch": took - entry_s - own,
    }


def measure_poll(bench: Bench, _round_index: int) -> Readings:
    """Count the scheduler's commands of one look at many runs that wait."""
    folder, log = bench.folder(), bench.lab.shared / "asked"
    words = ("run", "--on", "bench", "--detach", "--run-id", "r0", "train.py")
    bench.muster(folder, *words)
    runs = folder / "home" / "runs"
    job = json.loads((runs / "r0" / "job.json").read_text())
    for number in range(1, RUNS):
        job["job_id"] = bench.lab.submit("true", "--hold")
        shutil.copytree(runs / "r0", runs / f"r{number}", ignore=shutil.ignore_patterns("*.tmp"))
        (runs / f"r{number}" / "job.json").write_text(json.dumps(job))
        (runs / f"r{number}" / "result.json").unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    bench.muster(folder, "ps", "--all")
    asked = len(log.read_text().splitlines())
    bench.lab.reset()
    return {f"poll: commands for {RUNS} runs": float(asked)}


CASES: dict[str, Callable[[Bench, int], Readings]] = {
    "slurm": measure_slurm,
    "pbs": measure_pbs,
    "submit": measure_submit,
    "poll": measure_poll,
}


@contextmanager
def started_lab(names: Sequence[str]) -> Iterator[Bench | None]:
    """Start the lab if a case needs it; leave with the reason where it may not."""
    if set(names) <= {"pbs"}:
        yield None
        return
    if (reason := why_not()) is not None:
        raise SystemExit(f"engines: {reason}; --only pbs needs none of it")
    with SlurmLab(NODES, cpus=WORKERS, gpus=1) as lab:
        yield Bench(lab)


def main() -> None:
    """Measure every case in turn, again and again; print medians and write all readings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="one round, and none to fill caches")
    parser.add_argument("--json", type=Path, default=FOLDER / "engines.json")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all of it")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)}")
    machine = machine_facts()
    # The first round only fills caches.
    rounds = range(1) if options.quick else range(-1, options.repeats)
    with (
        stage("engines", options.limit) as running,
        started_lab(names) as bench,
    ):
        readings = measure_all(running, bench, names, rounds)
    rows, text = table(readings)
    how = f"median (lowest..highest) of {rounds.stop} rounds; {NODES} nodes, {WORKERS} workers on each"
    document = {"machine": machine, "rows": rows}
    save(options.json, document, f"{headline(machine, how)}, all on this machine\n\n{text}")


def measure_all(
    running: Stage, bench: Bench | None, names: Sequence[str], rounds: range
) -> dict[str, list[float]]:
    """Return the readings of each row."""
    readings: dict[str, list[float]] = {row.name: [] for row in ROWS}
    for round_index in rounds:
        for name in names:
            running.step(f"round {round_index + 1} of {rounds.stop}: {name}")
            for key, value in CASES[name](bench, max(0, round_index)).items():  # type: ignore[arg-type]
                if round_index >= 0:
                    readings[key].append(value)
                    running.tell(f"  {key}: {value:.3f}")
    return readings


def table(readings: Mapping[str, Sequence[float]]) -> tuple[list[dict[str, Any]], str]:
    """Return the rows, and as Markdown."""
    lines = [f"| {'what':45} | {'median':>15} | {'range':>16} | {'aim':>8} |"]
    lines.append(f"|{'-' * 47}|{'-' * 16}:|{'-' * 17}:|{'-' * 9}:|")
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        found = readings[row.name]
        if not found:
            continue
        median = statistics.median(found)
        sign = "" if row.aim is None else "≥ " if row.unit == "times" else "≤ "
        aim = "" if row.aim is None else f"{sign}{row.aim:g}"
        value, spread = f"{median:.2f} {row.unit}", f"{min(found):7.2f}..{max(found):.2f}"
        lines.append(f"| {row.name:45} | {value:>15} | {spread} | {aim:>8} |")
        rows.append({"name": row.name, "unit": row.unit, "median": median, "all": list(found)})
    return rows, "\n".join(lines)


if __name__ == "__main__":
    os.umask(0o022)
    main()
