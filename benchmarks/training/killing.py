"""What both sides of the case `goodput` share: the model, the data, and the schedule of kills."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.parts import perceptron, random_samples

WIDTH, NUM_LAYERS = 512, 4
NUM_WORKERS = 2
STEP_MS = 30.0
LEARNING_RATE, MOMENTUM = 1e-4, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job and what happens to it; the same on all sides.

    Attributes:
        kills: From the global step to the rank that dies behind it, the first time it is done.
    """

    steps_per_epoch: int
    num_epochs: int
    batch_size: int
    kills: dict[int, int]

    @property
    def num_steps(self) -> int:
        """Steps that have to be done."""
        return self.steps_per_epoch * self.num_epochs


@dataclass(slots=True)
class Diary:
    """Writes down each step of rank 0 (a time of 8 bytes), and kills by the schedule."""

    folder: Path
    schedule: Schedule
    rank: int
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        """Open the diary; an earlier attempt's is continued."""
        name = f"steps-{self.rank}"
        self.fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, step: int) -> None:
        """The optimizer has done `step` (from 1)."""
        os.write(self.fd, time.monotonic_ns().to_bytes(8, "little"))
        if self.schedule.kills.get(step) == self.rank and self._is_first(step):
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self, step: int) -> bool:
        try:
            os.close(os.open(self.folder / f"killed-{step}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def read_arguments() -> tuple[Path, Schedule, int | None, int | None]:
    """Return the job's folder, its schedule, and after how many steps to save, on disk and in memory."""
    plain = json.loads(sys.argv[2])
    plain["kills"] = {int(step): rank for step, rank in plain["kills"].items()}
    on_disk, in_memory = map(int, sys.argv[3:5])
    return Path(sys.argv[1]), Schedule(**plain), on_disk or None, in_memory or None


def build_model() -> Any:
    """Return the model."""
    return perceptron(WIDTH, NUM_LAYERS)


def build_optimizer(model: Any) -> Any:
    """Return its optimizer."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def build_dataset(schedule: Schedule) -> Any:
    """Return a dataset that is one epoch of `schedule` long."""
    num_samples = schedule.steps_per_epoch * schedule.batch_size * NUM_WORKERS
    return torch.utils.data.TensorDataset(*random_samples(num_samples, WIDTH))


cross_entropy = nn.functional.cross_entropy
