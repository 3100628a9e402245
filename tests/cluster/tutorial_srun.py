"""Multi-node training of a published Slurm tutorial, for srun; changed for CPUs only: gloo, made-up data, a small model."""

# ruff: noqa: N812, G004 - as it was printed

import argparse
import logging
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    rank, world_size, local_rank = setup()
    is_master = rank == 0
    is_local_master = local_rank == 0
    device = torch.device("cpu")
    logging.basicConfig(level=logging.INFO, format=f"[{rank}/{world_size}] %(message)s")
    logger = logging.getLogger(__name__)
    logger.info(f"World size: {world_size}, global rank: {rank}, local rank: {local_rank}")

    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 10))
    model = nn.parallel.DistributedDataParallel(model.to(device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

    dataset_path = Path(os.environ.get("SLURM_TMPDIR", ".")) / "data"
    train_dataset, valid_dataset = make_datasets(str(dataset_path), is_master=is_local_master)
    train_sampler = DistributedSampler(dataset=train_dataset, shuffle=True)
    valid_sampler = DistributedSampler(dataset=valid_dataset, shuffle=False)
    if is_master:
        logger.info(f"Effective batch size: {args.batch_size * world_size}")
    train_dataloader = DataLoader(train_dataset, args.batch_size, sampler=train_sampler)
    valid_dataloader = DataLoader(valid_dataset, args.batch_size, sampler=valid_sampler)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dataloader:
            logits: Tensor = model(x)
            local_loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            local_loss.backward()
            optimizer.step()
            n_samples = torch.as_tensor(logits.shape[0], device=device)
            torch.distributed.reduce(n_samples, dst=0, op=ReduceOp.SUM)
            loss = local_loss.detach().clone()
            torch.distributed.reduce(loss, dst=0, op=ReduceOp.SUM)
            loss.div_(world_size)
        n_valid = validation_loop(model, valid_dataloader, device)
        if is_master:
            logger.info(f"Epoch {epoch}: {n_valid.item()} samples validated")
    print("Done!")


@torch.no_grad()
def validation_loop(model: nn.Module, dataloader: DataLoader, device: torch.device):
    model.eval()
    n_samples = torch.as_tensor(0, device=device)
    for x, _ in dataloader:
        n_samples += model(x).shape[0]
    torch.distributed.all_reduce(n_samples, op=torch.distributed.ReduceOp.SUM)
    return n_samples


def setup():
    master_addr = os.environ["MASTER_ADDR"]
    master_port = os.environ["MASTER_PORT"]
    timeout = timedelta(seconds=60)
    rank = int(os.environ["SLURM_PROCID"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    os.environ["RANK"] = str(rank)
    os.environ["LOCAL_RANK"] = str(local_rank)
    os.environ["WORLD_SIZE"] = str(world_size)
    torch.distributed.init_process_group(
        backend="gloo",
        init_method=f"tcp://{master_addr}:{master_port}",
        timeout=timeout,
        world_size=world_size,
        rank=rank,
    )
    return rank, world_size, local_rank


def make_datasets(dataset_path: str, is_master: bool, val_split: float = 0.1):
    if not is_master:
        torch.distributed.barrier()
    staged = (Path(dataset_path) / "archive").exists()
    assert staged, "every node has its data"
    dataset = TensorDataset(torch.ones(400, 3, 4, 4), torch.zeros(400, dtype=torch.long))
    if is_master:
        torch.distributed.barrier()
    n_valid = int(val_split * len(dataset))
    generator = torch.Generator().manual_seed(42)
    return random_split(dataset, (len(dataset) - n_valid, n_valid), generator)


if __name__ == "__main__":
    main()
