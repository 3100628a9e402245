"""Trains five steps of two micro-batches, compiled or not; prints losses and the names that are saved."""

import sys

import torch
from torch import nn

import torchmuster.train as tm


def main(compiled):
    torch.set_num_threads(1)
    world = tm.init(seed=3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model = world.wrap(model, compile=compiled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    data = world.loader(torch.utils.data.TensorDataset(samples), global_batch_size=10, accumulate=2)
    run = world.resume(model=model, optimizer=optimizer, data=data)
    losses = []
    for _ in run.epochs(1):
        for (x,) in data:
            loss = model(x).pow(2).mean()
            loss.backward()
            if data.ends_step:
                optimizer.step()
                optimizer.zero_grad()
            run.step(loss=loss)
            losses.append(round(loss.item(), 4))
    if world.rank == 0:
        print("losses", losses, sorted(name.removeprefix("module.") for name in model.state_dict()))


if __name__ == "__main__":
    main(sys.argv[1] == "compiled")
