"""A training with torchmuster.train that goes wrong, or only slow, in the way that its first argument names."""

import os
import pdb  # noqa: T100 - a rank sits in it
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn

import torchmuster.train as tm

MODE, RANK = sys.argv[1], int(os.environ["RANK"])
LONG_S = float(os.environ.get("LONG_S", "600"))
STEPS = int(os.environ.get("STEPS", "1000000"))


def stand(seconds):
    threading.Event().wait(seconds)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20

    def read(self, index):
        if MODE == "data" and index > 400 and RANK == 1:
            threading.Event().wait(LONG_S)
        if MODE == "straggler" and RANK == 1:
            stand(0.03)
        return torch.randn(4)

    def __getitem__(self, index):
        return self.read(index)


class SlowBack(torch.autograd.Function):
    """Identity whose backward takes long on one rank."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        if MODE == "slow backward" and RANK == 1:
            stand(0.03)
        return gradient


def evaluate():
    stand(LONG_S)


def save_weights():
    stand(LONG_S)


def main():
    if MODE == "first":
        stand(LONG_S if RANK == 0 else 0)
    world = tm.init()
    model = world.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = world.loader(Numbers(), global_batch_size=world.world_size)
    run = world.resume(model=model, optimizer=optimizer, data=data, every_steps=10**9)
    for _ in run.epochs(1):
        for batch in data:
            optimizer.zero_grad()
            SlowBack.apply(model(batch)).sum().backward()
            optimizer.step()
            run.step()
            odd(run.steps_done)
            if run.steps_done >= STEPS:
                return
            stand(0.002)


def odd(step):
    if step != 150 or RANK != 1:
        return
    if MODE == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if MODE == "branch":
        dist.barrier()
    if MODE == "evaluate":
        evaluate()
    if MODE == "save":
        save_weights()
    if MODE == "busy":
        end = torch.zeros(()).item()
        deadline = os.times().elapsed + LONG_S
        while os.times().elapsed < deadline:
            end += 1
    if MODE == "breakpoint":
        sit_in_a_debugger()
    if MODE == "compile":
        compile_something()
    if MODE == "compile-on":
        deadline = os.times().elapsed + LONG_S
        while os.times().elapsed < deadline:
            compile_something(step := step + 1)


def sit_in_a_debugger():
    """Stop in pdb; who sits there types `continue` much later."""
    keyboard, hand = os.pipe()
    later = threading.Timer(LONG_S, os.write, (hand, b"continue\n"))
    later.daemon = True
    later.start()
    pdb.Pdb(stdin=os.fdopen(keyboard), stdout=sys.stdout).set_trace()


def compile_something(number=1):
    """Compile; where `CXX` is slow this rank does nothing meanwhile."""

    def function(x):
        return torch.sin(x) * number + torch.cos(x)

    torch.compile(function)(torch.randn(100))


main()
