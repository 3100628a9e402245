"""The job of `goodput.py` in the way of torch's own multi-GPU tutorial.

Rank 0 saves the model at the end of every epoch with torch.save, and a restarted job begins with
the epoch that was saved. Kinder than the tutorial: the optimizer is saved too, and the file is
renamed when it is whole. With SAVE_EVERY above 0 it saves after so many steps as well and skips
what the epoch has had: as good as it gets by hand.

goodput_by_hand.py FOLDER WORK SAVE_EVERY 0

Where machines lose their power, $GLOO_TIMEOUT_S says how long a collective may take.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from training.useful import (
    BATCH_SIZE,
    Diary,
    Work,
    build_dataset,
    build_model,
    build_optimizer,
    cross_entropy,
    read_arguments,
    wait_for_device,
)


def main() -> None:
    """Train to the end of the work."""
    folder, work, save_every, _ = read_arguments()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=float(os.environ.get("GLOO_TIMEOUT_S", "1800")))
    dist.init_process_group("gloo", timeout=timeout)
    model, first_epoch, first_step = build_model(), 0, 0
    optimizer = build_optimizer(model)
    path = folder / "snapshot.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch, first_step = saved["epoch"], saved["step"]
    wrapped = DistributedDataParallel(model)
    diary = Diary(folder, dist.get_rank())
    dataset = build_dataset(work)
    sampler = DistributedSampler(dataset)
    for epoch in range(first_epoch, work.num_epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(rest_of_epoch(dataset, sampler, work, first_step)):
            loss = cross_entropy(wrapped(x), y)
            loss.backward()
            wait_for_device(work)
            optimizer.step()
            optimizer.zero_grad()
            done = first_step + step + 1
            diary.note(epoch * work.steps_per_epoch + done)
            if save_every and done % save_every == 0:
                save(path, model, optimizer, epoch, done)
        first_step = 0
        save(path, model, optimizer, epoch + 1, 0)
    dist.destroy_process_group()


def rest_of_epoch(dataset: Any, sampler: Any, work: Work, first_step: int) -> Any:
    """Return a loader of the batches from `first_step` on, none of the earlier ones fetched."""
    indices = list(sampler)[first_step * BATCH_SIZE :]
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=indices)


def save(path: Path, model: Any, optimizer: Any, epoch: int, step: int) -> None:
    """Save on rank 0; renamed, as a careful hand does, and without fsync, as all do."""
    if dist.get_rank() == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        partial = path.with_suffix(".partial")
        torch.save({**states, "epoch": epoch, "step": step}, partial)
        partial.replace(path)


if __name__ == "__main__":
    main()
