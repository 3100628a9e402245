"""The script that every side launches: one all-reduce, a stamp of when it was done, then a mode.

    worker.py FOLDER once    leave after the first all-reduce
    worker.py FOLDER idle    wait until somebody kills the job
    worker.py FOLDER kill    the last rank of the first attempt kills itself, later ones leave

A stamp is a file `NAME.ATTEMPT.RANK` that holds the time (CLOCK_MONOTONIC, seconds) and the pid.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 600.0
POLL_S = 0.1


def main() -> None:
    """Make the process group, be measured, and destroy it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    be_measured()
    dist.destroy_process_group()


def be_measured() -> None:
    """Reduce once, leave a stamp, then do what the mode says."""
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    attempt = reduce_attempt()
    stamp(folder, "reduced", attempt)
    if mode == "idle":
        wait_until_gone(folder, timeout_s=IDLE_TIMEOUT_S)
    elif mode == "kill" and attempt == 0:
        lose_last_rank(folder)


def reduce_attempt() -> int:
    """Return the number of this attempt, agreed on by all ranks in their first all-reduce.

    torchrun doesn't count a restart on nodes where no worker of its own failed first, so the
    highest count is the number of the attempt.
    """
    attempt = torch.tensor([int(os.environ["TORCHELASTIC_RESTART_COUNT"])])
    dist.all_reduce(attempt, op=dist.ReduceOp.MAX)
    return int(attempt.item())


def stamp(folder: Path, name: str, attempt: int) -> None:
    """Write down that this rank got here, whole or not at all."""
    now_s = time.monotonic()
    final = folder / f"{name}.{attempt}.{dist.get_rank()}"
    draft = folder / f".{final.name}"
    draft.write_text(f"{now_s!r} {os.getpid()}")
    draft.replace(final)


def lose_last_rank(folder: Path) -> None:
    """Kill the last rank while the others wait in a collective."""
    if dist.get_rank() != dist.get_world_size() - 1:
        stamp(folder, "waiting", 0)
        dist.all_reduce(torch.ones(1))
        return
    wait_for_others(folder, timeout_s=GROUP_TIMEOUT_S)
    stamp(folder, "killed", 0)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_others(folder: Path, *, timeout_s: float) -> None:
    """Return when every other rank is about to wait in the next collective."""
    deadline_s = time.monotonic() + timeout_s
    while len(list(folder.glob("waiting.0.*"))) < dist.get_world_size() - 1:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the other ranks did not enter a collective within {timeout_s} s")
        time.sleep(POLL_S)


def wait_until_gone(folder: Path, *, timeout_s: float) -> None:
    """Return when the folder of the job has been removed."""
    deadline_s = time.monotonic() + timeout_s
    while folder.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nobody ended this idle job within {timeout_s} s")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
