"""The script of the cases `overhead` and `metrics`: loops by hand and with the library, in turn.

All loops run in the same processes, so that they share whatever disturbs the machine.

    steps.py FOLDER '{"case": "overhead", ...}'
"""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchmuster.train as tm
from running.beats import heartbeats_us
from training.parts import (
    Values,
    arguments,
    batch_for,
    in_turn,
    perceptron,
    random_samples,
    report,
    wait_until_saved,
)

WIDTH, NUM_LAYERS = 256, 4
STEP_MS = 10.0
STEPS_PER_EPOCH = 1000
LEARNING_RATE = 1e-3
LISTENER_THREAD = "muster-stop"

SMALL_WIDTH, SMALL_BATCH = 64, 32
WINDOW_STEPS = 50  # as many as `log_every` of World.resume


class Rows:
    """A dataset as people write them: one sample at a time."""

    def __init__(self, x: Any, y: Any) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._x[index], self._y[index]


def main() -> None:
    """Measure one case and leave the values in the folder."""
    folder, what = arguments()
    torch.set_num_threads(1)
    world = tm.init()
    measure = {"overhead": overhead, "metrics": metrics}[what["case"]]
    report(folder, measure(world, folder, what))
    world.close()


def overhead(world: tm.World, folder: Path, what: dict[str, Any]) -> Values:
    """Return the time of a step by hand and with the library, and what its thread and its heartbeats cost."""
    batch_size = batch_for(perceptron(WIDTH, NUM_LAYERS), WIDTH, STEP_MS)
    x, y = random_samples(STEPS_PER_EPOCH * batch_size * world.world_size, WIDTH)
    dataset = Rows(x, y) if what["one_by_one"] else TensorDataset(x, y)
    loops = {
        "by hand": loop_by_hand(dataset, batch_size),
        "torchmuster": loop_of_ours(world, folder, dataset, batch_size),
    }
    next(loops["torchmuster"])  # the listener begins to listen
    began_s, listened_s = time.monotonic(), listener_cpu_s()
    values = in_turn(
        loops, num_steps=what["steps"], num_blocks=what["blocks"], settle=wait_until_saved
    )
    percent = 100 * (listener_cpu_s() - listened_s) / (time.monotonic() - began_s)
    return {
        f"{what['name']}, ms a step": values,
        f"{what['name']}: its listening thread, % of a core": {"torchmuster": [percent]},
        f"{what['name']}: its heartbeats, µs a step": {
            "torchmuster": [heartbeats_us(world.rank, folder) for _ in range(what["blocks"])]
        },
    }


def loop_by_hand(dataset: Any, batch_size: int) -> Iterator[None]:
    """Train as the tutorials do; each step yields."""
    model = DistributedDataParallel(perceptron(WIDTH, NUM_LAYERS))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    sampler = DistributedSampler(dataset)
    data = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for x, y in data:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield


def loop_of_ours(world: tm.World, folder: Path, dataset: Any, batch_size: int) -> Iterator[None]:
    """Train the same with the library, without saves; each step yields."""
    model = world.wrap(perceptron(WIDTH, NUM_LAYERS))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    data = world.loader(dataset, batch_size=batch_size, shuffle=True)
    run = world.resume(
        model=model,
        optimizer=optimizer,
        data=data,
        folder=str(folder / "snapshots"),
        every_s=None,
        every_epoch=False,
    )
    for _ in run.epochs(1 << 30):
        for x, y in data:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
            yield


def listener_cpu_s() -> float:
    """Return the CPU time of the thread that listens for preemption, which all blocks share.

    Source: Documentation/scheduler/sched-stats.rst of Linux: the first field, in nanoseconds.
    """
    threads = [t for t in threading.enumerate() if t.name == LISTENER_THREAD]
    path = Path(f"/proc/self/task/{threads[0].native_id}/schedstat")
    return int(path.read_text().split()[0]) / 1e9


def metrics(world: tm.World, folder: Path, what: dict[str, Any]) -> Values:
    """Return the time of a step with loss and accuracy logged in three ways.

    All loops train on one batch in memory, so they differ in nothing but the metrics.
    """
    batch = random_samples(SMALL_BATCH, SMALL_WIDTH)
    loops = {
        "as in tutorials": loop_that_reduces_each_step(batch),
        "by hand, best": loop_that_reduces_a_window(batch),
        "torchmuster": loop_that_calls_step(world, folder, batch),
    }
    values = in_turn(
        loops, num_steps=what["steps"], num_blocks=what["blocks"], settle=wait_until_saved
    )
    return {f"{what['name']}, ms a step": values}


def loop_that_reduces_each_step(batch: tuple[Any, Any]) -> Iterator[None]:
    """Do three reductions and three reads a step, as many cluster tutorials do."""
    x, y = batch
    model = DistributedDataParallel(perceptron(SMALL_WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    while True:
        loss, logits = train_step(model, optimizer, x, y)
        num_correct = (logits.argmax(1) == y).sum()
        num_samples = torch.tensor(len(x))
        loss_sum = loss.detach().clone()
        for value in (num_samples, num_correct, loss_sum):
            dist.reduce(value, dst=0)
        accuracy = num_correct.item() / num_samples.item()
        mean_loss = loss_sum.item() / dist.get_world_size()
        keep(accuracy, mean_loss)
        yield


def loop_that_reduces_a_window(batch: tuple[Any, Any]) -> Iterator[None]:
    """Sum on the device and reduce once a window: what a careful hand would write."""
    x, y = batch
    model = DistributedDataParallel(perceptron(SMALL_WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    sums = torch.zeros(3)
    for step in itertools.count(1):
        loss, logits = train_step(model, optimizer, x, y)
        sums[0] += loss.detach() * len(x)
        sums[1] += (logits.argmax(1) == y).sum()
        sums[2] += len(x)
        if step % WINDOW_STEPS == 0:
            dist.all_reduce(sums)
            loss_sum, num_correct, num_samples = sums.tolist()
            keep(num_correct / num_samples, loss_sum / num_samples)
            sums.zero_()
        yield


def loop_that_calls_step(world: tm.World, folder: Path, batch: tuple[Any, Any]) -> Iterator[None]:
    """Log with `run.step`."""
    x, y = batch
    model = world.wrap(perceptron(SMALL_WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    run = world.resume(
        model=model, optimizer=optimizer, folder=str(folder / "snapshots"), every_s=None
    )
    while True:
        loss, logits = train_step(model, optimizer, x, y)
        run.step(loss=loss, accuracy=(logits.argmax(1) == y).float().mean())
        yield


def train_step(model: Any, optimizer: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Do one step; return the loss and the logits."""
    logits = model(x)
    loss = cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss, logits


def keep(*_values: float) -> None:
    """Take what a loop would print or log."""


if __name__ == "__main__":
    main()
