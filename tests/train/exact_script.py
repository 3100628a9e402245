"""A training script for the tests of exact resume: everything that could differ is in it.

Writes `OUT/losses-<rank>.txt` (a line a step, floats as hex) and, at its end, `OUT/weights-<rank>.txt`.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import torchmuster.train as tm


class Samples(torch.utils.data.Dataset):
    """Linear targets with random augmentation from torch's generator."""

    def __init__(self, length, *, dtype, noise):
        self.length, self.dtype, self.noise = length, dtype, noise

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=own, dtype=self.dtype)
        return x + self.noise * torch.randn(16, dtype=self.dtype), index % 4


def build_model(dropout, norm):
    layers = [nn.Linear(16, 48), *([nn.BatchNorm1d(48)] if norm else []), nn.ReLU()]
    layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))


def kill_if_due(args, step, rank):
    """Kill this process, or its node, at the step that this attempt was given."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt < len(args.kill) and args.kill[attempt] == [rank, step]:
        if args.nodes:
            kill_node()
        os.kill(os.getpid(), signal.SIGKILL)


def lose_if_due(args, step, world):
    """Kill this node, if it is of those that a step costs the first time that it is reached."""
    if step not in args.lose:
        return
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    mark = args.out / f"lost-at-{step}"
    own = args.out / f"lost-at-{step}.{attempt}.{world.rank}"
    num_lost = min(args.lose[step], world.world_size - 1)
    own.write_text(f"{attempt} {num_lost}")
    with contextlib.suppress(FileExistsError):
        os.link(own, mark)
    draw = random.Random(1000 * args.draw + step)
    ranks = draw.sample(range(world.world_size), num_lost)
    if mark.read_text().split()[0] == attempt and world.rank in ranks:
        kill_node()


def kill_node():
    """Kill the agent above this worker's spawner, and with it the node."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    signal.pause()


def main(args):
    torch.set_num_threads(1)
    world = tm.init(seed=5, timeout_s=120)
    model = build_model(args.dropout, args.norm).to(torch.float64 if args.double else torch.float32)
    model = world.wrap(model, settle=not args.unsettled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    dtype = torch.float64 if args.double else torch.float32
    samples = Samples(args.samples, dtype=dtype, noise=args.noise)
    data = world.loader(
        samples, global_batch_size=args.batch, shuffle=True, seed=1, num_workers=args.workers
    )
    run = world.resume(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        folder=str(
            args.out / (f"snapshots-{os.environ['MUSTER_NODE']}" if args.apart else "snapshots")
        ),
        every_steps=args.every,
        every_epoch=not args.apart,
        memory_every_steps=args.memory,
    )
    losses = (args.out / f"losses-{world.rank}.txt").open("a", buffering=1)
    for _ in run.epochs(args.epochs):
        for x, y in data:
            time.sleep(args.pace)
            kill_if_due(args, run.steps_done, world.rank)
            lose_if_due(args, run.steps_done, world)
            if run.steps_done == args.stop_after:
                sys.exit()
            if args.touch:
                with torch.no_grad():  # as clipping weights does; often, so that it meets a copy
                    for parameter in [*model.parameters()] * 20:
                        parameter.mul_(0.9999)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            scheduler.step()
            losses.write(f"{run.steps_done} {data.count} {loss.item().hex()}\n")
            if run.steps_done == args.stop_after:
                run.save()  # between this batch and the next
    state = model.state_dict().values()
    raw = b"".join(value.numpy().tobytes() for value in state)
    (args.out / f"weights-{world.rank}.txt").write_text(hashlib.sha256(raw).hexdigest())
    if world.rank == 0:
        torch.save([p.detach() for p in model.parameters()], args.out / "weights.pt")


def rank_and_step(text):
    return [int(part) for part in text.split(":")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=101)
    parser.add_argument("--batch", type=int, default=13)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--lose", type=json.loads, default="{}", help="JSON: step, number of nodes")
    parser.add_argument("--draw", type=int, default=0, help="which nodes those are")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between two steps")
    parser.add_argument("--touch", action="store_true", help="change a parameter before each step")
    parser.add_argument("--nodes", action="store_true", help="kill whole nodes")
    parser.add_argument("--apart", action="store_true", help="a folder of its own for each node")
    parser.add_argument("--unsettled", action="store_true")
    parser.add_argument("--stop-after", type=int, default=-1)
    parser.add_argument("--kill", type=rank_and_step, nargs="*", default=[], metavar="RANK:STEP")
    given = parser.parse_args()
    given.lose = {int(step): number for step, number in given.lose.items()}
    main(given)
