"""A training script of sixty slow steps, with the default folder for its snapshots."""

import os
import sys
import threading

import torch
from torch import nn

import torchmuster.train as tm


class Slow(torch.utils.data.Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 120

    def __getitem__(self, index):
        threading.Event().wait(self.seconds)
        return torch.ones(3)


def main(seconds, time_limit_s):
    torch.set_num_threads(1)
    model = tm.wrap(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = tm.loader(Slow(seconds), global_batch_size=2)
    run = tm.resume(model=model, optimizer=optimizer, data=data, time_limit_s=time_limit_s)
    for _ in run.epochs(1):
        for x in data:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)


if __name__ == "__main__":
    limit = os.environ.get("SLOW_LIMIT_S")
    main(float(sys.argv[1]), float(limit) if limit else None)
