"""Use the device in a worker in one of several ways: `use.py WAY`, also `fault FAULT` or `shared share`."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.gpucheck.scripts import gpu


def plain() -> dict[str, Any]:
    """Multiply on the device, and check which ancestors have it open."""
    own = gpu.touch()
    product = torch.full((64, 64), 2.0, device=own) @ torch.eye(64, device=own)
    above = [pid for pid in gpu.ancestors() if gpu.holds_device(pid)]
    return {
        "total": float(product.sum()),
        "forked": gpu.is_forked(),
        "holds_itself": gpu.holds_device(os.getpid()),
        "held_above": above,
    }


def where() -> dict[str, Any]:
    """Return this rank's device."""
    gpu.touch()
    return {"device": gpu.device_name(), "visible": gpu.visible()}


def pinned() -> dict[str, Any]:
    """Copy from pinned memory without waiting."""
    own = gpu.touch()
    source = torch.arange(1 << 20, dtype=torch.float32)
    if not gpu.PRETENDED:
        source = source.pin_memory()
    there = source.to(own, non_blocking=True)
    gpu.synchronize()
    return {"is_pinned": gpu.PRETENDED != "" or source.is_pinned(), "total": float(there.sum())}


def graph() -> dict[str, Any]:
    """Capture a CUDA graph and replay it with other values."""
    own = gpu.touch()
    x = torch.ones(1024, device=own)
    if gpu.PRETENDED:
        return {"total": float((x * 3).sum())}
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = x * 3
    captured.replay()
    torch.cuda.synchronize()
    return {"total": float(y.sum())}


def compiled() -> dict[str, Any]:
    """Compile a function; the compiler starts its own processes from a forked worker."""
    own = gpu.touch()
    backend = "eager" if gpu.PRETENDED else "inductor"

    @torch.compile(backend=backend)
    def triple(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 2 + x)

    return {"total": float(triple(torch.ones(1024, device=own)).sum())}


_FAULTS = {
    "memory": gpu.run_out_of_memory,
    "assert": gpu.assert_on_device,
    "address": gpu.write_to_illegal_address,
}


def fault(kind: str) -> dict[str, Any]:
    """Commit one fault on the device."""
    gpu.touch()
    gpu.say(begun=True)
    if not gpu.is_broken("fault"):
        _FAULTS[kind]()
    return {}


def shared(share: str = "") -> dict[str, Any]:
    """Sum in the training library's world where ranks outnumber devices; `share` permits that."""
    import torchmuster.train as tm

    if gpu.PRETENDED:
        _pretend_to_be_cuda()
    gpu.touch()
    world = tm.init(share_gpus=bool(share) or gpu.is_broken("refusal"))
    x = torch.ones(1, device=gpu.device())
    dist.all_reduce(x)
    return {"total": float(x), "backend": dist.get_backend(), "line": world.describe()}


def _pretend_to_be_cuda() -> None:
    """Make torch report as many devices as are pretended; Gloo replaces the missing NCCL."""
    first, count = gpu.visible()[0], len(gpu.visible())
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=first)
    init = dist.init_process_group
    dist.init_process_group = lambda backend, **options: init("gloo", **options)


if __name__ == "__main__":
    gpu.say(**globals()[sys.argv[1]](*sys.argv[2:]))
