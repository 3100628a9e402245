"""A training script whose model is whole on every rank, sharded, or sharded in replicas.

Writes `OUT/losses-<rank>.txt`: a line a step, with the samples of this rank and their mean loss.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from exact_script import kill_node
from torch import nn

import torchmuster.train as tm


class Net(nn.Module):
    """Blocks, a parameter of one row (fewer than ranks), and buffers: one of them is empty."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 7)])
        self.head = nn.Linear(7, 1)
        self.register_buffer("shift", torch.full((6,), 0.5))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x):
        x = x - self.shift
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def make_samples():
    own = torch.Generator().manual_seed(9)
    x = torch.randn(60, 6, generator=own, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def evaluate(model, test):
    with torch.no_grad():
        for x, y in test:
            test.add(loss=nn.functional.mse_loss(model(x), y))
    assert test.result()["count"] == len(make_samples())


def main(args):
    torch.set_num_threads(1)
    world = tm.init(seed=2, timeout_s=60, device="cpu")
    torch.set_default_dtype(torch.float64)
    model = world.wrap(Net(), sharded=args.sharded, replicas=args.replicas)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
    data = world.loader(make_samples(), global_batch_size=12, shuffle=True, seed=4)
    test = world.evaluation(make_samples(), batch_size=7)
    if args.evaluate:
        evaluate(model, test)
    node = os.environ["GROUP_RANK"]
    folder = args.out / (f"snapshots-{node}" if args.apart else "snapshots")
    run = world.resume(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        folder=str(folder),
        every_steps=args.every,
        every_epoch=args.memory is None,
        memory_every_steps=args.memory,
        memory_copies=args.copies,
    )
    losses = (args.out / f"losses-{world.rank}.txt").open("a", buffering=1)
    for _ in run.epochs(3):
        for x, y in data:
            if run.steps_done == args.stop_after:
                sys.exit()
            if is_due(args, world.rank, run.steps_done):
                kill_node()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            scheduler.step()
            losses.write(f"{run.steps_done} {data.count} {loss.item().hex()}\n")
            if run.steps_done == args.stop_after:
                run.save()
        if args.evaluate:
            evaluate(model, test)


def is_due(args, rank, step):
    """Say whether this node is lost now: the first time that the step is reached, all that it costs at the same moment."""
    ranks = [one for one, at in args.kill if at == step]
    if rank not in ranks or (args.out / f"killed-{step}-{rank}").exists():
        return False
    (args.out / f"killed-{step}-{rank}").touch()
    while not all((args.out / f"killed-{step}-{one}").exists() for one in ranks):
        time.sleep(0.001)
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--kill", nargs="*", default=[], metavar="RANK:STEP")
    parser.add_argument("out", type=Path)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--stop-after", type=int, default=-1)
    parser.add_argument(
        "--evaluate", action="store_true", help="before the training and after epochs"
    )
    parser.add_argument("--apart", action="store_true", help="a folder of its own for each node")
    given = parser.parse_args()
    given.kill = [[int(part) for part in one.split(":")] for one in given.kill]
    main(given)
