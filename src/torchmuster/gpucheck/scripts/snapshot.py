"""The cost of snapshots of one large tensor: `snapshot.py bytes=N steps=N kill=STEP`."""

import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

import torchmuster.train as tm
from torchmuster.gpucheck.scripts import gpu


class Large(nn.Module):
    """A tensor of a given size, of which each step changes a part."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 4), requires_grad=False)
        self.own = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return something to differentiate."""
        return (x * self.own).sum()


def main(words: dict[str, str]) -> None:
    """Time each step, with a save at one of them; report the memory on the device meanwhile."""
    num_steps, save_at = int(words["steps"]), int(words["steps"]) // 2
    gpu.touch()
    world = tm.init(device="cpu" if gpu.PRETENDED else None)
    model = world.wrap(Large(int(words["bytes"])), settle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = world.loader(
        torch.utils.data.TensorDataset(torch.ones(num_steps, 1)), global_batch_size=1
    )
    more: dict[str, Any] = {"asynchronous": "kill" not in words}  # complete at the kill
    begun = time.monotonic()
    run = world.resume(
        model=model, optimizer=optimizer, data=data, every_s=None, every_epoch=False, **more
    )
    gpu.synchronize()
    large = max(model.parameters(), key=torch.Tensor.numel)
    gpu.say(
        load_s=time.monotonic() - begun,
        resumed=run.steps_done,
        first=float(large[0]),
        kind=large.device.type,
    )
    took: dict[int, float] = {}
    before = gpu.used_bytes()
    for _ in run.epochs(1):
        last = time.monotonic()
        for (x,) in data:
            model(x).backward()
            with torch.no_grad():
                large[:4] += 1.0
            optimizer.step()
            optimizer.zero_grad()
            gpu.synchronize()
            time.sleep(0.01)  # noqa: TID251 - a step of a known length
            run.step()
            took[run.steps_done] = time.monotonic() - last
            last = time.monotonic()
            if run.steps_done == save_at:
                run.save()
            gpu.kill_at(run.steps_done, words.get("kill", ""))
    quiet = [s for step, s in took.items() if 1 < step <= save_at]
    busy = [s for step, s in took.items() if step > save_at + 1]
    gpu.say(
        step_s=statistics.median(quiet or [0.0]),
        stall_s=took.get(save_at + 1, 0.0) - statistics.median(quiet or [0.0]),
        busy_step_s=statistics.median(busy or [0.0]),
        more_bytes=gpu.used_bytes(peak=True) - before,
        last=float(large[0]),
    )


if __name__ == "__main__":
    main(dict(word.split("=", 1) for word in sys.argv[1:]))
