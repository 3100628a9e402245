"""What a real OpenPBS does to a job: it ends it for its memory, for a daemon, for its user; it suspends it; it starts it twice.

Where `PBS_PREFIX` names an installed one. What the pretended PBS of CI does in these cases was recorded here.
"""

import os
import re
import sys
import time

import pytest

from cluster.conftest import LabUser
from cluster.pbs import NOTES
from cluster.pbs_lab import PbsLab, why_not
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
pytestmark = pytest.mark.netns
ON = ("run", "--on", "pbs", "--run-id", "r", "--nproc-per-node", "1", "--detach")
EATS = """
import time
held = []
print("began", flush=True)
while True:
    if len(held) < 60:
        held.append(bytearray(20 << 20))
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def pbs_lab():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with PbsLab(3) as lab:
        if lab.run([sys.executable, "-c", "import torch"]).returncode:
            pytest.skip("the interpreter can't be read by another user")
        yield lab


@pytest.fixture
def login(pbs_lab):
    made = LabUser(pbs_lab)
    os.chown(made.folder, pbs_lab.uid, -1)
    yield made
    pbs_lab.reset()


def begin(login, *words, script=NOTES):
    login.script(script)
    began = login(*ON, *words, "train.py")
    assert began.returncode == 0, began.stderr


def steps(login):
    """Return (time, host, attempt) of each step."""
    path = login.folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(at), host, int(attempt)) for at, host, attempt, _ in map(str.split, lines)]


def wait_for_steps(login, more):
    """Wait until the training has made so many steps more."""
    wanted = len(steps(login)) + more
    wait_until(lambda: len(steps(login)) >= wanted, f"{more} steps more", 90.0)


def end_of(login):
    waited = login("wait", "r")
    return waited, login.read("result.json")


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_that_is_started_elsewhere_has_one_head_and_one_training(login, pbs_lab, nodes):
    begin(login, "--nodes", str(nodes))
    wait_for_steps(login, 1)
    first = steps(login)[0][1]

    pbs_lab.set_link(first, "down")
    # It takes the server a minute to miss a host, and ten seconds more to give it up.
    wait_until(lambda: steps(login)[-1][1] != first, "a step elsewhere", 240.0)
    pbs_lab.set_link(first, "up")
    wait_for_steps(login, 200)
    (login.folder / "end").touch()

    waited, result = end_of(login)
    assert waited.returncode == 0, waited.stderr
    assert (result["state"], result["attempts"]) == ("succeeded", 2)
    last = max(at for at, _, attempt in steps(login) if attempt == 0)
    assert last < min(at for at, _, attempt in steps(login) if attempt == 1), "never both"


def test_a_limit_of_memory_is_the_cause(login):
    begin(login, "--mem", "500Mi", script=EATS)
    waited, result = end_of(login)
    assert waited.returncode == 137, waited.stderr
    assert result["report"]["error"] == "the job used more memory than it has"
    assert "=>> PBS: job killed: mem" in result["report"]["because"][0]


def test_qdel_is_a_cancel(login, pbs_lab):
    begin(login)
    wait_for_steps(login, 1)
    pbs_lab.must("qdel", login.job())
    waited, result = end_of(login)
    assert (waited.returncode, result["state"]) == (143, "cancelled")
    assert "and terminated by" in result["report"]["because"][0]


def test_a_daemon_that_starts_anew_ends_a_run_of_a_fixed_size_as_preempted(login, pbs_lab):
    begin(login, "--nodes", "2")
    wait_for_steps(login, 1)
    pbs_lab.restart_mom("n2")
    waited, result = end_of(login)
    assert (waited.returncode, result["state"]) == (75, "preempted")


def test_a_daemon_that_starts_anew_costs_a_run_of_a_range_one_node_at_most(login, pbs_lab):
    begin(login, "--nodes", "1:2")
    wait_for_steps(login, 1)
    pbs_lab.restart_mom("n2")
    pbs_lab.wait_for_nodes("n2")  # it may end the agent there, or let it live
    wait_for_steps(login, 400)
    (login.folder / "end").touch()
    waited, result = end_of(login)
    assert (waited.returncode, result["state"]) == (0, "succeeded")


@pytest.mark.parametrize("power", [True, False])
def test_cancel_counts_while_a_node_is_missing(login, pbs_lab, power):
    begin(login, "--nodes", "2")
    wait_for_steps(login, 1)
    other = re.search(r"muster: job \S+: \S+, (\S+)", login.said())[1]  # PBS chooses
    if power:
        pbs_lab.kill_node(other, unplug=True)
    else:
        pbs_lab.set_link(other, "down")
    wait_until(lambda: f"{other} was lost" in login.said(), "the loss", 60.0)
    assert login("cancel", "r").returncode == 0
    waited, result = end_of(login)
    assert (waited.returncode, result["state"]) == (143, "cancelled")


def test_suspended_time_does_not_count(login, pbs_lab):
    begin(login, "--time", "2m", "--warn", "30s")
    wait_for_steps(login, 1)
    pbs_lab.must("qsig", "-s", "suspend", login.job())
    wait_until(lambda: login.state() == "waiting", "the suspension", 60.0)
    assert "is suspended: no process of it answers" in login("stacks", "r").stderr
    before = time.monotonic()

    def passed():
        return time.monotonic() > before + 100.0

    wait_until(passed, "more than what was left until the warning", 120.0)
    pbs_lab.must("qsig", "-s", "resume", login.job())
    wait_for_steps(login, 300)
    assert login.state() == "running"
    assert login("cancel", "r").returncode == 0


def test_an_agent_that_can_not_start_says_why(login, pbs_lab):
    pbs_lab.restart_mom("n2", hides=login.folder)
    pbs_lab.wait_for_nodes("n2")
    begin(login, "--nodes", "2", "--time", "5m")
    said = "pbsdsh: task 0x00000000 exit status"
    wait_until(lambda: said in login.said(), "why n2 does not come", 60.0)
    (line,) = [line for line in login.said().splitlines() if said in line][:1]
    assert "waiting for 1 of 2 nodes: n2" in line
    assert "No such file or directory" in line
    assert login("cancel", "r").returncode == 0
    pbs_lab.restart_mom("n2")
