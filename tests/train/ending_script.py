"""A training script that ends in the middle of an epoch, with everything alive that could hold it up.

    python ending_script.py HOW OUT        HOW: raise, exit, leave or break

Writes `OUT/children-<rank>`: the pids of its loader's processes.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import torchmuster.train as tm

torch.set_num_threads(1)


def children():
    me = os.getpid()
    return Path(f"/proc/{me}/task/{me}/children").read_text()


def end(how, world):
    if world.rank != world.world_size - 1 and how in ("raise", "exit"):
        return
    if how == "raise":
        raise ValueError("bad batch")
    if how == "exit":
        sys.exit(3)


def train(how, out):
    world = tm.init(timeout_s=3600)
    model = world.wrap(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
    data = world.loader(samples, global_batch_size=4, num_workers=2)
    run = world.resume(model=model, optimizer=optimizer, data=data, folder=str(out / "snapshots"))
    for _ in run.epochs(2):
        for x, y in data:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if run.steps_done == 5:
                (out / f"children-{world.rank}").write_text(children())
                end(how, world)
                if how in ("leave", "break"):
                    break
        if how == "leave":
            return model, data  # alive to the very end
    return model, data


if __name__ == "__main__":
    KEPT = train(sys.argv[1], Path(sys.argv[2]))
