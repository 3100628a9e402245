"""A rank that makes another number of collectives than the rest is named, not waited for."""

from pathlib import Path

import pytest

from launching import muster

SCRIPT = Path(__file__).with_name("uneven_script.py")


@pytest.mark.parametrize(("rank", "step", "size"), [(0, 0, 5), (2, 1, 1000)])
def test_a_collective_that_only_one_rank_makes_is_found_in_the_first_steps(
    tmp_path, rank, step, size
):
    ended = muster(tmp_path / "home", 3, SCRIPT, rank, step, size, check=False)
    assert ended.returncode != 0
    assert (
        f"the ranks call different numbers of collectives in step {step + 1} of this attempt"
        in ended.stderr
    )
    assert f"rank {rank}: " in ended.stderr
    assert "(`if rank == 0:`, an early `continue`)" in ended.stderr


@pytest.mark.short
def test_ranks_in_lockstep_are_left_alone(tmp_path):
    muster(tmp_path / "home", 3, SCRIPT, -1, 0, 1)
