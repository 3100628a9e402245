"""Train a small model, and let one rank compute wrongly: verify_script.py OUT MODEL [forward|backward|weights RANK STEP [always]].

A wrong rank has one bit of one number flipped, in the first attempt only unless it is wrong always.
"""

import contextlib
import copy
import hashlib
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import torchmuster.train as tm

out, name, *fault = sys.argv[1:]
kind, rank, step = (fault[0], int(fault[1]), int(fault[2])) if fault else ("", -1, -1)
always = "always" in fault
torch.set_num_threads(1)
world = tm.init(seed=0)
is_wrong_here = world.rank == rank and (always or os.environ["TORCHMUSTER_ATTEMPT"] == "0")


def is_wrong(what):
    if kind != what or not is_wrong_here:
        return False
    now = run.steps_done + 1
    return now >= step if always else now == step and Fault.left.pop(what, False)


class Fault(torch.autograd.Function):
    left = {"forward": True, "backward": True}

    @staticmethod
    def forward(ctx, x):
        return flipped(x) if is_wrong("forward") else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return flipped(gradient) if is_wrong("backward") else gradient


def flipped(x):
    x = x.detach().clone()
    bits = x.view(-1).view(torch.int32 if x.element_size() == 4 else torch.int16)
    bits[3] ^= 1 << 12  # the lowest one may be rounded away in a sum
    return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=1.0):
        self.calls += 1
        if name == "sliced":
            x = x + 0.1 * x.sum()
        x = functional.dropout(functional.relu(self.norm(self.first(x))), 0.3)
        if name == "numbers":
            x = x + torch.rand(()) + torch.randn(1, 16)
        logits = Fault.apply(self.second(x)) * (scale if isinstance(scale, float) else 1.0)
        if name == "two":  # one output is made from another
            return {"loss": logits.square().mean(), "logits": logits, "calls": self.calls}
        return logits


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x, scale=1.0):
        return Fault.apply(self.head(self.layer(self.into(x[..., None])).mean(1)))


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        return torch.sin(torch.arange(8.0) * (index + 1))


class Thing:
    """An argument that nobody can send."""


made = Attention() if name == "attention" else Net()
model = (
    made if name == "bare" else tm.wrap(made, sharded=name == "sharded", compile=name == "compile")
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = tm.loader(
    Samples(), global_batch_size=12, shuffle=True, accumulate=2 if name == "accumulate" else 1
)
things = {"model": model} if name == "lone" else {"model": model, "optimizer": optimizer}
run = tm.resume(data=data, every_steps=2, folder=f"{out}/snapshots", keep=100, **things)
if name == "bare":
    copy.deepcopy(model)  # as for an average of its weights: our hooks hold no process group
for _ in run.epochs(2):
    for x in data:
        amp = torch.autocast("cpu", torch.bfloat16) if name == "amp" else contextlib.nullcontext()
        # The sum of its rows depends on where they lie.
        given = torch.repeat_interleave(x, 3, 1)[:, ::3] if name == "sliced" else x
        with amp:
            y = model(given, scale=Thing() if name == "odd-input" else 2.0)
            if name == "inplace":
                y.mul_(1.5)
            loss = y["loss"] if name == "two" else y.square().mean()
        if name == "two":
            loss = loss + y["logits"].mean()
        loss.backward()
        if world.step_state.ends_step:
            if kind == "weights" and is_wrong_here and run.steps_done + 1 == step:
                with torch.no_grad():
                    weight = next(model.parameters())
                    weight.copy_(flipped(weight))
            optimizer.step()
            optimizer.zero_grad()
        run.step(loss=loss)
told = hashlib.sha256()
for tensor in model.state_dict().values():
    told.update(tensor.numpy().tobytes())
Path(out, f"weights-{world.rank}").write_text(told.hexdigest())
