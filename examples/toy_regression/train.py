"""Learn a linear function from noisy samples: one script for one device, several, and many nodes.

The function is known, so the end can be checked: the learned weights are printed beside the true
ones, and the exit code is 1 if they are further apart than the noise explains. Everything is in
float64, so that runs on different numbers of devices can be compared to the last digits.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import torchmuster.train as tm

NUM_FEATURES, NOISE, TOLERANCE = 8, 0.1, 0.02


def draw_samples(num_samples):
    """Return the samples, and the weights and bias that made them; alike in every process."""
    draw = torch.Generator().manual_seed(1)
    truth = torch.rand(NUM_FEATURES + 1, generator=draw, dtype=torch.float64) * 4 - 2
    x = torch.randn(num_samples, NUM_FEATURES, generator=draw, dtype=torch.float64)
    noise = NOISE * torch.randn(num_samples, generator=draw, dtype=torch.float64)
    return TensorDataset(x, x @ truth[:-1] + truth[-1] + noise), truth


def main(args):
    world = tm.init()
    samples, truth = draw_samples(2048)
    model = world.wrap(nn.Linear(NUM_FEATURES, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = world.loader(samples, global_batch_size=args.batch_size, shuffle=True)
    run = world.resume(model=model, optimizer=optimizer, data=data, folder=args.snapshots)
    for _ in run.epochs(args.epochs):
        for x, y in data:
            loss = F.mse_loss(model(x).squeeze(1), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
    learned = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    error = (learned - truth).abs().max().item()
    if world.is_first:
        for name, pair in enumerate(zip(truth.tolist(), learned.tolist(), strict=True)):
            print("weight {}: true {:+.9f}  learned {:+.9f}".format(name, *pair))
        print(f"largest error {error:.4f}, tolerance {TOLERANCE}")
    return 0 if error < TOLERANCE else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="samples a step, all devices")
    parser.add_argument("--snapshots", help="a folder or URL (default: the run's own folder)")
    sys.exit(main(parser.parse_args()))
