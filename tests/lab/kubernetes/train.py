"""The training of the tests on a cluster: it counts steps until a file is there, keeps them on a volume, and leaves when asked.

train.py FOLDER      FOLDER is on a volume
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = sys.argv[1]
leaving = []
signal.signal(signal.SIGTERM, lambda *_: leaving.append(True))
dist.init_process_group("gloo")
rank = dist.get_rank()
kept = Path(folder, "step")
step = int(kept.read_text()) if kept.exists() else 0
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"attempt {attempt} of {dist.get_world_size()} ranks begins at step {step}", flush=True)
while True:
    if os.path.exists(fill := os.path.join(folder, f"fill-{rank}")):
        os.remove(fill)  # once only
        torch.ones(1 << 32)
    if os.path.exists(fill := os.path.join(folder, f"fill-shm-{rank}")):
        os.remove(fill)
        # Of all processes the kernel is to take the container's first one, and so the container.
        Path("/proc/1/oom_score_adj").write_text("1000")
        with open("/dev/shm/fill", "wb") as file:
            while True:
                file.write(bytes(1 << 24))
    asked = [bool(leaving), os.path.exists(os.path.join(folder, "stop"))]
    total = torch.tensor([1.0, *map(float, asked)])
    dist.all_reduce(total)
    step += 1
    if rank == 0:
        with open(f"{kept}.new", "w") as file:
            file.write(str(step))
        os.replace(f"{kept}.new", kept)
    with open(os.path.join(folder, f"up-{rank}.new"), "w") as file:
        file.write(f"{attempt} {os.getpid()} {os.uname().nodename}")
    os.replace(file.name, os.path.join(folder, f"up-{rank}"))
    if total[1]:
        sys.exit(75)
    if total[2]:
        break
    time.sleep(0.05)
print(f"attempt {attempt} ends with step {step}", flush=True)
dist.destroy_process_group()
