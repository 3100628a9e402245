"""`muster sweep --on slurm` and `--on pbs` against pretended commands: how often the scheduler is asked, and what its limits make."""

import sys

import pytest

from cluster.slurm import FakeSlurm
from kit.command import ran
from kit.waiting import wait_until

SCRIPT = """
import os
import subprocess
import sys
x = int(os.environ["MUSTER_SWEEP_X"])
print(f"loss={x}", flush=True)
if x >= 100:
    import signal
    signal.pause()
"""
ON = ("sweep", "--on", "slurm", "--run-id", "s", "--style", "env")


@pytest.fixture
def cluster(tmp_path):
    """Return a pretended Slurm whose user has the script above, and cancels his sweep at the end."""
    made = FakeSlurm(tmp_path)
    made.script(SCRIPT)
    yield made
    made("cancel", "s", "--now")
    made.wait_for_end()


def test_a_thousand_members_cost_one_submission_and_one_question_for_their_states(cluster):
    cluster.set(hold=True)
    done = cluster(*ON, "--detach", "--grid", "x=0:1000", "train.py")

    assert done.returncode == 0, done.stderr
    (submission,) = cluster.commands("sbatch")
    assert "--array=0-999" in submission
    assert cluster.commands("squeue") == []
    assert cluster.states() == ["waiting"] * 1000
    (question,) = cluster.commands("squeue")
    assert "--array" in question
    assert cluster.commands("scontrol") == [["scontrol", "show", "config"]]


def test_more_members_than_an_array_may_have_are_several_arrays_that_share_the_slots(cluster):
    cluster.set(max_array=3)
    done = cluster(*ON, "--metric", "loss", "--grid", "x=0:7", "--slots", "4", "train.py")

    assert done.returncode == 0, done.stderr
    assert "is jobs 1, 2, 3 of slurm" in done.stderr
    arrays = [
        next((word for word in words if word.startswith("--array=")), None)
        for words in cluster.commands("sbatch")
    ]
    assert arrays == ["--array=0-2%2", "--array=0-2%1", None]
    assert [member["value"] for member in cluster.status("s")["members"]] == [0, 1, 2, 3, 4, 5, 6]


def test_with_fewer_slots_than_arrays_one_begins_when_the_other_has_ended(cluster):
    cluster.set(max_array=2, hold=True)
    done = cluster(*ON, "--detach", "--grid", "x=0:6", "--slots", "2", "train.py")

    assert done.returncode == 0, done.stderr
    words = [" ".join(words) for words in cluster.commands("sbatch")]
    assert ["--dependency=afterany:1" in words[1], "--dependency=afterany:2" in words[2]] == [
        True
    ] * 2
    assert all("--array=0-1 " in one for one in words)
    assert cluster("cancel", "s").returncode in (0, 1)
    assert len(cluster.commands("scancel")) == 3
    assert set(cluster.states()) == {"cancelled"}


RULE = """
class Above:
    def __init__(self, goal):
        assert goal == "min"

    def report(self, member, step, value):
        return value > 50

    def ended(self, member, completed):
        pass
"""


def test_the_command_that_follows_ends_the_worst_elements_early(cluster):
    (cluster.folder / "rules.py").write_text(RULE)
    words = ("--metric", "loss", "--stop", "rules:Above", "--grid", "x=1,100,2", "train.py")
    refused = cluster(*ON, "--detach", *words)
    assert refused.returncode == 2
    assert "`--stop` can't end members that nobody follows" in refused.stderr
    done = cluster(*ON, "--grace", "5s", *words)

    assert done.returncode == 0, done.stderr
    assert cluster.states() == ["succeeded", "stopped", "succeeded"]
    assert cluster.status("s")["members"][1]["why"] == "the rule `rules:Above` has ended it early"
    assert [words[-1] for words in cluster.commands("scancel")] == ["1_1"]
    assert "have succeeded" in cluster("restart", "s").stderr


CLIENT = """
import torchmuster

def work(x, y):
    return {"loss": x * y}

if __name__ == "__main__":
    sweep = torchmuster.sweep(work, {"x": [2, 3]}, y=0.5, on="slurm", metric="loss", run_id="s")
    print(sweep.results(120.0), sweep.best().number)
"""


def test_a_function_travels_to_the_elements_and_its_values_come_back(cluster):
    (cluster.folder / "client.py").write_text(CLIENT)
    done = ran([sys.executable, "client.py"], limit_s=150, cwd=cluster.folder, env=cluster.env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[{'loss': 1.0}, {'loss': 1.5}] 0\n"
    assert len(cluster.commands("sbatch")) == 1


# On PBS: one array, failures, one element less.

PBS_SCRIPT = """
import os, sys
x = int(os.environ["MUSTER_SWEEP_X"])
print(f"loss={x * 10}", flush=True)
if x == 1 and not os.path.exists("mended"):
    raise ValueError("x is 1")
if sys.argv[1:] == ["wait"]:
    import signal
    signal.pause()
"""
ON_PBS = ("sweep", "--on", "pbs", "--run-id", "s", "--style", "env", "--cpus-per-node", "1")


@pytest.fixture
def muster(pbs):
    """Return a function that runs `muster` on the login node of the pretended PBS."""
    pbs.muster.script(PBS_SCRIPT)
    return pbs.muster


def test_a_sweep_is_one_array_and_failed_members_run_again(muster, tmp_path):
    done = muster(*ON_PBS, "--metric", "loss", "--grid", "x=0:3", "train.py")

    assert done.returncode == 1, done.stderr
    assert "[]" in done.stderr.partition("is job ")[2].split()[0]
    assert muster.states() == ["succeeded", "failed", "succeeded"]
    assert [member["value"] for member in muster.status("s")["members"]] == [0.0, 10.0, 20.0]
    (tmp_path / "mended").touch()
    again = muster("restart", "s")
    assert again.returncode == 0, again.stderr
    assert muster.states() == ["succeeded"] * 3


def test_an_array_is_cancelled_as_one(muster):
    assert muster(*ON_PBS, "--detach", "--grid", "x=2:4", "train.py", "--", "wait").stdout == "s\n"
    wait_until(lambda: muster.states() == ["running"] * 2, "two members", limit_s=90)
    assert muster("cancel", "s").returncode == 0
    wait_until(lambda: muster.states() == ["cancelled"] * 2, "their ends", limit_s=90)


def test_what_pbs_says_of_one_element_is_told_of_that_member_alone(pbs, muster, tmp_path):
    assert muster(*ON_PBS, "--detach", "--grid", "x=2:5", "train.py", "--", "wait").stdout == "s\n"
    wait_until(lambda: muster.states() == ["running"] * 3, "three members", limit_s=90)
    logs = [tmp_path / f"home/runs/s/members/s.{n}/logs" for n in range(3)]
    wait_until(lambda: all(list(log.rglob("rank-0.log")) for log in logs), "their workers")

    pbs.end("0[1].ctl", "mem 799544kb exceeded limit 716800kb")

    # Its head knows only of a signal, until it has asked PBS.
    wait_until(lambda: muster.states()[1] == "failed", "its end", limit_s=60)
    (ended,) = [member for member in muster.status("s")["members"] if member["state"] != "running"]
    assert ended["exit_code"] == 137
    assert "memory" in ended["why"]
    assert muster.states()[::2] == ["running"] * 2
    assert muster("cancel", "s").returncode == 0
