"""A worker that all-reduces until told to stop, and dies on command: what the fault tests run.

In the folder argv[1] it writes `up-<attempt>-<rank>` (pid and time) once it has reduced, obeys the word in
`do-<rank>` once, and all ranks leave together when rank 0 sees the file `stop`.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

folder = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
flag = torch.zeros(1)
dist.all_reduce(flag)
temporary = os.path.join(folder, f"tmp-{attempt}-{rank}")
with open(temporary, "w") as up:
    up.write(f"{os.getpid()} {time.monotonic()} {dist.get_world_size()}")
os.rename(temporary, os.path.join(folder, f"up-{attempt}-{rank}"))
print(f"rank {rank} is up", flush=True)


def preempted(signum, frame):
    open(os.path.join(folder, f"caught-{signal.Signals(signum).name}-{rank}"), "w").close()
    if signum == signal.SIGTERM:
        os._exit(75)


if os.path.exists(os.path.join(folder, "catch")):
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, preempted)


def obey(word):
    match word:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise ValueError("bad batch")
        case "exit":
            os._exit(3)
        case "zero":
            sys.exit(0)
        case "preempted":
            if attempt == "0":  # an order that came too late is not for the next attempt
                sys.exit(75)
        case "child":
            os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "987654")


while True:
    order = os.path.join(folder, f"do-{rank}")
    if os.path.exists(order):
        with open(order) as file:
            word = file.read()
        os.unlink(order)
        obey(word)
    flag.fill_(float(rank == 0 and os.path.exists(os.path.join(folder, "stop"))))
    dist.all_reduce(flag)
    if flag.item():
        break
    time.sleep(0.01)
dist.destroy_process_group()
