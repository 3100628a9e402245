"""Counts GPUs without initialising CUDA, since a process that has done that can't fork workers."""

import os
import re
from collections.abc import Mapping

from torchmuster.diagnose.facts.kernel import list_folder


def visible_gpus(environment: Mapping[str, str] | None = None, root: str = "/") -> list[str]:
    """Return the ids that `CUDA_VISIBLE_DEVICES` may name, in order; empty without a GPU.

    Args:
        environment: Of the variable; this process's own by default.
        root: The folder of the kernel's files.
    """
    chosen = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(index) for index in range(count_devices(root))]
    ids: list[str] = []
    for word in chosen.split(","):
        # Source: CUDA programming guide, "CUDA environment variables": an id that is not valid
        # hides itself and all that follow.
        word_id = word.strip()
        if not re.match(r"\d+$|GPU-|MIG-", word_id):  # Slurm says NoDevFiles where there is none
            break
        ids.append(word_id)
    return ids


def count_devices(root: str = "/") -> int:
    """Return the number of NVIDIA GPUs that are visible to this process."""
    shown = list_folder(os.path.join(root, "proc/driver/nvidia/gpus"))
    files = list_folder(os.path.join(root, "dev"))
    return len(shown) or sum(re.fullmatch(r"nvidia\d+", name) is not None for name in files)
