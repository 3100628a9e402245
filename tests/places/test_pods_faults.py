"""Runs, workflows, sweeps and functions in pods whose port-forward breaks by a random schedule: nothing goes without a word.

`PODS_SEEDS=100` tries as many schedules of each; few are tried by default.
"""

import json
import os
import random
import sys
import threading
import time

import pytest

from kit.command import ran
from places import live

SEEDS = range(int(os.environ.get("PODS_SEEDS", "1")))
SCRIPT = """
import sys, time
name, lasts_s = sys.argv[1], float(sys.argv[2])
for line in range(5):
    print(f"{name} {line}", flush=True)
    time.sleep(lasts_s / 5)
with open("model.txt", "w") as file:
    file.write(name)
"""
WORKFLOW = """
workflow:
  name: two
  groups:
  - name: first
    tasks:
    - name: make
      lead: true
      command: ["sh", "-c", "for i in 0 1 2 3 4; do echo make $i; sleep {lasts}; done; echo weights >{{{{output}}}}/model.txt"]
"""
SWEPT = """
import sys, time
for step in range(5):
    print(f"step {step} loss={sys.argv[1]}", flush=True)
    time.sleep(float(sys.argv[2]) / 5)
open("model.txt", "w").write(sys.argv[1])
"""
CALL = """
import sys, time
import torchmuster

def double(x, lasts_s):
    time.sleep(lasts_s)
    return 2 * x

if __name__ == "__main__":
    print(torchmuster.launch(double, 21, float(sys.argv[1]), on="kube", nodes=2).results())
"""


class Lab(live.Lab):
    """A cluster whose port-forward breaks by a schedule that a seed has made."""

    def __init__(self, folder, network):
        super().__init__(folder, network)
        for name, text in (("train.py", SCRIPT), ("swept.py", SWEPT), ("call.py", CALL)):
            (self.code / name).write_text(text)

    def break_by(self, rng, lasts_s):
        """Begin a schedule; at its end the way is whole. Return it in words."""
        modes = ["sleep 6", "sleep 12", "cut", "forbidden", ""]
        first = rng.choice(["", "sleep 6", "sleep 12", "cut"])
        steps, at_s = [(0.0, first)], 0.0
        for _ in range(rng.randrange(4)):
            at_s += rng.uniform(0.2, lasts_s + 4.0)
            steps.append((at_s, rng.choice(modes)))
        steps.append((at_s + rng.uniform(0.5, lasts_s + 8.0), ""))
        self.breaks(first)
        threading.Thread(target=self._work, args=(steps[1:], time.monotonic()), daemon=True).start()
        return str(steps)

    def _work(self, steps, begun):
        for at_s, mode in steps:
            time.sleep(max(0.0, begun + at_s - time.monotonic()))
            self.breaks(mode)

    def skip_refused(self, done):
        """Leave out a schedule that forbids the way just when it is asked for."""
        if "nobody could take what the run makes" in done.stderr:
            assert self.jobs() == []
            pytest.skip("it was refused at the start")

    def fetched(self, done):
        """Say whether all has come: at once, or by `fetch` after an end that says what did not."""
        self.skip_refused(done)
        if done.returncode == 0:
            return
        assert "did not come here" in done.stderr, done.stderr
        deadline = time.monotonic() + 60
        while (said := self("fetch", "r")).returncode and time.monotonic() < deadline:
            time.sleep(1.0)  # the way is broken still
        assert said.returncode == 0, said.stderr


@pytest.fixture
def lab(tmp_path):
    with live.live_cluster(Lab, tmp_path, num_nodes=3) as made:
        yield made


def of_seed(what, seed):
    rng = random.Random(f"{what} {seed}")
    return rng, rng.choice([0.5, 3.0, 8.0])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run(lab, seed):
    rng, lasts_s = of_seed("run", seed)
    nodes = rng.choice([1, 2])
    told = lab.break_by(rng, lasts_s)
    words = ("run", "--on", "kube", "--nodes", str(nodes), "--run-id", "r", "--start", "fresh")
    done = lab(*words, "train.py", "line", str(lasts_s))
    lab.fetched(done)
    lines = [f"line {number}" for number in range(5)]
    assert [line for line in done.stdout.splitlines() if line.startswith("line")] == lines, told
    for rank in range(nodes):
        log = lab.run_dir() / "logs" / "main" / "train" / "attempt-0" / f"rank-{rank}.log"
        assert log.read_text().splitlines() == lines, told
        assert (lab.run_dir() / "output" / f"r-{rank}" / "model.txt").read_text() == "line", told
    record = (lab.run_dir() / "events.jsonl").read_text()
    events = [json.loads(line)["event"] for line in record.splitlines()]
    assert events.count("run_ended") == events.count("attempt_started") == 1, told
    assert lab.jobs() == [], told


@pytest.mark.parametrize("seed", SEEDS)
def test_a_workflow(lab, seed):
    rng, lasts_s = of_seed("workflow", seed)
    told = lab.break_by(rng, lasts_s)
    text = WORKFLOW.format(lasts=lasts_s / 5)
    (lab.code / "two.yaml").write_text(text)
    done = lab("submit", "two.yaml", "--on", "kube", "--run-id", "r")
    lab.fetched(done)
    lines = lab("logs", "r", "make").stdout.splitlines()
    assert [line for line in lines if "make" in line] == [f"make {i}" for i in range(5)], told
    (model,) = lab.run_dir().glob("tasks/make/output/model.txt")
    assert model.read_text() == "weights\n", told
    assert lab.jobs() == [], told


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sweep(lab, seed):
    """Members wait for nobody: what did not come is named, and the sweep does not end with 0."""
    rng, lasts_s = of_seed("sweep", seed)
    told = lab.break_by(rng, lasts_s)
    words = ("sweep", "--on", "kube", "--run-id", "r", "--grid", "lr=1,2,3", "--slots", "2")
    done = lab(*words, "--metric", "loss", "swept.py", "--", "{lr}", str(lasts_s))
    lab.skip_refused(done)
    assert done.returncode in (0, 15), (told, done.stderr)
    shown = json.loads(lab("status", "r", "--json").stdout)
    values = sorted(member["value"] for member in shown["members"])
    assert values == [1.0, 2.0, 3.0], told
    made = sorted(path.read_text() for path in lab.run_dir().glob("members/*/output/*/model.txt"))
    if done.returncode == 0:
        assert (made, lab.jobs()) == (["1", "2", "3"], []), told
    else:
        missing = [m for m in shown["members"] if "did not come here" in str(m["why"])]
        assert len(made) + len(missing) >= 3, told
        assert lab.jobs() != [], told


@pytest.mark.lab
@pytest.mark.parametrize("seed", SEEDS)
def test_a_function(lab, seed):
    rng, lasts_s = of_seed("launch", seed)
    told = lab.break_by(rng, lasts_s)
    words = [sys.executable, "call.py", str(lasts_s)]
    done = ran(words, limit_s=240, env=lab.env(), cwd=lab.code)
    lab.skip_refused(done)
    assert done.returncode == 0, (told, done.stderr)
    assert "[42, 42]" in done.stdout, told
    assert lab.jobs() == [], told
