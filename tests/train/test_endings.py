"""A worker that ends before its training does ends at once, as it says, and leaves nothing behind.

The time-out of its world is an hour: who waits for it does not end in the time that a test has.
"""

from pathlib import Path

import pytest

from kit.command import muster_env, spawned
from kit.ports import reserve_port
from launching import PYTHON, muster

SCRIPT = Path(__file__).with_name("ending_script.py")
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


def run_until_end(line, environment):
    process = spawned(line, env=environment)
    try:
        said = process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.parametrize("how", ["raise", "exit", "leave"])
def test_an_end_under_muster_is_prompt_and_clean(how, tmp_path):
    ended = muster(tmp_path / "home", 2, SCRIPT, how, tmp_path, check=False)
    assert ended.returncode == WAYS[how], ended.stderr
    assert ("ValueError: bad batch" in ended.stderr) == (how == "raise"), ended.stderr
    assert not loader_processes(tmp_path)


@pytest.mark.parametrize("how", ["raise", "exit", "break"])
def test_an_end_without_a_launcher_is_prompt_and_clean(how, tmp_path):
    code, said = run_until_end([PYTHON, SCRIPT, how, tmp_path], muster_env(tmp_path / "home"))
    assert code == WAYS[how], said
    assert ("ValueError: bad batch" in said) == (how == "raise"), said
    assert not loader_processes(tmp_path)


def test_a_rank_that_raises_takes_the_other_along_where_nobody_kills_it(tmp_path):
    """Two plain processes, as `srun --kill-on-bad-exit=0` leaves them."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
    ranks = [
        spawned(
            [PYTHON, str(SCRIPT), "raise", str(tmp_path)],
            env=muster_env(tmp_path / "home", RANK=str(rank), **common),
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == WAYS["raise"], said[1]
    assert ranks[0].returncode not in (0, None), said[0]
    assert not loader_processes(tmp_path)
