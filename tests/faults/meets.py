"""Ranks that meet in init_process_group, or do not, in the way that the first argument names."""

import os
import sys
import threading

MODE, RANK = sys.argv[1], os.environ["RANK"]
LONG_S = float(os.environ.get("LONG_S", "600"))


def download():
    """Take long; with a file to wait for, until it is there."""
    data = os.environ.get("DATA")
    while data and not os.path.exists(data):
        threading.Event().wait(0.1)
    if not data:
        threading.Event().wait(LONG_S)


def count():
    end = os.times().elapsed + LONG_S
    while os.times().elapsed < end:
        pass


def meet():
    import torch.distributed as dist

    if MODE == "world":
        dist.init_process_group("gloo", rank=int(RANK), world_size=9)
    elif MODE == "own-store":
        dist.TCPStore("127.0.0.1", 1, 2, False)
    else:
        dist.init_process_group("gloo")


if MODE == "port":
    os.environ["MASTER_PORT"] = "1"
if MODE == "download" and RANK == "0":
    download()
if MODE == "loop" and RANK == "0":
    count()
if MODE == "import" and RANK == "0":
    import slow_library  # noqa: F401 - the test makes it

if MODE == "library":
    import torchmuster.train as tm

    if RANK == "0":
        download()
    tm.init()
else:
    meet()
print("met", flush=True)
