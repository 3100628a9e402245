"""How a run on a real Slurm ends: cancelled, its node lost, its time over, requeued, its client killed. And how it goes on in another job."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.test_chains import CHAIN_SCRIPT
from cluster.test_chains import LEAVE as LEAVE_FOR_ANOTHER
from kit.command import MUSTER
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
pytestmark = pytest.mark.netns
TOY = Path(__file__).parents[2] / "examples" / "toy_regression" / "train.py"
# Says how it is asked to leave; its files are in the run's log.
LEAVE = """
import os, signal, sys
def say(*words):
    os.write(1, f"{' '.join(words)} on {os.uname().nodename}\\n".encode())
def leave(signum, frame):
    say(signal.Signals(signum).name)
    sys.exit(0 if signum == signal.SIGUSR1 else 1)
for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, leave)
say("began", os.environ["WORLD_SIZE"])
while True:
    signal.pause()
"""
ON = ("run", "--on", "slurm", "--run-id", "r", "--detach")


# About 1 of 10 times the last line of the second node's workers is not in their logs: not understood yet.
@pytest.mark.lab
def test_scancel_gives_workers_sigterm_and_leaves_nothing(login, slurm_lab):
    begin(login, "--nodes", "2", "--nproc-per-node", "2")

    slurm_lab.run(["scancel", login.job()])
    slurm_lab.wait_for_job(login.job(), "CANCELLED")

    # Slurm calls the job cancelled while its processes still end.
    wait_until(lambda: not left_on(slurm_lab, "n1", "n2"), "the end of all processes")
    for rank, node in enumerate(("n1", "n1", "n2", "n2")):
        assert login.log(rank).read_text().splitlines()[-1] == f"SIGTERM on {node}"
    shown = login.status()
    assert (shown["state"], shown["result"]["state"]) == ("cancelled", "cancelled")


def test_a_run_that_may_be_smaller_goes_on_without_a_lost_node(login, slurm_lab):
    begin(login, "--nodes", "1:2", "--nproc-per-node", "1")
    assert slurm_lab.job(login.job())["NodeList"] == "n[1-2]"

    slurm_lab.kill_node("n2")

    login.wait_for("began", attempt=1, limit_s=60.0)
    assert login.log(attempt=1).read_text() == "began 1 on n1\n"
    shown = login("status", "r").stdout
    assert "n2" in next(line for line in shown.splitlines() if line.startswith("0 "))
    assert login("cancel", "r").returncode == 0


def test_a_requeued_training_ends_with_the_weights_of_one_that_was_left_alone(login, slurm_lab):
    alone = slurm_lab.run([sys.executable, TOY, "--snapshots", "alone"], cwd=str(login.folder))
    assert alone.returncode == 0, alone.stderr
    (login.folder / "train.py").write_text(slowed(TOY.read_text()))
    words = (*ON, "--nodes", "2", "--nproc-per-node", "2", "train.py")
    assert login(*words, HOLD=str(login.folder / "go")).returncode == 0
    wait_until(lambda: len(list(login.folder.glob("held-*"))) == 4, "the held step")

    slurm_lab.run(["scontrol", "requeue", login.job()])
    (login.folder / "go").touch()
    slurm_lab.wait_for_job(login.job(), "COMPLETED", "FAILED", limit_s=120.0)

    logs = [log.read_text() for log in sorted(login.log().parents[1].glob("*/rank-0.log"))]
    assert len(logs) >= 2
    assert re.findall("learned (.*)", logs[-1]) == re.findall("learned (.*)", alone.stdout)
    assert slurm_lab.job(login.job())["Restarts"] == "1"


@pytest.mark.parametrize(
    ("lost", "left", "again"),
    [pytest.param("n2", "n1", "n[1,3]", marks=pytest.mark.lab), ("n1", "n2", "n[2-3]")],
)
def test_a_run_of_fixed_size_that_lost_a_node_is_requeued_as_a_plain_job_would_be(
    login, slurm_lab, lost, left, again
):
    begin(login, "--nodes", "2", "--nproc-per-node", "1")
    assert slurm_lab.job(login.job())["NodeList"] == "n[1-2]"
    slurm_lab.kill_node(lost)
    wait_until(lambda: "it is requeued" in login.said(), "the requeue", 120.0)
    first = login.read("result.json")
    assert (first["state"], first["exit_code"]) == ("preempted", 75)
    assert first["report"]["error"].startswith(f"{lost} was lost, and no node came in its place")
    login.wait_for("began", attempt=1)
    assert login.log(attempt=1).read_text() == f"began 2 on {left}\n"
    assert slurm_lab.job(login.job())["NodeList"] == again
    assert login.state() == "running"
    assert login("cancel", "r").returncode == 0


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.lab)])
def test_a_run_that_is_preempted_with_a_grace_comes_back(login, slurm_lab, nodes):
    """Who ends at the begin of the grace is not started again by Slurm, which signals the agents on other nodes then."""
    begin(login, "--nodes", nodes, "--nproc-per-node", "1", "--cpus-per-node", "4")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with login.popen([*MUSTER, "wait", "r"], **pipes) as waiting:
        node = slurm_lab.job(login.job())["BatchHost"]
        urgent = slurm_lab.submit("true", "--partition=urgent", "--exclusive", f"--nodelist={node}")
        if nodes > 1:
            said = "it stays until slurm ends it"
            wait_until(lambda: said in login.said(), "the word on it", 60.0)
            first = login.read("result.json")
            assert (first["state"], first["exit_code"]) == ("preempted", 75)
            assert "preempts the job" in first["report"]["error"]
            assert waiting.poll() is None

        slurm_lab.wait_for_job(urgent, "COMPLETED", limit_s=90)
        login.wait_for("began", attempt=1)
        assert "DUE TO PREEMPTION" in login.said()
        assert slurm_lab.job(login.job())["Restarts"] == "1"
        assert login.state() == "running"
        assert waiting.poll() is None  # it knows that the job comes back
        assert login("cancel", "r").returncode == 0
        waiting.communicate(timeout=180)
        assert waiting.returncode in (130, 143)


@pytest.mark.lab
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("links", [1, 0])
def test_a_run_whose_preempted_job_slurm_does_not_start_again(login, slurm_lab, nodes, links):
    """`--resubmit` goes on; without it the run is over, and whoever waits hears so."""
    change = ["scontrol", "update", "PartitionName=main"]
    slurm_lab.run([*change, "PreemptMode=CANCEL"])
    try:
        words = ("--nodes", nodes, "--nproc-per-node", "1", "--cpus-per-node", "4")
        begin(login, *words, "--resubmit", links)
        node = slurm_lab.job(login.job())["BatchHost"]
        slurm_lab.submit("true", "--partition=urgent", "--exclusive", f"--nodelist={node}")
        if links:
            login.wait_for("began", attempt=1)
            assert login("cancel", "r").returncode == 0
        else:
            assert login("wait", "r").returncode == 75
            assert login.state() == "preempted"
            assert slurm_lab.job(login.job())["JobState"] == "PREEMPTED"
    finally:
        slurm_lab.run([*change, "PreemptMode=REQUEUE"])


def test_a_chain_of_groups_goes_on_when_its_client_is_killed(login, slurm_lab):
    (login.folder / "w.yaml").write_text(CHAIN.replace("{folder}", str(login.folder)))
    words = [*MUSTER, "submit", "w.yaml", "--on", "slurm", "--run-id", "w"]
    with login.popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
        wait_until(login.path("jobs.json", "w").exists, "the submission")
        client.kill()
    submitted = login.read("jobs.json", "w")["jobs"]
    assert len(submitted) == 3
    (login.folder / "go").touch()

    for job in submitted.values():
        slurm_lab.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED", limit_s=30.0)

    assert (login.folder / "end").read_text() == "one\ntwo\nthree\n"
    assert login.state("w") == "succeeded"


@pytest.mark.slow
@pytest.mark.lab
def test_workers_are_warned_before_the_time_of_their_job_ends(login, slurm_lab):
    begin(login, "--nodes", "2", "--nproc-per-node", "1", "--time", "1m", "--warn", "40s")

    job = slurm_lab.wait_for_job(login.job(), "COMPLETED", "FAILED", "TIMEOUT", limit_s=150.0)

    assert job["JobState"] == "COMPLETED"
    for rank, node in enumerate(("n1", "n2")):
        assert login.log(rank).read_text().splitlines()[-1] == f"SIGUSR1 on {node}"
    minutes, seconds = job["RunTime"].split(":")[1:]
    assert 18 <= int(minutes) * 60 + int(seconds) <= 40


CHAIN = """
workflow:
  name: chain
  groups:
  - name: first
    tasks:
    - name: one
      command: [bash, -c, "until [ -e {folder}/go ]; do sleep 0.1; done; echo one > {{output}}/x"]
  - name: second
    tasks:
    - name: two
      command: [bash, -c, "(cat {{input:0}}/x; echo two) > {{output}}/x"]
      inputs: [{task: one}]
  - name: third
    tasks:
    - name: three
      command: [bash, -c, "(cat {{input:0}}/x; echo three) > {folder}/end"]
      inputs: [{task: two}]
"""


def begin(login, *words):
    """Submit the script that waits, and wait until all of its workers do."""
    login.script(LEAVE)
    done = login(*ON, *words, "train.py")
    assert done.returncode == 0, done.stderr

    def began():
        logs = list(login.log().parent.glob("rank-*.log"))
        texts = [log.read_text() for log in logs]
        return texts and len(texts) == int(texts[0].split()[1]) and all(texts)

    wait_until(lambda: login.log().exists() and login.log().read_text(), "rank 0")
    wait_until(began, "all workers")


def slowed(text):
    """Return the training with a step at which the first attempt's ranks wait for a file."""
    hold = """
            if run.steps_done == 50 and not os.path.exists(os.environ["HOLD"]):
                open(f"held-{os.environ['RANK']}", "w").close()
                while not os.path.exists(os.environ["HOLD"]):
                    time.sleep(0.01)
"""
    found = "            run.step(loss=loss)\n"
    assert found in text
    return text.replace(found, found + hold).replace(
        "import sys\n", "import os\nimport sys\nimport time\n"
    )


def left_on(lab, *nodes):
    """Return what runs on these nodes beside Slurm's own and the lab's."""
    found = lab.commands_on(*nodes).values()
    return [w for w in found if b"slurm" not in w[0] and not any(b"enter.py" in x for x in w)]


# A run that is longer than its job.
CHAIN_ON = ("run", "--on", "slurm", "--nodes", "2", "--nproc-per-node", "1", "--run-id", "r")
REQUEUE_LIMIT_S = 180.0  # Slurm waits up to two minutes before it starts a requeued job again


def test_a_warned_run_goes_on_by_requeue(login, slurm_lab):
    login.script(LEAVE_FOR_ANOTHER)
    done = login(*CHAIN_ON, "--resubmit", "1", "--detach", "train.py")
    assert done.stdout == "r\n", done.stderr
    for rank in (0, 1):
        login.wait_for("ready", rank)

    slurm_lab.run(["scancel", "--signal=USR1", "--batch", login.job()])

    login.wait_for_links(2)
    assert login.status()["result"] is None
    assert login("wait", "r", limit_s=REQUEUE_LIMIT_S).returncode == 0
    assert [link["way"] for link in login.links()] == [None, "requeue"]


@pytest.mark.lab
@pytest.mark.parametrize("way", ["requeue", "submit", "chain"])
def test_three_links_of_two_minutes_train_to_the_end(login, way):
    text = f'[engines.lab]\nkind = "slurm"\nresubmit_with = "{way}"\n'
    (login.folder / "muster.toml").write_text(text)
    words = (
        *CHAIN_ON[:1],
        "--on",
        "lab",
        *CHAIN_ON[3:],
        "--time",
        "2m",
        "--warn",
        "90s",
        "--resubmit",
        "2",
    )
    script = (str(CHAIN_SCRIPT), str(login.folder), "--hold", "2", "--hold-s", "8")
    done = login(*words, *script, limit_s=900.0)

    assert done.returncode == 0, done.stderr
    assert [link["way"] for link in login.links()] == [None, way, way]
    lines = (login.folder / "steps-0").read_text().splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(1, 25))
