"""The numbers in torch's message tell a full GPU from one that others fill, and from one in pieces."""

import pytest

from torchmuster.diagnose.explain.advice import read_memory
from unit.diagnose.explain.logs import cause_of, explain, traceback_of

OTHERS = (
    "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 2 has a total capacity of 39.39 GiB of which 12.06 MiB is free."
    " Process 71 has 33.10 GiB memory in use. Including non-PyTorch memory, this process has 6.20 GiB memory in use."
)
OLD_OTHERS = (
    "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 1; 23.65 GiB total capacity; 9.10 GiB already allocated;"
    " 300.00 MiB free; 10.00 GiB reserved in total by PyTorch)"
)
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."
    " Including non-PyTorch memory, this process has 77.80 GiB memory in use. Of the allocated memory 76.10 GiB is allocated"
    " by PyTorch, and 640.00 MiB is reserved by PyTorch but unallocated."
)
IN_PIECES = FULL.replace("76.10 GiB is", "40.10 GiB is").replace("640.00 MiB", "36.60 GiB")


@pytest.mark.parametrize(
    ("message", "cause"),
    [(OTHERS, "gpu-memory-taken"), (OLD_OTHERS, "gpu-memory-taken"), (FULL, "cuda-out-of-memory")],
)
def test_who_holds_the_memory_decides(tmp_path, message, cause):
    log = traceback_of(f"torch.OutOfMemoryError: {message}")
    assert cause_of(tmp_path, job=log) == cause


def test_memory_in_pieces_is_advised_otherwise(tmp_path):
    first = explain(tmp_path, job=traceback_of(f"torch.OutOfMemoryError: {IN_PIECES}")).first
    assert first.cause == "cuda-out-of-memory"
    assert "expandable_segments" in first.hint
    assert "36.6 GiB" in first.error


def test_numbers_of_both_forms_are_read():
    new, old = read_memory(OTHERS), read_memory(OLD_OTHERS)
    assert (new.gpu, old.gpu) == ("2", "1")
    assert new.others / 2**30 == pytest.approx(33.18, abs=0.01)
    assert old.others / 2**30 == pytest.approx(13.36, abs=0.01)


def test_losses_that_stay_nan_are_a_failure_and_one_is_none(tmp_path):
    good = "".join(f"step {n} loss 1.{n}\n" for n in range(5))
    bad = "".join(f"step {n} loss nan\n" for n in range(5, 9))
    assert cause_of(tmp_path, job=good + bad) == "not-finite"


def test_a_loss_that_is_finite_again_is_no_failure(tmp_path):
    text = "step 1 loss 1.0\nstep 2 loss: nan\nstep 3 loss: nan\n"
    text += "".join(f"step {n} loss 0.{n}\n" for n in range(4, 9))
    assert cause_of(tmp_path, job=text) == "healthy"
