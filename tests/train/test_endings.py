"""A worker that ends before its training does ends at once, as it says, and leaves nothing behind.

The time-out of its world is an hour: who waits for it does not end in the time that a test has. And a rank that makes another
number of collectives than the rest is named, not waited for.
"""

from pathlib import Path

import pytest

from kit.command import muster_env, spawned
from kit.ports import reserve_port
from launching import HERE, PYTHON, muster

SCRIPT, UNEVEN = HERE / "ending_script.py", HERE / "uneven_script.py"
WAYS = {"raise": 1, "exit": 3, "leave": 0, "break": 0}
LIMIT_S = 120.0


def loader_processes(out):
    """Return the pids that were loader processes, and are still there."""
    pids = [pid for file in out.glob("children-*") for pid in file.read_text().split()]
    assert pids, "the script had no loader processes"
    return [pid for pid in pids if _is_loader(pid)]


def _is_loader(pid):
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return SCRIPT.name.encode() in words


def run_until_end(out, how, *variables):
    """Run the script without a launcher, a process for each of these; return their exit codes, and what they said."""
    line = [PYTHON, SCRIPT, how, out]
    ranks = [spawned(line, env=muster_env(out / "home", **more)) for more in variables]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], said


@pytest.mark.parametrize("how", ["raise", "exit", "leave"])
def test_an_end_under_muster_is_prompt_and_clean(how, tmp_path):
    ended = muster(tmp_path / "home", 2, SCRIPT, how, tmp_path, check=False)
    assert ended.returncode == WAYS[how], ended.stderr
    assert ("ValueError: bad batch" in ended.stderr) == (how == "raise"), ended.stderr
    assert not loader_processes(tmp_path)


@pytest.mark.parametrize("how", ["raise", "exit", "break"])
def test_an_end_without_a_launcher_is_prompt_and_clean(how, tmp_path):
    (code,), (said,) = run_until_end(tmp_path, how, {})
    assert code == WAYS[how], said
    assert ("ValueError: bad batch" in said) == (how == "raise"), said
    assert not loader_processes(tmp_path)


def test_a_rank_that_raises_takes_the_other_along_where_nobody_kills_it(tmp_path):
    """Two plain processes, as `srun --kill-on-bad-exit=0` leaves them."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
    ranks = [{"RANK": str(rank), **common} for rank in range(2)]
    codes, said = run_until_end(tmp_path, "raise", *ranks)
    assert codes[1] == WAYS["raise"], said[1]
    assert codes[0] not in (0, None), said[0]
    assert not loader_processes(tmp_path)


@pytest.mark.parametrize(("rank", "step", "size"), [(0, 0, 5), (2, 1, 1000)])
def test_a_collective_that_only_one_rank_makes_is_found_in_the_first_steps(
    tmp_path, rank, step, size
):
    ended = muster(tmp_path / "home", 3, UNEVEN, rank, step, size, check=False)
    assert ended.returncode != 0
    assert (
        f"the ranks call different numbers of collectives in step {step + 1} of this attempt"
        in ended.stderr
    )
    assert f"rank {rank}: " in ended.stderr
    assert "(`if rank == 0:`, an early `continue`)" in ended.stderr


def test_ranks_in_lockstep_are_left_alone(tmp_path):
    muster(tmp_path / "home", 3, UNEVEN, -1, 0, 1)
