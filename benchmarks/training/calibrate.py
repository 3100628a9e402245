"""Leaves the batch size with which the job of the case `goodput` has steps of the wanted length.

calibrate.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from training.killing import STEP_MS, WIDTH, build_model
from training.parts import batch_for


def main() -> None:
    """Measure on all ranks at once, as the job will run."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch_size = batch_for(build_model(), WIDTH, STEP_MS)
    if dist.get_rank() == 0:
        (Path(sys.argv[1]) / "batch-size").write_text(str(batch_size))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
