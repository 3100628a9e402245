"""A typical DDP script: what the torchrun workflows start. CPU or GPU, a few seconds."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Fit a line to points, and save the model after every epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--total_epochs", type=int, required=True)
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--snapshot_path", required=True)
    options = parser.parse_args()
    use_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    torch.manual_seed(0)
    x = torch.rand(512, 1)
    data = TensorDataset(x, 3 * x + 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(options.total_epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if int(os.environ["LOCAL_RANK"]) == 0:
            torch.save(model.module.state_dict(), options.snapshot_path)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: loss {loss.item():.4f} on {dist.get_world_size()} workers",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
