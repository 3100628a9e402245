"""A training script for the lab of `muster plan`: layers of one width, DDP, the time of each step on request.

python plan_train.py NUM_LAYERS WIDTH BATCH STEPS
"""

import itertools
import json
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    num_layers, width, batch, num_steps = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(num_layers)])
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    samples = torch.randn(batch, width)
    ends = [time.perf_counter()]
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
        ends.append(time.perf_counter())
    times = [end - begin for begin, end in itertools.pairwise(ends)][3:]
    if dist.get_rank() == 0:
        os.write(1, json.dumps({"step_s": statistics.median(times), "steps": len(times)}).encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
