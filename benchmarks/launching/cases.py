"""What is measured: every case lists the trials of one round, with all sides in turn."""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from launching import processes
from launching.job import LostError, Stamp, scratch_folder, started, time_command
from launching.sides import COMMON_ENVIRONMENT, Shape, Side, help_command, side_environment

FLOOR = "floor"
# Without the end of the interpreter, since a start is over before its workers end.
IMPORT_TORCH = "import os, torch; os._exit(0)"
MEBIBYTE = 2**20
# As the scripts `PACKAGE_worker.py` begin.
_FIRST = {
    "transformers": "from transformers import AutoModelForCausalLM, Trainer",
    "lightning": "import lightning",
    "accelerate": "from accelerate import Accelerator",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a number says; its unit is `s`, `ms`, `MiB`, `%` of one core, or none for a count."""

    case: str
    name: str
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of one side.

    Attributes:
        side: Its name, or `FLOOR` for what no launcher can be faster than.
        measure: Returns one value for each metric, or raises LostError.
    """

    side: str
    metrics: tuple[Metric, ...]
    measure: Callable[[], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One table of the report.

    Attributes:
        trials: From the sides, in the order of their turns, to the trials of one round.
        max_rounds: For what hardly differs from round to round; None as often as asked for.
    """

    title: str
    trials: Callable[[Sequence[Side]], Iterator[Trial]]
    max_rounds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured in one round.

    Attributes:
        starts: Workers of each start.
        imports: Workers of each start of a script that begins with another package.
        restarts: Shapes of the jobs that lose a worker.
        num_quiet: Workers of the jobs that wait.
        steady_s: How long they are watched.
    """

    starts: tuple[int, ...]
    imports: int
    restarts: tuple[Shape, ...]
    num_quiet: int
    steady_s: float


FULL = Sizes(
    starts=(1, 8, 16),
    imports=8,
    restarts=(
        Shape(num_workers_per_node=8),
        Shape(num_nodes=2, num_workers_per_node=2),
        Shape(num_workers_per_node=4, has_library=True),
    ),
    num_quiet=8,
    steady_s=10.0,
)
# Shows that everything works; the figures mean little.
QUICK = Sizes(
    starts=(2,),
    imports=2,
    restarts=(
        Shape(num_workers_per_node=2),
        Shape(num_workers_per_node=2, has_library=True),
    ),
    num_quiet=2,
    steady_s=0.5,
)


def start_trials(sizes: Sizes, sides: Sequence[Side]) -> Iterator[Trial]:
    """Yield starts of several sizes, the import of torch before each size."""
    for num_workers in sizes.starts:
        metrics = (Metric(case="start", name=counted(num_workers, "worker"), unit="s"),)
        yield Trial(side=FLOOR, metrics=metrics, measure=partial(measure_python, IMPORT_TORCH))
        for side in sides:
            shape = Shape(num_workers_per_node=num_workers, restarts=False)
            yield Trial(
                side=side.name, metrics=metrics, measure=partial(measure_start, side, shape)
            )


def import_trials(sizes: Sizes, sides: Sequence[Side]) -> Iterator[Trial]:
    """Yield starts of scripts that begin with other packages, as far as these are installed, the import of each before."""
    for package in ("transformers", "lightning", "accelerate"):
        if importlib.util.find_spec(package) is None:
            continue
        name = f"{counted(sizes.imports, 'worker')}, {package}"
        metrics = (Metric(case="imports", name=name, unit="s"),)
        code = f"import os, torch; {_FIRST[package]}; os._exit(0)"
        yield Trial(side=FLOOR, metrics=metrics, measure=partial(measure_python, code))
        shape = Shape(num_workers_per_node=sizes.imports, restarts=False, begins_with=package)
        for side in sides:
            yield Trial(
                side=side.name, metrics=metrics, measure=partial(measure_start, side, shape)
            )


def restart_trials(sizes: Sizes, sides: Sequence[Side]) -> Iterator[Trial]:
    """Yield losses of one worker, on one node and on two, and of a script that uses the library."""
    for shape in sizes.restarts:
        name = f"{shape.num_nodes} x {shape.num_workers_per_node} workers"
        name += ", torchmuster.train" if shape.has_library else ""
        metrics = (
            Metric(case="restart", name=name, unit="s"),
            Metric(case="restart", name=f"{name}, restarts needed"),
        )
        for side in sides:
            yield Trial(
                side=side.name, metrics=metrics, measure=partial(measure_restart, side, shape)
            )


def memory_trials(sizes: Sizes, sides: Sequence[Side]) -> Iterator[Trial]:
    """Yield the memory of one idle job on each side."""
    workers = counted(sizes.num_quiet, "worker")
    metrics = (
        Metric(case="memory", name=workers, unit="MiB"),
        Metric(case="memory", name=f"{workers} and all of the launcher", unit="MiB"),
    )
    for side in sides:
        measure = partial(measure_memory, side, Shape(num_workers_per_node=sizes.num_quiet))
        yield Trial(side=side.name, metrics=metrics, measure=measure)


def steady_trials(sizes: Sizes, sides: Sequence[Side]) -> Iterator[Trial]:
    """Yield the cost of watching quiet workers; torchrun also where it watches least."""
    quiet = Shape(num_workers_per_node=sizes.num_quiet)
    slow = Shape(num_workers_per_node=sizes.num_quiet, monitor_interval_s=5.0)
    for side in sides:
        measure = partial(measure_steady, side, quiet, sizes.steady_s)
        yield Trial(side=side.name, metrics=_steady_metrics(""), measure=measure)
        if side.has_monitor_interval:
            measure = partial(measure_steady, side, slow, sizes.steady_s)
            interval = f", --monitor-interval {slow.monitor_interval_s:g}"
            yield Trial(side=side.name, metrics=_steady_metrics(interval), measure=measure)


def help_trials(sides: Sequence[Side]) -> Iterator[Trial]:
    """Yield `--help` of each command, and an interpreter that does nothing."""
    metrics = (Metric(case="help", name="--help", unit="ms"),)
    yield Trial(side=FLOOR, metrics=metrics, measure=partial(measure_python, "pass", scale=1e3))
    for side in sides:
        if not side.name.startswith("torchrun-fork"):  # the same command as torchrun
            yield Trial(side=side.name, metrics=metrics, measure=partial(measure_help, side))


def all_cases(sizes: Sizes) -> dict[str, Case]:
    """Return the cases by name."""
    return {
        "start": Case(
            title="Start of the launcher to the first all-reduce of the last rank, one node"
            " (floor: `import torch`)",
            trials=partial(start_trials, sizes),
        ),
        "imports": Case(
            title="The same of scripts that begin with another package (floor: its import)",
            trials=partial(import_trials, sizes),
        ),
        "restart": Case(
            title="SIGKILL of one worker to the first all-reduce of the last rank, next attempt",
            trials=partial(restart_trials, sizes),
        ),
        "memory": Case(
            title="Memory of an idle job, sum of PSS",
            trials=partial(memory_trials, sizes),
            max_rounds=1,
        ),
        "steady": Case(
            title=f"Cost of {counted(sizes.num_quiet, 'quiet worker')} on one node,"
            f" over {sizes.steady_s:g} s; % of one core",
            trials=partial(steady_trials, sizes),
            max_rounds=1,
        ),
        "help": Case(title="Wall time of `--help` (floor: `python -c pass`)", trials=help_trials),
    }


def measure_python(code: str, scale: float = 1.0) -> list[float]:
    """Return the wall time of `python -c code` in seconds, times `scale`."""
    environment = {**os.environ, **COMMON_ENVIRONMENT}
    return [time_command([sys.executable, "-c", code], environment) * scale]


def measure_help(side: Side) -> list[float]:
    """Return the wall time of the side's `--help` in milliseconds."""
    with scratch_folder() as folder:
        return [time_command(help_command(side), side_environment(side, folder)) * 1e3]


def measure_start(side: Side, shape: Shape) -> list[float]:
    """Return the seconds from the creation of the launcher to the last rank's stamp."""
    with started(side, shape, "once") as job:
        job.wait_exit()
        stamps = [stamp for stamp in job.stamps("reduced") if stamp.attempt == 0]
        if len(stamps) != shape.num_workers:
            raise LostError(f"{len(stamps)} of {shape.num_workers} ranks came at first attempt")
        return [max(stamp.time_s for stamp in stamps) - job.started_s]


def measure_restart(side: Side, shape: Shape) -> list[float]:
    """Return the seconds from the kill to the next whole attempt, and the restarts needed."""
    with started(side, shape, "kill") as job:
        job.wait_exit()
        killed = job.stamps("killed")
        if len(killed) != 1:
            raise LostError(f"{len(killed)} workers were killed")
        whole = first_whole_attempt(job.stamps("reduced"), shape.num_workers)
        return [max(stamp.time_s for stamp in whole) - killed[0].time_s, whole[0].attempt]


def measure_memory(side: Side, shape: Shape) -> list[float]:
    """Return the PSS of all idle workers, and of everything the launcher is and started."""
    with started(side, shape, "idle") as job:
        workers = {stamp.pid for stamp in job.wait_idle()}
        pss_bytes = {pid: processes.pss_bytes(pid) for pid in processes.descendants()}
        job.check_alive()
        if missing := workers - pss_bytes.keys():
            raise LostError(f"{len(missing)} workers are no descendants of the launcher")
        workers_bytes = sum(pss_bytes[pid] for pid in workers)
        return [workers_bytes / MEBIBYTE, sum(pss_bytes.values()) / MEBIBYTE]


def measure_steady(side: Side, shape: Shape, steady_s: float) -> list[float]:
    """Return the CPU of the agent and of all but workers, in % of a core, and the agent's RSS."""
    with started(side, shape, "idle") as job:
        workers = {stamp.pid for stamp in job.wait_idle()}
        others = set(processes.descendants()) - workers
        agent = find_agent(side, others)
        before_s, began_s = {pid: processes.cpu_s(pid) for pid in others}, time.monotonic()
        job.check_alive_for(steady_s)
        after_s, ended_s = {pid: processes.cpu_s(pid) for pid in others}, time.monotonic()
        percent = {
            pid: 100 * (after_s[pid] - before_s[pid]) / (ended_s - began_s) for pid in others
        }
        return [percent[agent], sum(percent.values()), processes.rss_bytes(agent) / MEBIBYTE]


def find_agent(side: Side, pids: set[int]) -> int:
    """Return the pid of the one agent among processes that are no workers."""
    agents = [pid for pid in pids if side.is_agent(processes.command_line(pid))]
    if len(agents) != 1:
        raise LostError(f"{len(agents)} agents found")
    return agents[0]


def first_whole_attempt(stamps: list[Stamp], num_workers: int) -> list[Stamp]:
    """Return the stamps of the first attempt after the kill in which every rank reduced."""
    for attempt in sorted({stamp.attempt for stamp in stamps if stamp.attempt > 0}):
        whole = [stamp for stamp in stamps if stamp.attempt == attempt]
        if len(whole) == num_workers:
            return whole
    raise LostError("no attempt after the kill was whole")


def counted(count: int, noun: str) -> str:
    """Return `1 worker`, `2 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _steady_metrics(suffix: str) -> tuple[Metric, ...]:
    return (
        Metric(case="steady", name=f"CPU of the agent{suffix}", unit="%"),
        Metric(case="steady", name=f"CPU of all but the workers{suffix}", unit="%"),
        Metric(case="steady", name=f"RSS of the agent{suffix}", unit="MiB"),
    )
