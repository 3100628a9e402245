"""Train with the library and report the weights: `train.py kind=KIND steps=N kills=3,9 ...`."""

import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchmuster.train as tm
from torchmuster.gpucheck.scripts import gpu

_WIDTH, _BATCH = 64, 16


def samples() -> torch.utils.data.TensorDataset:
    """Return the same random samples each time."""
    own = torch.Generator().manual_seed(1)
    x = torch.randn(512, _WIDTH, generator=own)
    return torch.utils.data.TensorDataset(x, torch.randint(8, (512,), generator=own))


def build(kind: str) -> nn.Module:
    """Return the model; dropout draws from the device's generator."""
    rate = 0.3 if kind == "dropout" else 0.0
    inner = [nn.Linear(_WIDTH, 256), nn.GELU(), nn.Dropout(rate), nn.Linear(256, 8)]
    return nn.Sequential(*inner)


def main(words: dict[str, str]) -> None:
    """Train, get killed at the steps drawn by the kit, and report how it ended."""
    kind, kills = words["kind"], words.get("kills", "")
    num_steps = int(words.get("steps", "24"))
    nan_at, stuck_at = int(words.get("nan_at", "-1")), int(words.get("stuck_at", "-1"))
    gpu.be_deterministic()
    gpu.touch()
    world = tm.init(
        seed=3, device="cpu" if gpu.PRETENDED else None, share_gpus=words.get("share") == "1"
    )
    is_compiled = kind == "compile" and not gpu.PRETENDED
    model = world.wrap(build(kind), compile=is_compiled, sharded=kind == "fsdp")
    if gpu.is_broken("differs"):
        model.register_forward_hook(lambda _, __, out: out * (1 + os.urandom(1)[0] / 512))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = world.loader(samples(), global_batch_size=_BATCH, shuffle=True)
    half = {"bf16": "bf16", "fp16": "fp16"}.get(kind)
    if gpu.PRETENDED and half == "fp16":
        half = "bf16"  # the scaler is for devices
    precision = tm.Precision(world, half) if half else None
    more: dict[str, Any] = {"precision": precision} if precision else {}
    if "memory" in words:
        more["memory_every_steps"] = int(words["memory"])
    begun = time.time()
    run = world.resume(
        model=model,
        optimizer=optimizer,
        data=data,
        every_steps=int(words.get("every", "1")),
        every_s=None,
        on_nan=words.get("on_nan", "ignore"),
        **more,
    )
    gpu.synchronize()
    gpu.say(loaded=time.time(), load_s=time.time() - begun, resumed=run.steps_done)
    pause_s = float(words.get("pause_s", "0"))
    for _ in run.epochs(-(-num_steps * _BATCH // 512)):
        for x, y in data:
            if precision:
                with precision.autocast():
                    loss = F.cross_entropy(model(x), y)
                precision.backward(loss)
                precision.step(optimizer)
            else:
                loss = F.cross_entropy(model(x), y)
                if run.steps_done == nan_at and not gpu.is_broken("nan"):
                    loss = loss * float("nan")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            gpu.synchronize()
            if pause_s:
                time.sleep(pause_s)  # noqa: TID251 - a step of a known length
            gpu.say(step=run.steps_done, device=str(x.device.type))
            gpu.kill_at(run.steps_done, kills)
            if run.steps_done == stuck_at and not gpu.is_broken("fault"):
                gpu.stay_in_kernel()
            run.step(loss=loss)
    if gpu.is_broken("forgets") and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        with torch.no_grad():
            next(iter(model.parameters())).mul_(2)
    weights = list(model.parameters())
    norm = sum(float(gpu.local(w).double().square().sum()) for w in weights) ** 0.5
    gpu.say(weights=gpu.digest(weights), norm=norm, kind=weights[0].device.type)


if __name__ == "__main__":
    main(dict(word.split("=", 1) for word in sys.argv[1:]))
