"""Fit a line with torchmuster.train: resumes exactly after any kill."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import torchmuster.train as tm


def main() -> None:
    """Train, and let the first worker write the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.5)
    options = parser.parse_args()
    world = tm.init()
    points = torch.load(options.data, weights_only=True)
    torch.manual_seed(0)
    model = world.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    data = world.loader(TensorDataset(points["x"], points["y"]), global_batch_size=32, shuffle=True)
    run = world.resume(model=model, optimizer=optimizer, data=data)
    for epoch in run.epochs(options.epochs):
        for x, y in data:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
        if world.is_first:
            print(
                f"epoch {epoch}: loss {loss.item():.5f} on {world.world_size} workers", flush=True
            )
    if world.is_first:
        torch.save(getattr(model, "module", model).state_dict(), options.model)


if __name__ == "__main__":
    main()
