"""A training with the library, whose options make what pairs of features are tried with."""

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch

import torchmuster.train as tm

SLOW_S = 1.0


class Fault:
    """Ends one rank as a fault does, or lets it stand still: once, at one step, in one place of the script."""

    def __init__(self, world, args):
        self.args, self.rank = args, world.rank
        self.victim = args.die_rank % world.world_size

    def may_come(self, place, step):
        if (self.rank, place, step) != (self.victim, self.args.place, self.args.die_at):
            return
        if self._is_first():
            end_by(self.args.how)

    def _is_first(self):
        if self.args.out is None:
            return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        try:
            (self.args.out / "fault").open("x").close()
        except FileExistsError:
            return False
        return True


def main(args):
    torch.set_num_threads(1)
    world = tm.init(seed=5)
    if args.out is not None:
        args.out = args.out / f"lr-{args.lr}"
        args.out.mkdir(parents=True, exist_ok=True)
    fault = Fault(world, args)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = tm.wrap(model, sharded=args.sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    samples = torch.arange(64, dtype=torch.float32).reshape(32, 2) / 64
    data = tm.loader(
        samples, global_batch_size=4, shuffle=True, seed=1, num_workers=args.num_workers
    )
    run = tm.resume(
        model=model,
        optimizer=optimizer,
        data=data,
        every_steps=args.every,
        on_nan=args.on_nan,
        memory_every_steps=args.memory,
        tensorboard=args.tensorboard,
    )
    print(f"rank {world.rank} begins at step {run.steps_done}", flush=True)
    for _ in run.epochs(args.epochs):
        for x in data:
            pace(args, world, run.steps_done)
            fault.may_come("step", run.steps_done)
            loss = model(x).square().mean()
            if run.steps_done == args.nan_at:
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
            fault.may_come("behind", run.steps_done)
        if args.evaluate:
            evaluate(run, model, samples, fault)
    if args.out is not None:
        whole = [
            getattr(value, "full_tensor", lambda value=value: value)() for value in state_of(model)
        ]
        raw = b"".join(value.numpy().tobytes() for value in whole)
        (args.out / f"weights-{world.rank}").write_text(hashlib.sha256(raw).hexdigest())


def state_of(model):
    return [value.detach() for value in model.state_dict().values()]


def evaluate(run, model, samples, fault):
    test = tm.evaluation(samples, batch_size=8)
    with torch.no_grad():
        for x in test:
            fault.may_come("evaluation", run.steps_done)
            test.add(mse=model(x).square().flatten())
    run.report(test_mse=test.result()["mse"])


def pace(args, world, step):
    """Take the time that was asked for; from one step on say that it is reached, and go slowly until told to go on."""
    time.sleep(args.sleep)
    if step < args.slow_from or (args.out.parent / "go").exists():
        return
    if world.rank == 0:
        (args.out.parent / "reached").touch()
    time.sleep(SLOW_S)
    while (args.out.parent / "hold").exists():  # somebody looks
        time.sleep(0.05)


def end_by(how):
    match how:
        case "raise":
            raise RuntimeError("the fault of this test")
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--tensorboard")
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--slow-from", type=int, default=1 << 30)
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--die-rank", type=int, default=0)
    parser.add_argument(
        "--place",
        choices=["step", "behind", "evaluation"],
        default="step",
        help="behind: when the step is done, so that others may save",
    )
    parser.add_argument("--how", choices=["raise", "exit", "kill", "hang"], default="raise")
    parser.add_argument("--nan-at", type=int, default=-1)
    parser.add_argument("--on-nan", default="stop")
    parser.add_argument(
        "--out", type=Path, help="for weights and marks; with it a fault comes once in all runs"
    )
    main(parser.parse_args())
