"""Train a small model whose second step is not finite on the last rank: nan_script.py OUT stop|skip [--sharded]."""

import copy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import torchmuster.train as tm

out, on_nan, sharded = Path(sys.argv[1]), sys.argv[2], "--sharded" in sys.argv
torch.set_num_threads(1)
world = tm.init(seed=0)
model = tm.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), sharded=sharded)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
run = tm.resume(model=model, optimizer=optimizer, on_nan=on_nan, folder=str(out / on_nan))
if not sharded:
    copy.deepcopy(
        model
    )  # as torch.optim.swa_utils.AveragedModel does: our hooks hold no process group
for _ in run.epochs(1):
    for step in range(1, 5):
        x = torch.ones(2, 4) * step
        if step == 2 and world.rank == world.world_size - 1:
            x[1, 2] = float("nan")
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
text = " ".join(f"{value:.9g}" for p in whole for value in p.detach().flatten().tolist())
(out / f"final-{world.rank}").write_text(text)
