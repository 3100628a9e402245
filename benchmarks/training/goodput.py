"""The case `goodput`: the time to so many useful steps while workers are killed by a schedule."""

import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from launching.job import LostError, scratch_folder
from training.jobs import Values, muster_command, run, torchrun_command

NUM_WORKERS = 2
SAVE_EVERY = 20
OURS = "torchmuster"
MEMORY = "torchmuster, in memory"
EPOCHS = "torchrun, epochs"
BEST = f"torchrun, every {SAVE_EVERY}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """A schedule without its batch size, which is measured first.

    Attributes:
        kills: From the global step to the rank that dies behind it.
        sides: Which of `SIDES` are measured.
    """

    steps_per_epoch: int
    num_epochs: int
    kills: dict[int, int]
    sides: tuple[str, ...] = (OURS, MEMORY, EPOCHS, BEST)

    def schedule(self, batch_size: int) -> str:
        """Return what a job is told, as JSON."""
        told = {name: value for name, value in asdict(self).items() if name != "sides"}
        return json.dumps({**told, "batch_size": batch_size})


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How the job is started, and how often it saves: on disk, 0 is the end of each epoch only; in memory, 0 is never."""

    launcher: str
    command: Callable[[], list[str]]
    save_every: int
    in_memory_every: int = 0


SIDES = {
    OURS: Side(
        launcher="muster",
        command=partial(muster_command, "goodput_ours.py", NUM_WORKERS),
        save_every=SAVE_EVERY,
    ),
    MEMORY: Side(
        launcher="muster",
        command=partial(muster_command, "goodput_ours.py", NUM_WORKERS),
        save_every=0,
        in_memory_every=1,
    ),
    EPOCHS: Side(
        launcher="torchrun",
        command=partial(torchrun_command, "goodput_by_hand.py", NUM_WORKERS),
        save_every=0,
    ),
    BEST: Side(
        launcher="torchrun",
        command=partial(torchrun_command, "goodput_by_hand.py", NUM_WORKERS),
        save_every=SAVE_EVERY,
    ),
}


def measure(name: str, kills: Kills) -> Values:
    """Return the time to the last step on all sides, and what was lost on the way."""
    batch_size = calibrate()
    rows = [f"{name}, s", f"{name}: steps done again, steps", f"{name}: useful time, %"]
    values: Values = {row: {} for row in rows}
    for side_name in kills.sides:
        side = SIDES[side_name]
        with scratch_folder() as folder:
            schedule = kills.schedule(batch_size)
            words = [str(folder), schedule, str(side.save_every), str(side.in_memory_every)]
            command = [*side.command(), *words]
            started_s = run(command, side.launcher, folder)
            figures = read_diary(folder, kills, started_s)
        for row, figure in zip(rows, figures, strict=True):
            values[row][side_name] = [figure]
    return values


def calibrate() -> int:
    """Return the batch size that gives a step its length on this machine."""
    with scratch_folder() as folder:
        run([*muster_command("calibrate.py", NUM_WORKERS), str(folder)], "muster", folder)
        return int((folder / "batch-size").read_text())


def read_diary(folder: Path, kills: Kills, started_s: float) -> tuple[float, float, float]:
    """Return the seconds to the last step, the steps done again, and the useful share in %.

    Raises:
        LostError: Not all kills happened, or not all steps.
    """
    num_killed = len(list(folder.glob("killed-*")))
    if num_killed != len(kills.kills):
        raise LostError(f"{num_killed} of {len(kills.kills)} kills happened")
    raw = (folder / "steps-0").read_bytes()
    times_s = [int.from_bytes(raw[i : i + 8], "little") / 1e9 for i in range(0, len(raw), 8)]
    num_steps = kills.steps_per_epoch * kills.num_epochs
    if len(times_s) < num_steps:
        raise LostError(f"{len(times_s)} of {num_steps} steps were done")
    elapsed_s = times_s[-1] - started_s
    step_s = statistics.median(b - a for a, b in itertools.pairwise(times_s))
    return elapsed_s, len(times_s) - num_steps, 100 * num_steps * step_s / elapsed_s
