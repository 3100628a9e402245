"""A plain script's process group, with the time of each part of its start: `group.py BACKEND`."""

import os
import sys
import time
from datetime import timedelta

began = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from torchmuster.gpucheck.scripts import gpu  # noqa: E402


def main(backend: str, hangs: str, limit_s: float) -> None:
    """Sum over all ranks; with `hangs`, rank 1 stays away from the second sum."""
    if gpu.PRETENDED and backend == "nccl":
        if int(os.environ["WORLD_SIZE"]) > len(gpu.visible()) and not gpu.is_broken("duplicate"):
            # NCCL's messages, as in tests/incidents.
            raise dist.DistBackendError(
                "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, invalid usage, NCCL version 2.19.3\n"
                "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
                "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 31000"
            )
        backend = "gloo"
    own = gpu.touch()
    context = time.time()
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
    x = torch.ones(4, device=own)
    dist.all_reduce(x)
    gpu.synchronize()
    done = time.time()
    gpu.say(total=float(x.sum()), began=began, context=context, done=done, device=gpu.device_name())
    if hangs:
        if dist.get_rank() == 1 and not gpu.is_broken("hang"):
            import threading

            threading.Event().wait()
        dist.all_reduce(x)
        gpu.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    words = dict(word.split("=") for word in sys.argv[1:])
    main(words.get("backend", "gloo"), words.get("hangs", ""), float(words.get("limit_s", "120")))
