"""`muster sweep --on pbs` against pretended commands that answer as a real server did: one array, failures, one element less."""

import json

import pytest

from kit.waiting import wait_until

SCRIPT = """
import os, sys
x = int(os.environ["MUSTER_SWEEP_X"])
print(f"loss={x * 10}", flush=True)
if x == 1 and not os.path.exists("mended"):
    raise ValueError("x is 1")
if sys.argv[1:] == ["wait"]:
    import signal
    signal.pause()
"""
ON = ("sweep", "--on", "pbs", "--run-id", "s", "--style", "env", "--cpus-per-node", "1")


@pytest.fixture
def muster(pbs, tmp_path):
    """Return a function that runs `muster` on the login node of the pretended PBS."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return pbs.muster


def members(muster):
    return json.loads(muster("status", "s", "--json").stdout)["members"]


def states(muster):
    return [member["state"] for member in members(muster)]


def test_a_sweep_is_one_array_and_failed_members_run_again(muster, tmp_path):
    done = muster(*ON, "--metric", "loss", "--grid", "x=0:3", "train.py")

    assert done.returncode == 1, done.stderr
    assert "[]" in done.stderr.partition("is job ")[2].split()[0]
    assert states(muster) == ["succeeded", "failed", "succeeded"]
    assert [member["value"] for member in members(muster)] == [0.0, 10.0, 20.0]
    (tmp_path / "mended").touch()
    again = muster("restart", "s")
    assert again.returncode == 0, again.stderr
    assert states(muster) == ["succeeded"] * 3


def test_an_array_is_cancelled_as_one(muster):
    assert muster(*ON, "--detach", "--grid", "x=2:4", "train.py", "--", "wait").stdout == "s\n"
    wait_until(lambda: states(muster) == ["running"] * 2, "two members", limit_s=90)
    assert muster("cancel", "s").returncode == 0
    wait_until(lambda: states(muster) == ["cancelled"] * 2, "their ends", limit_s=90)


def test_what_pbs_says_of_one_element_is_told_of_that_member_alone(pbs, muster, tmp_path):
    assert muster(*ON, "--detach", "--grid", "x=2:5", "train.py", "--", "wait").stdout == "s\n"
    wait_until(lambda: states(muster) == ["running"] * 3, "three members", limit_s=90)
    logs = [tmp_path / f"home/runs/s/members/s.{n}/logs" for n in range(3)]
    wait_until(lambda: all(list(log.rglob("rank-0.log")) for log in logs), "their workers")

    pbs.end("0[1].ctl", "mem 799544kb exceeded limit 716800kb")

    # Its head knows only of a signal, until it has asked PBS.
    wait_until(lambda: states(muster)[1] == "failed", "its end", limit_s=60)
    (ended,) = [member for member in members(muster) if member["state"] != "running"]
    assert ended["exit_code"] == 137
    assert "memory" in ended["why"]
    assert states(muster)[::2] == ["running"] * 2
    assert muster("cancel", "s").returncode == 0
