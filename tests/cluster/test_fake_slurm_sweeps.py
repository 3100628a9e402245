"""`muster sweep --on slurm` against pretended commands: how often the scheduler is asked, and what its limits make."""

import json
import os
import sys
from pathlib import Path

import pytest

from kit.command import muster_env, ran, run_muster
from kit.waiting import wait_until

FAKES = Path(__file__).parents[1] / "fakes" / "slurm"
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


class Cluster:
    """A pretended cluster, and its user."""

    def __init__(self, folder):
        self.folder, self.queue = folder, folder / "queue"
        self.queue.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        fakes = {"PATH": f"{FAKES}:{os.environ['PATH']}", "FAKE_SLURM": str(self.queue)}
        self.env = muster_env(folder / "home", **fakes)

    def set(self, **settings):
        (self.queue / "settings").write_text(json.dumps(settings))

    def __call__(self, *words):
        return run_muster(*words, env=self.env, cwd=self.folder)

    def commands(self, name):
        lines = (self.queue / "commands.log").read_text().splitlines()
        return [words for line in lines if (words := json.loads(line))[0] == name]

    def members(self):
        return json.loads(self("status", "s", "--json").stdout)["members"]

    def states(self):
        return [member["state"] for member in self.members()]

    def jobs(self):
        return [json.loads(path.read_text()) for path in sorted(self.queue.glob("*.json"))]

    def lives(self, pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    made("cancel", "s", "--now")
    for job in made.jobs():
        wait_until(lambda job=job: not made.lives(job["pid"]), "the end of an array", limit_s=60)


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
    assert [member["value"] for member in cluster.members()] == [0, 1, 2, 3, 4, 5, 6]


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
    assert cluster.members()[1]["why"] == "the rule `rules:Above` has ended it early"
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
