"""The training library's world where ranks outnumber devices: `shared.py [share]`."""

import sys

import torch
import torch.distributed as dist

import torchmuster.train as tm
from torchmuster.gpucheck.scripts import gpu


def pretend_to_be_cuda() -> None:
    """Make torch report as many devices as are pretended; Gloo replaces the missing NCCL."""
    from types import SimpleNamespace

    first, count = gpu.visible()[0], len(gpu.visible())
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=first)
    init = dist.init_process_group
    dist.init_process_group = lambda backend, **options: init("gloo", **options)


if __name__ == "__main__":
    if gpu.PRETENDED:
        pretend_to_be_cuda()
    gpu.touch()
    shares = sys.argv[1:] == ["share"] or gpu.is_broken("refusal")
    world = tm.init(share_gpus=shares)
    x = torch.ones(1, device=gpu.device())
    dist.all_reduce(x)
    gpu.say(total=float(x), backend=dist.get_backend(), line=world.describe())
