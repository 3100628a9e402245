"""Kill a training at each file operation of its saves, restart it, and write down what came of it.

One process imports torch and forks: a child that trains and kills itself at its n-th file operation,
then a child that resumes in the same folder and trains to the end. Writes `OUT/report.json`.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import torchmuster.train as tm
from torchmuster.train.snapshot import folder as fileops


class Operations:
    """Counts file operations, and kills this process in front of the n-th."""

    def __init__(self, kill_at):
        self.kill_at = kill_at
        self.names = []

    def __call__(self, operation, path):
        self.names.append(f"{operation} {Path(path).name}")
        if len(self.names) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(*things):
    """Return a digest of models' and optimizers' tensors."""
    found = hashlib.sha256()
    for thing in things:
        for name, value in sorted(_flat(thing)):
            found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def _flat(thing):
    state = thing.state_dict()
    if "param_groups" not in state:
        return [(name, value.detach()) for name, value in state.items()]
    rows = [(i, k, v) for i, one in state["state"].items() for k, v in one.items()]
    return [(f"{i}.{k}", v.detach()) for i, k, v in rows]


def train(folder):
    """Train, or go on; return where it began, and the state's digest after each step."""
    world = tm.init(seed=3, device="cpu")
    model = world.wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.arange(64.0).reshape(16, 4) / 64
    samples = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    data = world.loader(samples, global_batch_size=4, shuffle=True)
    run = world.resume(
        model=model, optimizer=optimizer, data=data, folder=str(folder), every_steps=2, keep=2
    )
    began = run.steps_done
    states = {began: digest(model, optimizer)}
    for _ in run.epochs(2):
        for inputs, targets in data:
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            states[run.steps_done] = digest(model, optimizer)
    world.close()
    return {"began": began, "states": states}


def in_child(folder, kill_at, result):
    """Train in a child; return how it ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fileops.before = operations = Operations(kill_at)
            told = train(folder) | {"operations": operations.names}
            result.write_text(json.dumps(told))
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def import_what_torch_imports_late():
    """Take one step: a first one costs a second, which each child would spend anew."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def main(out):
    torch.set_num_threads(1)
    import_what_torch_imports_late()
    assert in_child(out / "quiet", 0, out / "quiet.json") == 0
    quiet = json.loads((out / "quiet.json").read_text())
    rows = []
    for number, operation in enumerate(quiet["operations"], 1):
        folder, result = out / f"at-{number}", out / f"at-{number}.json"
        killed = in_child(folder, number, result)
        committed = sorted(path.name for path in folder.glob("step-*"))
        again = in_child(folder, 0, result)
        row = json.loads(result.read_text()) if again == 0 else {}
        left = sorted(path.name for path in folder.iterdir())
        rows.append(
            row
            | {"operation": operation, "codes": [killed, again]}
            | {"committed": committed, "left": left}
        )
    (out / "report.json").write_text(json.dumps({"quiet": quiet, "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
