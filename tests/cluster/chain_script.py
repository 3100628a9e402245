"""A training that is longer than its job: it saves with torchmuster.train, and what it computes depends on every step.

A file `OUT/steps-<rank>` gets a line `attempt step` for each step; `OUT/weights-<rank>` the last weights. With `--hold`
each attempt but the last stands still after some steps until it is stopped.
"""

import argparse
import os
import threading
from pathlib import Path

import torch
from torch import nn

import torchmuster.train as tm

NUM_SAMPLES, BATCH, NUM_EPOCHS = 48, 8, 4


class Samples(torch.utils.data.Dataset):
    """Random samples, each a function of its number."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=own), torch.randn(1, generator=own)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--hold", type=int, default=0, help="attempts that stand still")
    parser.add_argument("--hold-s", type=float, default=2.0, help="at each step, in seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = tm.init(seed=5, timeout_s=60)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    model = world.wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = world.loader(Samples(), global_batch_size=BATCH, shuffle=True)
    run = world.resume(
        model=model, optimizer=optimizer, data=data, folder=str(args.out / "snapshots")
    )
    steps = (args.out / f"steps-{world.rank}").open("a", buffering=1)
    done = 0
    for _ in run.epochs(NUM_EPOCHS):
        for features, labels in data:
            loss = (model(features) - labels).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step()
            done += 1
            steps.write(f"{attempt} {run.steps_done}\n")
            if attempt < args.hold and done >= 4:
                threading.Event().wait(args.hold_s)  # slow, until it is stopped
    texts = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    (args.out / f"weights-{world.rank}").write_text(repr(texts))


if __name__ == "__main__":
    main()
