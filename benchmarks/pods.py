"""What pods pay for muster: from the start of the last one to the first all-reduce, and what a client asks and costs meanwhile.

    python benchmarks/pods.py [--repeats 5] [--only together,late,client] [--quick] [--json FILE] [--limit SECONDS]

The pods are process trees of this machine with networks, host names and disks of their own (`tests/places/pods.py`, root): no
Kubernetes, so that what its kubelets take is left out. The client follows such a run with the tests' kubectl, which counts its calls.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from running.results import FOLDER, headline, machine_facts, save
from running.stage import REPOSITORY, Stage, stage

from cluster.netns import Nodes  # type: ignore[import-not-found]  # isort: skip
from kit.namespaces import why_no_networks  # type: ignore[import-not-found]  # isort: skip
from kit.waiting import wait_until  # type: ignore[import-not-found]  # isort: skip
from places.pods import PORT, PodWorld  # type: ignore[import-not-found]  # isort: skip
from torchmuster.core.proc import descendants  # isort: skip
from torchmuster.core.spec.launch import RunRequest, plan_run  # isort: skip
from torchmuster.core.spec.problems import Problems  # isort: skip

PODS = 2
LIMIT_S = 90.0
# Each rank writes down when it is where.
SCRIPT = """\
import time; times = [time.time()]
import os, torch
times.append(time.time())
import torch.distributed as dist
dist.init_process_group("gloo")
times.append(time.time())
dist.all_reduce(torch.ones(1))
times.append(time.time())
with open(f"{FOLDER}/rank-{os.environ['RANK']}.new", "w") as file:
    file.write(" ".join(map(str, times)))
os.rename(file.name, file.name[:-4])
while os.path.exists(f"{FOLDER}/hold"):
    time.sleep(0.1)
"""
FOLLOW = """\
import asyncio, sys
from torchmuster.core.files.layout import RunDir
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.launcher.jobs.batch import JobFollower
from torchmuster.launcher.jobs.jobs import read_job
from torchmuster.core.owner.record import read_plan
run_dir, voice = RunDir(sys.argv[1]), TerminalVoice()
voice.start()
follower = JobFollower(read_plan(run_dir), run_dir, *read_job(run_dir), voice)
asyncio.run(follower.follow())
"""
FOLLOWED_S, EVENTS = 60.0, 5000
IMPORT = "import time; t = time.time(); import torch, torch.distributed; print(time.time() - t)"
Readings = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of a case, once in each round; `aim` is the most that it should be, where something was promised."""

    name: str
    unit: str = "s"
    aim: float | None = None


def _rows(case: str) -> tuple[Row, ...]:
    return (
        Row(name=f"{case}: a rank's first line"),
        Row(name=f"{case}: all ranks have torch"),
        Row(name=f"{case}: process group"),
        Row(name=f"{case}: first all-reduce"),
        Row(name=f"{case}: beyond the import of torch", aim=0.5),
    )


ROWS = (
    Row(name="import torch, one process"),
    Row(name=f"import torch, {PODS} processes at once"),
    *_rows("together"),
    *_rows("late"),
    Row(name="client: processor, of one core", unit="%", aim=1.0),
    Row(name=f"client: questions in {FOLLOWED_S:.0f} s", unit="calls", aim=FOLLOWED_S / 10),
)


def measure_import() -> Readings:
    """Measure the import alone: once, and as often at the same time as there are pods."""
    return {
        "import torch, one process": _import_s(1),
        f"import torch, {PODS} processes at once": _import_s(PODS),
    }


def _import_s(num: int) -> float:
    """Return the seconds from the start of so many interpreters to the last one's end of its import."""
    argv = [sys.executable, "-c", IMPORT]
    began = time.time()
    children = [subprocess.Popen(argv, stdout=subprocess.DEVNULL) for _ in range(num)]
    if any(child.wait(LIMIT_S) for child in children):
        raise SystemExit("torch can't be imported")
    return time.time() - began


def measure_together(nodes: Nodes) -> Readings:
    """Measure pods that start at the same time."""
    return _measured(nodes, "together", lambda _: None)


def measure_late(nodes: Nodes) -> Readings:
    """Measure a pod for which the others have waited, which have nothing left to do then."""
    return _measured(nodes, "late", _wait_idle)


def _wait_idle(world: PodWorld) -> None:
    wait_until(lambda: "waiting for pods" in world.log(0), "the first pod's word", LIMIT_S)
    time.sleep(3.0)  # what it does beforehand


def _measured(nodes: Nodes, case: str, before_last: Callable[[PodWorld], None]) -> Readings:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        world = _world(nodes, Path(name))
        try:
            for index in range(PODS - 1):
                world.start(index)
            before_last(world)
            began = time.time()
            world.start(PODS - 1)
            world.know(**{f"p{index}": index + 1 for index in range(PODS)})
            if world.wait(0, LIMIT_S) != 0:
                raise SystemExit(f"the run in pods failed:\n{world.log(0)}")
        finally:
            world.close()
        found = [path.read_text().split() for path in Path(name).glob("rank-*")]
    if len(found) != PODS:
        raise SystemExit(f"{len(found)} of {PODS} ranks wrote their times")
    marks = [max(float(times[k]) for times in found) - began for k in range(4)]
    names = ("a rank's first line", "all ranks have torch", "process group", "first all-reduce")
    return {f"{case}: {what}": mark for what, mark in zip(names, marks, strict=True)}


def measure_client(nodes: Nodes) -> Readings:
    """Measure a client that follows a run with a long record in which nothing happens: it, and the processes that it keeps."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        (folder / "hold").touch()
        world = _world(nodes, folder)
        try:
            for index in range(PODS):
                world.start(index)
            world.know(**{f"p{index}": index + 1 for index in range(PODS)})
            wait_until(lambda: len(list(folder.glob("rank-*"))) == PODS, "the training", LIMIT_S)
            line = Path(world.run_dir(0).events).read_text().splitlines()[0]
            with open(world.run_dir(0).events, "a") as record:
                record.write(f"{line}\n" * EVENTS)
            return _followed(nodes, world, folder)
        finally:
            world.close()


def _followed(nodes: Nodes, world: PodWorld, folder: Path) -> Readings:
    case = folder / "case.json"
    case.write_text(json.dumps({"pods": "job-pods-running", "forward": PORT}))
    case.with_suffix(".made").write_text(world.job)
    job = {"engine": "kubernetes", "job_id": f"lab/research/{world.job}"}
    Path(world.client.job).write_text(json.dumps(job))
    fakes = REPOSITORY / "tests" / "fakes" / "kubernetes"
    environment = os.environ | {
        "PATH": f"{fakes}:{os.environ['PATH']}",
        "FAKE_KUBECTL": str(case),
        "PYTHONPATH": str(REPOSITORY / "src"),
    }
    argv = nodes.argv(1, [sys.executable, "-c", FOLLOW, world.client.path])
    with open(folder / "client.log", "wb") as log:
        client = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
    try:
        copied = Path(world.client.events)
        wait_until(
            lambda: copied.exists() and "attempt_started" in copied.read_text(), "the copy", LIMIT_S
        )
        time.sleep(5.0)
        asked = Path(f"{case}.log")
        num, used, began = len(asked.read_text().splitlines()), _used_s(client.pid), time.time()
        time.sleep(FOLLOWED_S)
        share = (_used_s(client.pid) - used) / (time.time() - began)
        questions = len(asked.read_text().splitlines()) - num
    finally:
        client.kill()
        client.wait(LIMIT_S)
    return {
        "client: processor, of one core": 100 * share,
        f"client: questions in {FOLLOWED_S:.0f} s": float(questions),
    }


def _used_s(root: int) -> float:
    """Return the seconds of processor time of a process and those below it; who has asked and ended is the cluster's."""
    ticks = 0
    for pid in (root, *descendants(root)):
        with open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _world(nodes: Nodes, folder: Path) -> PodWorld:
    code = folder / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT.replace("{FOLDER}", str(folder)))
    os.environ["MUSTER_HOME"] = str(folder / "home")
    request = RunRequest(script="train.py", nodes=str(PODS), nproc_per_node="1", cwd=str(code))
    problems = Problems()
    plan = problems.checked(plan_run(request, "r", (), problems))
    world = PodWorld(nodes, folder, plan, num_pods=PODS)
    world.know(p0=1)
    return world


CASES: dict[str, Callable[[Nodes], Readings]] = {
    "together": measure_together,
    "late": measure_late,
    "client": measure_client,
}


def measure_round(nodes: Nodes, running: Stage, names: Sequence[str]) -> Readings:
    """Return the readings of all cases once."""
    found: Readings = {}
    if {*names} & {"together", "late"}:
        running.step("import torch")
        found |= measure_import()
    for name in names:
        running.step(name)
        found |= CASES[name](nodes)
        if (all_reduce := found.get(f"{name}: first all-reduce")) is not None:
            # Pods that start together import together.
            num = f"{PODS} processes at once" if name == "together" else "one process"
            beyond = all_reduce - found[f"import torch, {num}"]
            found[f"{name}: beyond the import of torch"] = beyond
    return found


def main() -> None:
    """Measure every case in turn, again and again; print medians and write all readings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="one round, and none to fill caches")
    parser.add_argument("--json", type=Path, default=FOLDER / "pods.json")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all of it")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)}")
    if (reason := why_no_networks()) is not None:
        raise SystemExit(f"pods: {reason}")
    machine = machine_facts()
    # The first round only fills caches.
    rounds = range(1) if options.quick else range(-1, options.repeats)
    readings: dict[str, list[float]] = {row.name: [] for row in ROWS}
    with stage("pods", options.limit) as running, Nodes(PODS) as nodes:
        for number in rounds:
            for key, value in measure_round(nodes, running, names).items():
                if number >= 0:
                    readings[key].append(value)
                    running.tell(f"  {key}: {value:.3f}")
    rows, text = table(readings)
    how = f"median (lowest..highest) of {rounds.stop} rounds; {PODS} pods, a worker in each, all on this machine"
    document = {"machine": machine, "rows": rows}
    save(options.json, document, f"{headline(machine, how)}\n\n{text}")


def table(readings: Mapping[str, Sequence[float]]) -> tuple[list[dict[str, Any]], str]:
    """Return the rows, and as Markdown."""
    lines = [f"| {'what':45} | {'median':>12} | {'range':>16} | {'aim':>8} |"]
    lines.append(f"|{'-' * 47}|{'-' * 13}:|{'-' * 17}:|{'-' * 9}:|")
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        if not (found := readings[row.name]):
            continue
        median = statistics.median(found)
        aim = "" if row.aim is None else f"≤ {row.aim:g}"
        value, spread = f"{median:.2f} {row.unit}", f"{min(found):7.2f}..{max(found):.2f}"
        lines.append(f"| {row.name:45} | {value:>12} | {spread:>16} | {aim:>8} |")
        rows.append({"name": row.name, "unit": row.unit, "median": median, "all": list(found)})
    return rows, "\n".join(lines)


if __name__ == "__main__":
    os.umask(0o022)
    main()
