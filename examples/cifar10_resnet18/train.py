"""Train ResNet-18 on CIFAR-10: one script for one device, several, and many nodes.

The archive is unpacked once on each node; the validation counts every image once, on any number of
devices; a run that was killed or preempted goes on from its newest snapshot.
"""

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from data import URL, Images, split, unpack
from model import ResNet18

import torchmuster.train as tm


def main(args):
    world = tm.init(seed=args.seed)
    folder = stage(world, args.archive)
    num_train = len(Images(folder, "train"))
    to_train, to_validate = split(num_train)
    train_set = Images(folder, "train", to_train, augment=True)

    model = world.wrap(ResNet18(width=args.width))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    data = world.loader(
        train_set,
        global_batch_size=args.batch_size,
        shuffle=True,
        seed=args.seed,
        num_workers=args.loader_workers,
    )
    scheduler = make_scheduler(optimizer, args.epochs * data.steps_per_epoch)
    run = world.resume(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        folder=args.snapshots,
        every_steps=args.save_every,
    )
    valid = world.evaluation(Images(folder, "train", to_validate), batch_size=500)
    for _ in run.epochs(args.epochs):
        train_epoch(world, run, model, optimizer, scheduler, data, bf16=args.bf16)
        run.report(**evaluate(model, valid, "valid"))
    test = world.evaluation(Images(folder, "test"), batch_size=500)
    result = evaluate(model, test, "test")
    if world.is_first:
        print("  ".join(f"{name} {value:.4f}" for name, value in result.items()))


def stage(world, archive):
    """Unpack the archive into this node's own scratch space, by one process of the node."""
    if not archive.is_file():
        sys.exit(f"{archive} is not there; to get it:  curl -o {archive} {URL}")
    status = archive.stat()
    scratch = os.environ.get("SLURM_TMPDIR") or f"{tempfile.gettempdir()}/cifar10-{os.getuid()}"
    # Size and time are in the name: another archive gets another folder. So is the node's rank:
    # nodes simulated on one machine have one scratch space, and each stages its own copy.
    name = f"cifar10-{status.st_size}-{status.st_mtime_ns}"
    folder = Path(scratch, name, f"node-{world.node_rank}")
    # The marker lies beside the data: it goes when they go.
    with world.once("unpack", folder=str(folder)) as mine:
        if mine:
            print(f"rank {world.rank} unpacks {archive} into {folder}", flush=True)
            unpack(archive, folder)
    return folder


def make_scheduler(optimizer, num_steps):
    """Warm up over the first 5 % of the steps, then let the learning rate fall along a cosine."""
    warmup = max(num_steps // 20, 1)

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(num_steps - warmup, 1))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_epoch(world, run, model, optimizer, scheduler, data, *, bf16):
    model.train()
    for images, labels in data:
        with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.step(loss=loss, accuracy=(logits.argmax(1) == labels).float().mean())


@torch.no_grad()
def evaluate(model, evaluation, part):
    """Return loss, accuracy and count over all samples and ranks, with `part` in their names."""
    model.eval()
    for images, labels in evaluation:
        logits = model(images)
        evaluation.add(loss=F.cross_entropy(logits, labels), accuracy=logits.argmax(1) == labels)
    return {f"{part}_{name}": value for name, value in evaluation.result().items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archive", type=Path, default=Path("cifar-10-python.tar.gz"))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=512, help="images a step, all devices")
    parser.add_argument("--lr", type=float, default=0.2, help="the highest, after the warm-up")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where it is safe")
    parser.add_argument("--loader-workers", type=int, default=2, help="processes for each device")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="beside every 5 minutes")
    parser.add_argument("--snapshots", help="a folder or URL (default: the run's own folder)")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
