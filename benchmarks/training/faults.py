"""One faulty job of `goodput.py`: workers, nodes and the head are killed by a schedule until the work is done.

faults.py SIDE SEED WORK MEAN_S LIMIT_S OUT [FT_LAUNCHER]

The faults come from outside, at times and of kinds that the seed alone decides; each is SIGKILL, at once, for all that is lost:

- a worker: one of the two;
- a node: its agent and all below it. Ours has two nodes and a spare one. torchrun has its two workers in one node and loses both,
  which is the best for it: agents of several nodes would have to find out first that one of them is gone;
- the head: the node with the head, and on torchrun's side again the agent with both workers.

Where the launcher itself is gone its line runs again at once, as in a batch script with `until ...; do :; done`.
"""

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from launching import processes
from launching.job import LostError, lost_with, scratch_folder
from launching.sides import SIDES as LAUNCHERS
from launching.sides import TORCHRUN_OPTIONS, side_environment
from training.useful import NUM_WORKERS, Work, read_diary

HERE = Path(__file__).parent
SAVE_EVERY, IN_MEMORY_EVERY = 20, 10
KINDS = ("worker", "node", "head")
OURS = "torchmuster"
EPOCHS = "torchrun, epochs"
BEST = f"torchrun, every {SAVE_EVERY}"
FT_LAUNCHER = f"ft_launcher, every {SAVE_EVERY}"
_MANY = "100000"
_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is lost, and when.

    Attributes:
        after_s: From the start of the job.
        rank: Of the worker that dies; unused for other kinds.
    """

    after_s: float
    kind: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What became of a job.

    Attributes:
        elapsed_s: From the start to the end of the last useful step.
        step_ms: The median.
        num_again: Steps that were done more than once, each time but one.
        num_starts: Of the launcher.
        faults: Those that happened.
    """

    side: str
    seed: int
    elapsed_s: float
    step_ms: float
    num_again: int
    num_starts: int
    faults: list[dict[str, Any]]


def faults_by(seed: int, mean_s: float) -> Iterator[Fault]:
    """Yield the faults of a seed without end: independent of each other, one in `mean_s` on the average."""
    draw = random.Random(seed)
    after_s = 0.0
    while True:
        after_s += draw.expovariate(1 / mean_s)
        yield Fault(after_s=after_s, kind=draw.choice(KINDS), rank=draw.randrange(NUM_WORKERS))


def command_of(side: str, ft_launcher: str) -> list[str]:
    """Return the line that starts a side's job, without the arguments of the script."""
    if side == OURS:
        shape = ["--here", "--nodes", "2", "--nproc-per-node", "1", "--spares", "1"]
        run = [sys.executable, "-m", "torchmuster", "run", *shape]
        return [*run, "--max-restarts", _MANY, str(HERE / "goodput_ours.py")]
    if side == FT_LAUNCHER:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        launcher = [ft_launcher, "--nnodes", "1", *meeting, "--monitor-interval", "0.1"]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += [*TORCHRUN_OPTIONS, "--monitor-interval", "0.1"]
    options = ["--nproc-per-node", str(NUM_WORKERS), "--max-restarts", _MANY]
    return [*launcher, *options, str(HERE / "goodput_by_hand.py")]


def measure(
    side: str, seed: int, work: Work, mean_s: float, limit_s: float, ft_launcher: str = ""
) -> Reading:
    """Return what became of a job under the faults of a seed.

    Raises:
        LostError: It did not do its work within `limit_s`, or ended as it should not.
    """
    with scratch_folder() as folder:
        on_disk = 0 if side in (OURS, EPOCHS) else SAVE_EVERY
        in_memory = IN_MEMORY_EVERY if side == OURS else 0
        words = [str(folder), json.dumps(asdict(work)), str(on_disk), str(in_memory)]
        job = _Job(side, [*command_of(side, ft_launcher), *words], folder)
        with striking(faults_by(seed, mean_s), job) as happened:
            num_starts = job.run(limit_s)
        return read_job(folder, work, side, seed, job.began_s, num_starts, happened)


class _Job:
    """The launcher of a side, started again wherever it was lost itself."""

    def __init__(self, side: str, command: list[str], folder: Path) -> None:
        self.side, self.command, self.folder = side, command, folder
        self.began_s = time.monotonic()

    def run(self, limit_s: float) -> int:
        """Run to the good end; returns how often the launcher was started."""
        name = "muster" if self.side == OURS else "torchrun"
        environment = side_environment(LAUNCHERS[name], self.folder)
        paths = [str(HERE.parent), environment["PYTHONPATH"]]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        num_starts, exit_code = 0, -signal.SIGKILL
        with (self.folder / "log").open("wb") as log:
            while exit_code == -signal.SIGKILL:
                num_starts += 1
                launcher = subprocess.Popen(
                    self.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                left_s = self.began_s + limit_s - time.monotonic()
                try:
                    exit_code = launcher.wait(max(left_s, 0.0))
                except subprocess.TimeoutExpired:
                    self._lose(f"not done after {limit_s:.0f} s")
        if exit_code != 0:
            self._lose(f"exit code {exit_code}")
        return num_starts

    def _lose(self, why: str) -> None:
        raise lost_with(f"{self.side}: {why}", (self.folder / "log").read_text(errors="replace"))

    def strike(self, fault: Fault, done: threading.Event) -> dict[str, Any] | None:
        """Kill what the fault says, as soon as there is something; nothing more is to be told."""
        while not _kill_all(self.victims(fault)):  # it is being started again
            if done.wait(_POLL_S):
                return None
        return {}

    def victims(self, fault: Fault) -> list[int]:
        """Return the processes that a fault kills; none while there is nothing to lose."""
        if fault.kind == "worker":
            with suppress(FileNotFoundError):
                return [int((self.folder / f"pid-{fault.rank}").read_text().split()[0])]
            return []
        if self.side != OURS:
            # Everything below this process is of this job, whoever has lost its parent.
            return processes.descendants()
        agent = self._agent(is_head=fault.kind == "head")
        return [agent, *processes.descendants(agent)] if agent else []

    def _agent(self, *, is_head: bool) -> int:
        """Return the agent with the head, which is the first node's, or that of the other node with ranks; 0 if there is none."""
        events = read_events(self.folder)
        attempts = [event for event in events if event["event"] == "attempt_started"]
        if not attempts:
            return 0
        head, *others = [node["node"] for node in attempts[-1]["nodes"]]
        wanted = head if is_head else others[0]
        joined = [e["pid"] for e in events if e["event"] == "agent_joined" and e["node"] == wanted]
        return joined[-1] if joined else 0


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return what the record of the run has, whose `MUSTER_HOME` is `home` in this folder."""
    events: list[dict[str, Any]] = []
    for record in folder.glob("home/runs/*/events.jsonl"):
        lines = record.read_text().splitlines(keepends=True)
        events += [json.loads(line) for line in lines if line.endswith("\n")]
    return events


class Target(Protocol):
    """A job that faults hit.

    Attributes:
        began_s: When it was started.
    """

    began_s: float

    def strike(self, fault: Fault, done: threading.Event) -> dict[str, Any] | None:
        """Let a fault happen; return what more is to be told of it, None if the job was `done` before."""


@contextmanager
def striking(faults: Iterator[Fault], job: Target) -> Iterator[list[dict[str, Any]]]:
    """Let faults happen in their time while the body runs; yields those that have happened."""
    done = threading.Event()
    happened: list[dict[str, Any]] = []

    def work() -> None:
        for fault in faults:
            if done.wait(max(0.0, job.began_s + fault.after_s - time.monotonic())):
                return
            told = job.strike(fault, done)
            if told is None:
                return
            at_s = time.monotonic() - job.began_s
            happened.append({**asdict(fault), "at_s": at_s, **told})

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield happened
    finally:
        done.set()
        thread.join()


def _kill_all(victims: list[int]) -> bool:
    """Kill what there is; says whether the first of it was alive."""
    living = set(processes.descendants())
    if not victims or victims[0] not in living:
        return False
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def read_job(
    folder: Path,
    work: Work,
    side: str,
    seed: int,
    began_s: float,
    num_starts: int,
    happened: list[dict[str, Any]],
) -> Reading:
    """Return the reading of a job that has ended.

    Raises:
        LostError: It has not done all steps.
    """
    diary = read_diary(folder)
    last = next((i for i, (_, step) in enumerate(diary) if step == work.num_steps), None)
    if last is None or {step for _, step in diary} != set(range(1, work.num_steps + 1)):
        raise LostError(f"{side}: not all of {work.num_steps} steps were done")
    done = diary[: last + 1]
    gaps_s = [after[0] - before[0] for before, after in itertools.pairwise(done)]
    return Reading(
        side=side,
        seed=seed,
        elapsed_s=done[-1][0] - began_s,
        step_ms=1e3 * statistics.median(gaps_s),
        num_again=len(done) - work.num_steps,
        num_starts=num_starts,
        faults=happened,
    )


def main() -> None:
    """Measure one job and leave its reading, or why it was lost."""
    processes.adopt_orphans()
    leave_reading(measure)


def leave_reading(measure: Callable[..., Reading]) -> None:
    """Measure the job that the arguments name and leave its reading, or why it was lost."""
    side, seed, work, mean_s, limit_s, out, *ft_launcher = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    take = partial(measure, side, int(seed), Work(**json.loads(work)), float(mean_s))
    try:
        told = asdict(take(float(limit_s), *ft_launcher))
    except LostError as lost:
        told = {"side": side, "seed": int(seed), "lost": str(lost)}
    Path(out).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
