"""Rank 3's death by SIGKILL, for the three scripts of this folder."""

import os
import signal

CHECKPOINT_EVERY = 3
# Two steps after a checkpoint: to end step 4 every rank had to join its all-reduce, so every rank had
# written its part of the checkpoint before. The Trainer of Transformers does not write atomically.
KILL_STEP = 5


def kill_once(step: int) -> None:
    """Kill rank 3 as `KILL_STEP` begins, if `KILL_ONCE` names a file that does not exist yet.

    The file exists from the kill on, and gets a line for each step that rank 3 begins after it.
    """
    marker = os.environ.get("KILL_ONCE")
    if marker is None or os.environ["RANK"] != "3":
        return
    if step == KILL_STEP and not os.path.exists(marker):
        open(marker, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if os.path.exists(marker):
        with open(marker, "a") as steps:
            steps.write(f"{step}\n")
