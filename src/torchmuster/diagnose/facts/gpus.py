"""Count GPUs without initialising CUDA: a process that has done that can't fork workers."""

import os
import re


def visible_gpus() -> list[str]:
    """Return the ids that `CUDA_VISIBLE_DEVICES` may name, in order; empty without a GPU."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(index) for index in range(_num_devices())]
    ids: list[str] = []
    for word in chosen.split(","):
        # Source: CUDA programming guide, "CUDA environment variables": an id that is not valid
        # hides itself and all that follow.
        word_id = word.strip()
        if not re.match(r"\d+$|GPU-|MIG-", word_id):  # Slurm says NoDevFiles where there is none
            break
        ids.append(word_id)
    return ids


def _num_devices() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        pass
    try:
        names = os.listdir("/dev")
    except OSError:
        return 0
    return sum(1 for name in names if re.fullmatch(r"nvidia\d+", name))
