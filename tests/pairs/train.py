"""A training with the library, whose options make what pairs of features are tried with."""

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch

import torchmuster.train as tm


def main(args):
    torch.set_num_threads(1)
    world = tm.init(seed=5)
    model = tm.wrap(
        torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    samples = torch.arange(64, dtype=torch.float32).reshape(32, 2) / 64
    data = tm.loader(samples, global_batch_size=4, shuffle=True, seed=1)
    run = tm.resume(
        model=model,
        optimizer=optimizer,
        data=data,
        every_steps=args.every,
        on_nan=args.on_nan,
        memory_every_steps=args.memory,
    )
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    for _ in run.epochs(args.epochs):
        for x in data:
            time.sleep(args.sleep)
            dies = world.rank == args.die_rank and attempt == 0
            if dies and run.steps_done == args.die_at and not args.behind:
                end_by(args.how)
            loss = model(x).square().mean()
            if run.steps_done == args.nan_at:
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
            if dies and run.steps_done == args.die_at and args.behind:
                end_by(args.how)
    if args.out is not None:
        raw = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        name = f"weights-{world.rank}"
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / name).write_text(hashlib.sha256(raw).hexdigest())


def end_by(how):
    """End as a fault does, or stand still."""
    if how == "raise":
        raise RuntimeError("the fault of this test")
    if how == "hang":
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--die-rank", type=int, default=0)
    parser.add_argument("--behind", action="store_true", help="die behind the step: others save")
    parser.add_argument("--how", choices=["raise", "kill", "hang"], default="raise")
    parser.add_argument("--nan-at", type=int, default=-1)
    parser.add_argument("--on-nan", default="stop")
    parser.add_argument("--out", type=Path)
    main(parser.parse_args())
