"""A training that has something to tell: rank 2 is slow to get its data, and rank 3 is killed once at step 400."""

import os
import time

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name
from torch import nn
from torch.utils.data import TensorDataset

import torchmuster.train as tm


class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.001 if world.rank == 2 else 0.0)
        return super().__getitem__(index)


world = tm.init(seed=0)
draw = torch.Generator().manual_seed(1)
x = torch.randn(4096, 8, generator=draw)
y = x.sum(1) + 0.1 * torch.randn(4096, generator=draw)
model = world.wrap(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.004)
data = world.loader(Slow(x, y), global_batch_size=32, shuffle=True)
run = world.resume(model=model, optimizer=optimizer, data=data, every_steps=200, log_every=5)
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for _ in run.epochs(10):
    for inputs, targets in data:
        prediction = model(inputs).squeeze(1)
        loss = F.mse_loss(prediction, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss, error=(prediction - targets).abs().mean())
        if is_first and world.rank == 3 and run.steps_done == 500:
            os.kill(os.getpid(), 9)
