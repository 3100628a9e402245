"""A module for `--preload`: its import does what would break a fork, or only seems to."""

import contextlib
import os
import threading

import torch

from torchmuster.gpucheck.scripts import gpu

_act = os.environ.get("GPUCHECK_EARLY", "")
if gpu.PRETENDED and _act == "init" and not gpu.is_broken("early"):
    with contextlib.suppress(AssertionError, RuntimeError):  # torch built for CPUs has no CUDA
        torch.cuda.init()
    torch.cuda.is_initialized = lambda: True
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # like CUDA's own threads
elif _act == "init" and not gpu.is_broken("early"):
    torch.zeros(1, device="cuda")
elif _act == "available":
    torch.cuda.is_available()
elif _act == "count":
    torch.cuda.device_count()
