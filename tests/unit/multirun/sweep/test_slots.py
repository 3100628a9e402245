"""Which GPUs the members in each slot see."""

import pytest

from torchmuster.multirun.sweep.runs import gpus_of_slots


@pytest.mark.parametrize(
    ("gpus", "slots", "workers", "found"),
    [
        ("", 2, 1, ["", ""]),
        ("0 1", 2, 1, ["0", "1"]),
        ("0 1", 4, 1, ["0", "1", "0", "1"]),  # --per-gpu 2
        # --per-gpu 2: each member has two GPUs, each GPU two workers
        ("0 1", 2, 2, ["0 1", "0 1"]),
        ("0 1 2 3", 2, 2, ["0 1", "2 3"]),
        ("0 1 2", 3, 2, ["0 1", "2 0", "1 2"]),
        ("GPU-a GPU-b", 1, 1, ["GPU-a"]),
        ("0 1", 3, 1, ["0", "1", "0"]),  # --slots 3 is more than there are GPUs
        ("0", 3, 2, ["0", "0", "0"]),
    ],
)
def test_every_gpu_gets_its_share(gpus, slots, workers, found):
    told = gpus_of_slots(gpus.split(), slots, workers)
    assert [" ".join(one) for one in told] == found
