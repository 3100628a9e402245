"""A training script in which one rank makes one collective more than the others."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import torchmuster.train as tm


def main(rank, step, size):
    torch.set_num_threads(1)
    world = tm.init(timeout_s=60)
    model = world.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = world.loader(torch.utils.data.TensorDataset(torch.ones(40, 4)), global_batch_size=4)
    run = world.resume(model=model, optimizer=optimizer, data=data)
    for _ in run.epochs(1):
        for (x,) in data:
            loss = model(x).mean()
            loss.backward()
            if world.rank == rank and run.steps_done == step:
                dist.all_reduce(torch.ones(size))
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
