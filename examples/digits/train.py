"""Train a small convolutional network on 8x8 digits, as one process or as many workers.

Each epoch ends with a snapshot in `--out`; each start continues from the one it finds there.
`steps.jsonl` beside it gets a line after every optimizer step and is never rewound: the summary
counts from it what was really processed, and how much of that a restart had to do again.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # first: imported later (by DDP), it keeps the process group for ever
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DIGITS = Path(__file__).with_name("digits.csv.gz")


def main(args):
    device = join_process_group()
    train(args, device)
    # By now nothing else holds the process group; if something did, its Gloo threads could outlive
    # this call, and torch 2.13 may then abort or hang when the process ends.
    dist.destroy_process_group()


def train(args, device):
    torch.manual_seed(args.seed)
    train_set, test_set = load_data(device)
    # The ranks share each batch equally: then the mean of their gradients is that of the batch.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, args.batch_size // dist.get_world_size(), sampler=sampler)
    model = build_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    epochs_done = load_snapshot(args.out / "snapshot.pt", model, optimizer)
    model = DistributedDataParallel(model)
    for epoch in range(epochs_done, args.epochs):
        sampler.set_epoch(epoch)
        mean_loss = train_epoch(model, optimizer, loader, epoch, args)
        if dist.get_rank() == 0:
            save_snapshot(args.out / "snapshot.pt", model.module, optimizer, epochs_done=epoch + 1)
            print(f"epoch {epoch}: mean loss {mean_loss:.4f}", flush=True)
    test_accuracy = measure_accuracy(model.module, test_set)
    if dist.get_rank() == 0:
        summarize(args.out, test_accuracy)


def join_process_group():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:  # A launcher has set this and the other variables that torch reads.
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def load_data(device):
    table = np.loadtxt(DIGITS, delimiter=",")  # 64 pixels of 0 to 16, then the digit
    images = torch.tensor(table[:, :-1], dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(table[:, -1], dtype=torch.int64, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model():
    layers = [nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))


def train_epoch(model, optimizer, loader, epoch, args):
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    is_doomed = is_first_attempt and (dist.get_rank(), epoch) == (args.kill_rank, args.kill_epoch)
    loss_sum, num_samples = 0.0, 0  # of this rank
    started = time.perf_counter()
    for step, (images, labels) in enumerate(loader):
        if is_doomed and step == len(loader) // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # DistributedDataParallel averages the gradients over the ranks here.
        optimizer.step()
        loss_sum += loss.item() * len(labels)
        num_samples += len(labels)
        if dist.get_rank() == 0:
            now, samples = time.perf_counter(), len(labels) * dist.get_world_size()
            record = {"epoch": epoch, "step": step, "samples": samples, "seconds": now - started}
            started = now
            with (args.out / "steps.jsonl").open("a") as journal:
                journal.write(json.dumps(record) + "\n")
    return mean_over_ranks(loss_sum, num_samples, labels.device)


@torch.no_grad()
def measure_accuracy(model, test_set):
    # Each sample is on one rank only; a DistributedSampler would repeat some to even out the ranks.
    images, labels = test_set[dist.get_rank() :: dist.get_world_size()]
    num_correct = (model(images).argmax(dim=1) == labels).sum().item()
    return mean_over_ranks(num_correct, len(labels), labels.device)


def mean_over_ranks(total, count, device):
    sums = torch.tensor([total, count], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def save_snapshot(path, model, optimizer, *, epochs_done):
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save({"epochs_done": epochs_done, **states}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)  # A reader finds the old snapshot or the new one, never a half.


def load_snapshot(path, model, optimizer):
    snapshots = [None]
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            snapshots = [torch.load(path, map_location="cpu")]
    dist.broadcast_object_list(snapshots)  # One rank reads: all continue from the same epoch.
    snapshot = snapshots[0]
    if snapshot is None:
        return 0
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["epochs_done"]


def summarize(out, test_accuracy):
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    samples_of_step = {(step["epoch"], step["step"]): step["samples"] for step in steps}
    samples_seen = sum(step["samples"] for step in steps)
    steps_redone = len(steps) - len(samples_of_step)
    seconds = sum(step["seconds"] for step in steps)
    summary = {
        "test_accuracy": test_accuracy,
        "samples_seen": samples_seen,
        "samples_redone": samples_seen - sum(samples_of_step.values()),
        "steps": len(steps),
        "steps_redone": steps_redone,
        "steps_per_second": len(steps) / seconds,
        "seconds": seconds,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(
        f"test accuracy {test_accuracy:.1%} after {len(steps)} steps on {samples_seen} samples "
        f"in {seconds:.1f} s; {steps_redone} of the steps were redone after a restart"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train a small network on 8x8 digits")
    parser.add_argument("--out", type=Path, default=Path("digits-out"), help="where snapshots go")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="samples a step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-rank", type=int, metavar="R", help="rank R kills itself, once ...")
    parser.add_argument("--kill-epoch", type=int, metavar="E", help="... half-way through epoch E")
    main(parser.parse_args())
