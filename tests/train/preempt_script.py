"""A training script to be preempted in: everything that a stop at the wrong place would spoil is in it.

Writes `OUT/at-<rank>` (pid) when the first attempt comes to the place that is to be interrupted, a line
`attempt step` in `OUT/steps-<rank>` for each step, `attempt place` in `OUT/evaluated-<rank>` for each
evaluation, and `OUT/weights-<rank>.txt` at its end. What takes long takes long in the first attempt only.
"""

import argparse
import hashlib
import os
import threading
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torchmuster.train as tm

NUM_SAMPLES, BATCH, NUM_EPOCHS = 96, 12, 3
PLACES = ("step", "data", "evaluation", "inner")


def is_first_attempt():
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


class Samples(torch.utils.data.Dataset):
    """Random samples; one rank's come slowly where that is asked for."""

    def __init__(self, args, length, slow_s):
        self.args, self.length, self.slow_s = args, length, slow_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.slow_s:
            threading.Event().wait(self.slow_s)
        own = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=own), index % 3


class Job:
    """The loop and what it needs."""

    def __init__(self, args):
        self.args = args
        self.world = world = tm.init(seed=3, timeout_s=60)
        layers = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2)]
        self.model = world.wrap(nn.Sequential(*layers, nn.Linear(32, 3)), broadcast_buffers=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.by_step = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.999)
        self.by_epoch = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)
        self.averaged = AveragedModel(nn.Linear(8, 1))
        slow_s = 0.04 if self.is_slow("data") and world.rank == world.world_size - 1 else 0.0
        train = Samples(args, NUM_SAMPLES, slow_s)
        self.data = world.loader(
            train, global_batch_size=BATCH, shuffle=True, num_workers=args.workers
        )
        self.test = world.evaluation(Samples(args, 30, 0.0), batch_size=2)
        self.run = world.resume(
            model=self.model,
            optimizer=self.optimizer,
            by_step=self.by_step,
            by_epoch=self.by_epoch,
            averaged=self.averaged,
            data=self.data,
            folder=str(args.out / "snapshots"),
            every_steps=5,
            time_limit_s=args.time_limit,
        )
        self.steps = (args.out / f"steps-{world.rank}").open("a", buffering=1)

    def is_slow(self, place):
        return self.args.place == place and is_first_attempt()

    def arrive(self, place):
        """Say, once, that the place has come where the test interrupts."""
        if self.args.place == place:
            mark = self.args.out / f"at-{self.world.rank}"
            if not mark.exists():
                mark.with_suffix(".tmp").write_text(str(os.getpid()))
                mark.with_suffix(".tmp").rename(mark)

    def linger(self, place, slow_s):
        if self.is_slow(place):
            threading.Event().wait(slow_s)

    def train(self):
        next(iter(self.test))  # an evaluation that is left early
        for _ in self.run.epochs(NUM_EPOCHS):
            self.model.train()
            for x, y in self.data:
                self.step(x, y)
            # What comes behind the loop comes again, when the evaluation is interrupted.
            self.by_epoch.step()
            torch.rand(1)
            if self.args.averaged:
                self.averaged.update_parameters(self.averaged.module)
            self.evaluate("evaluation")
            torch.rand(1)
        raw = b"".join(t.detach().numpy().tobytes() for t in self.everything())
        name = f"weights-{self.world.rank}.txt"
        (self.args.out / name).write_text(hashlib.sha256(raw).hexdigest())

    def everything(self):
        yield from self.model.module.state_dict().values()
        yield from self.averaged.state_dict().values()
        yield torch.tensor([group["lr"] for group in self.optimizer.param_groups])

    def step(self, x, y):
        self.arrive("step")
        self.arrive("data")
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.step()
        self.linger("step", 0.02)
        self.steps.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {self.run.steps_done}\n")
        if self.run.steps_done % 6 == 0:
            self.evaluate("inner")
        self.by_step.step()

    def evaluate(self, place):
        self.model.eval()
        with torch.no_grad():
            for x, y in self.test:
                self.arrive(place)
                is_long = place == "evaluation" and not self.args.averaged
                self.linger(place, (0.5 if is_long else 0.04) + 0.02 * self.world.rank)
                self.test.add(loss=nn.functional.cross_entropy(self.model(x), y))
        torch.rand(1)
        self.test.result()
        with (self.args.out / f"evaluated-{self.world.rank}").open("a") as file:
            file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {place}\n")
        self.model.train()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--place", choices=PLACES)
    parser.add_argument("--averaged", action="store_true", help="change a tensor behind the loop")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--time-limit", type=float)
    torch.set_num_threads(1)
    Job(parser.parse_args()).train()


if __name__ == "__main__":
    main()
