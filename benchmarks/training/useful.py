"""What all sides of `goodput.py` share: the model, the data, a step's length, and the diary of what was done."""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.parts import perceptron, random_samples

WIDTH, NUM_LAYERS = 256, 4
BATCH_SIZE = 8
NUM_WORKERS = 2
LEARNING_RATE, MOMENTUM = 1e-4, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a job has to do; the same on all sides.

    Attributes:
        device_ms: A step sleeps so long, as a host does while an accelerator computes; what the launcher, the library and
            the host's own part take comes on top.
    """

    steps_per_epoch: int
    num_epochs: int
    device_ms: float

    @property
    def num_steps(self) -> int:
        """Steps that have to be done."""
        return self.steps_per_epoch * self.num_epochs


@dataclass(slots=True)
class Diary:
    """Says which process a rank is, on which host, and writes down when rank 0 has done which step: a time and a number, 8 bytes each."""

    folder: Path
    rank: int
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        """Open the diary; an earlier attempt's is continued."""
        partial = self.folder / f"pid-{self.rank}.{os.getpid()}"
        partial.write_text(f"{os.getpid()} {os.uname().nodename}")
        partial.replace(self.folder / f"pid-{self.rank}")
        name = f"steps-{self.rank}"
        self.fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, step: int) -> None:
        """The optimizer has done `step` (from 1)."""
        words = (time.monotonic_ns(), step)
        os.write(self.fd, b"".join(word.to_bytes(8, "little") for word in words))


def read_diary(folder: Path) -> list[tuple[float, int]]:
    """Return the times (CLOCK_MONOTONIC, seconds) and numbers of the steps that rank 0 has done, in their order."""
    raw = (folder / "steps-0").read_bytes()
    words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw) // 16 * 16, 8)]
    return [(ns / 1e9, step) for ns, step in zip(words[::2], words[1::2], strict=True)]


def read_arguments() -> tuple[Path, Work, int | None, int | None]:
    """Return the job's folder, its work, and after how many steps to save, on disk and in memory."""
    on_disk, in_memory = map(int, sys.argv[3:5])
    return (
        Path(sys.argv[1]),
        Work(**json.loads(sys.argv[2])),
        on_disk or None,
        in_memory or None,
    )


def wait_for_device(work: Work) -> None:
    """Take the time that an accelerator would."""
    time.sleep(work.device_ms / 1e3)


def build_model() -> Any:
    """Return the model."""
    return perceptron(WIDTH, NUM_LAYERS)


def build_optimizer(model: Any) -> Any:
    """Return its optimizer."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def build_dataset(work: Work) -> Any:
    """Return a dataset that is one epoch of `work` long."""
    num_samples = work.steps_per_epoch * BATCH_SIZE * NUM_WORKERS
    return torch.utils.data.TensorDataset(*random_samples(num_samples, WIDTH))


cross_entropy = nn.functional.cross_entropy
