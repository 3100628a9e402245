"""What the measured scripts share: models, steps of a wanted length, blocks of steps in turn."""

import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from torchmuster.train.snapshot.writer import Saver

NUM_CLASSES = 10
MIN_BATCH, MAX_BATCH = 8, 4096
IDLE_TIMEOUT_S = 120.0
POLL_S = 0.005

Values = dict[str, dict[str, list[float]]]  # metric, side, one value a pair of blocks


def perceptron(width: int, num_layers: int) -> Any:
    """Return a model of `num_layers` square layers and a head."""
    layers: list[Any] = []
    for _ in range(num_layers):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))


def random_samples(num_samples: int, width: int) -> tuple[Any, Any]:
    """Return inputs `(num_samples, width)` float32 and labels `(num_samples,)` int64, from a seed."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(num_samples, width, generator=generator),
        torch.randint(NUM_CLASSES, (num_samples,), generator=generator),
    )


def batch_for(model: Any, width: int, step_ms: float) -> int:
    """Return the batch size with which a step takes about `step_ms`, agreed on by all ranks."""
    batch_size, measured_ms = MIN_BATCH, _step_ms(model, width, MIN_BATCH)
    while measured_ms < step_ms / 2 and batch_size < MAX_BATCH:
        batch_size *= 2
        measured_ms = _step_ms(model, width, batch_size)
    # What a noisy machine makes of this is at most twice or half of what was tried.
    factor = min(max(step_ms / measured_ms, 0.5), 2.0)
    agreed = torch.tensor(batch_size * factor)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return round(float(agreed.item()))


def _step_ms(model: Any, width: int, batch_size: int) -> float:
    x, y = random_samples(batch_size, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    times_s = []
    for _ in range(12):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        times_s.append(time.perf_counter() - began_s)
    model.zero_grad()
    return 1e3 * min(times_s)  # what disturbs can only add


def in_turn(
    loops: Mapping[str, Iterator[None]],
    *,
    num_steps: int,
    num_blocks: int,
    settle: Callable[[], None],
) -> dict[str, list[float]]:
    """Return the milliseconds a step of each loop's blocks; the first block of each is left out.

    Blocks of all loops stand next to each other in time, and the order turns from one group of
    blocks to the next, so what disturbs the machine falls on all of them.

    Args:
        loops: By side: each `next` does one step.
        num_steps: Of a block.
        num_blocks: Of each loop.
        settle: Called before each block, outside of the time.
    """
    values: dict[str, list[float]] = {side: [] for side in loops}
    for group in range(num_blocks + 1):
        sides = list(loops) if group % 2 else list(loops)[::-1]
        for side in sides:
            settle()
            dist.barrier()
            began_s = time.perf_counter()
            for _ in itertools.islice(loops[side], num_steps):
                pass
            elapsed_s = time.perf_counter() - began_s
            if group:
                values[side].append(1e3 * elapsed_s / num_steps)
    return values


def wait_until_saved() -> None:
    """Wait until nothing is being saved in this process."""
    for saver in [one for one in gc.get_objects() if type(one) is Saver]:
        saver.wait()


def arguments() -> tuple[Path, dict[str, Any]]:
    """Return the folder of this job, and what is to be measured."""
    return Path(sys.argv[1]), json.loads(sys.argv[2])


def report(folder: Path, values: Values) -> None:
    """Leave the values where the benchmark looks for them; on rank 0."""
    if dist.get_rank() == 0:
        (folder / "values.json").write_text(json.dumps(values))
