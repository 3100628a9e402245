"""A training script for the tests of replays: it fails in one step of one rank, in a way and a place that its options say.

Writes `steps-<rank>.jsonl` into the run directory: what a step began with (weights, generators, batch), and what it made (loss,
gradients), as checksums of their bytes. A line is written before what may fail.
"""

import argparse
import json
import os
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import torchmuster.train as tm
from torchmuster.train import rng
from torchmuster.train.batches.order import mix
from torchmuster.train.finite import checksum


class Samples(torch.utils.data.Dataset):
    """Samples with random augmentation; one of them is bad, in one epoch: with the noise that it has there."""

    def __init__(self, length):
        self.length, self.bad, self.noise, self.fails = length, None, None, None

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(index)
        noise = torch.randn(12)
        x = torch.randn(12, generator=own) + 0.1 * noise
        if index == self.bad and torch.equal(noise, self.noise):
            x = self.fails(x)
        return x, index % 3


class Net(nn.Module):
    """A model with dropout and statistics of batches; `fails` is called in its middle."""

    def __init__(self, *, sharded):
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.norm = nn.LayerNorm(24) if sharded else nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(24, 3)
        self.fails = None

    def forward(self, x):
        hidden = self.drop(self.norm(self.first(x)).relu())
        if self.fails is not None:
            hidden = self.fails(hidden)
        return self.last(hidden)


class Backward(torch.autograd.Function):
    """Identity whose gradient fails."""

    @staticmethod
    def forward(ctx, value, fails):
        ctx.fails = fails
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.fails(gradient), None


def fails(args):
    """Return what is done to a value at the chosen place."""

    def to_nan(value):
        return torch.where(value == value.flatten()[0], value * float("nan"), value)

    def to_infinity(value):
        return value * 1e38 * 1e38

    def raises(value):
        raise ValueError(f"this {args.place} is unhappy with {value.double().sum().item().hex()}")

    def to_nan_once(value):
        nonlocal is_first
        is_bad, is_first = is_first, False
        return to_nan(value) if is_bad else value

    is_replay = "TORCHMUSTER_REPLAY" in os.environ
    is_first = os.environ["TORCHMUSTER_ATTEMPT"] == "0" and not is_replay
    return {"once": to_nan_once, "nan": to_nan, "inf": to_infinity, "exception": raises}[args.kind]


def bad_sample(args, data):
    """Return the first sample of the step and rank that fail, and its noise."""
    epoch, step = divmod(args.step - 1, data.steps_per_epoch)
    before = data.epoch
    data.begin_epoch(epoch)
    order = data.order().tolist()
    shares = list(data._division.shares(args.rank))
    data.begin_epoch(before)
    index = order[shares[step].begin]
    with rng.preserved():
        rng.seed_for_sample(mix(2, epoch, index))
        return index, torch.randn(12)


def weights_of(model, optimizer):
    """Return a checksum of parameters and of what the optimizer remembers."""
    state = [t for one in optimizer.state.values() for t in one.values()]
    return sum_of([*model.parameters(), *state])


def sum_of(tensors):
    """Return a checksum of tensors, of sharded ones of this rank's parts."""
    return checksum(t.to_local() if isinstance(t, DTensor) else t for t in tensors)


def main(args):
    torch.set_num_threads(1)
    world = tm.init(seed=3, timeout_s=120)
    net = Net(sharded=args.sharded)
    model = world.wrap(net, sharded=args.sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    samples = Samples(args.samples)
    data = world.loader(
        samples, global_batch_size=args.batch, shuffle=True, seed=2, num_workers=args.workers
    )
    if args.place == "augmentation":
        (samples.bad, samples.noise), samples.fails = bad_sample(args, data), fails(args)
    run = world.resume(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        folder=str(args.snapshots) if args.snapshots else None,
        every_steps=args.every,
        every_epoch=False,
        keep=args.keep,
        on_nan=args.on_nan,
    )
    out = Path(os.environ["TORCHMUSTER_RUN_DIR"]) / f"steps-{world.rank}.jsonl"
    with out.open("a", buffering=1) as file:
        for _ in run.epochs(args.epochs):
            for x, y in data:
                step = run.steps_done + 1
                is_it = step == args.step and world.rank == args.rank
                began = {
                    "weights": weights_of(model, optimizer),
                    "generators": zlib.crc32(torch.get_rng_state().numpy()),
                    "batch": checksum([x, y]),
                }
                print(json.dumps({"step": step, **began}), file=file)
                net.fails = fails(args) if is_it and args.place == "forward" else None
                outputs = model(x)
                if is_it and args.place == "backward":
                    outputs = Backward.apply(outputs, fails(args))
                loss = nn.functional.cross_entropy(outputs, y)
                if is_it and args.place == "loss":
                    loss = fails(args)(loss)
                forward = {"loss": loss.item().hex(), "buffers": checksum(model.buffers())}
                print(json.dumps({"step": step, **forward}), file=file)
                loss.backward()
                gradients = sum_of(p.grad for p in model.parameters())
                print(json.dumps({"step": step, "gradients": gradients}), file=file)
                optimizer.step()
                after = weights_of(model, optimizer)
                print(json.dumps({"step": step, "after": after}), file=file)
                optimizer.zero_grad()
                run.step(loss=loss)
                scheduler.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("nan", "inf", "once", "exception"), default="nan")
    parser.add_argument(
        "--place", choices=("forward", "loss", "backward", "augmentation"), default="forward"
    )
    parser.add_argument("--step", type=int, default=-1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--on-nan", default="replay")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=95)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--snapshots", type=Path)
    parser.add_argument("--sharded", action="store_true")
    main(parser.parse_args())
