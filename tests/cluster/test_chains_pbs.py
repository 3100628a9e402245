"""Training longer than its job, on the pretended PBS: three links by each way, and what is refused."""

import json
import os
import signal
from pathlib import Path

import pytest

from cluster.test_chains_slurm import (
    LEAVE,
    assert_each_step_once,
    jobs,
    links,
    said,
    steps,
    text,
    undisturbed,
    ways,
    weights,
)
from cluster.test_fake_slurm import SCRIPT
from kit.command import SOURCE
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
__all__ = ["undisturbed"]
CHAIN_SCRIPT = Path(__file__).with_name("chain_script.py")
ON = ("run", "--on", "q", "--nproc-per-node", "2", "--run-id", "r", "--resubmit", "2")


@pytest.fixture
def muster(pbs, tmp_path):
    """Return a function that runs `muster` on the login node of the pretended PBS."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def call(*words, way=None, limit_s=120):
        line = f'resubmit_with = "{way}"\n' if way else ""
        lines = ["export OMP_NUM_THREADS=1", f"export PYTHONPATH={SOURCE}"]
        setup = f"setup = {json.dumps(lines)}\n"
        (tmp_path / "muster.toml").write_text(f'[engines.q]\nkind = "pbs"\n{setup}{line}')
        return pbs.muster(*words, limit_s=limit_s)

    return call


def warn(pbs, job):
    """Send SIGUSR1 to the head: what a site's own script would do."""
    os.kill(pbs.pids_of(job, "script")[0], signal.SIGUSR1)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("requeue", marks=pytest.mark.lab),
        "submit",
        pytest.param("chain", marks=pytest.mark.lab),
    ],
)
def test_three_links_train_exactly_what_one_job_would(way, muster, pbs, tmp_path, undisturbed):
    words = (*ON, "--detach", str(CHAIN_SCRIPT), str(tmp_path), "--hold", "2")
    assert muster(*words, way=way).returncode == 0
    for attempt in ("0", "1"):
        wait_until(lambda attempt=attempt: steps(tmp_path).count(attempt) >= 3, "three steps", 90.0)
        warn(pbs, jobs(tmp_path)[-1])
    done = muster("wait", "r", way=way)

    assert done.returncode == 0, done.stderr
    assert weights(tmp_path) == undisturbed
    assert ways(tmp_path) == [None, way, way]
    assert len(set(jobs(tmp_path))) == (1 if way == "requeue" else 3)
    assert_each_step_once(tmp_path)


def test_the_queues_own_limit_is_the_end_and_workers_are_warned_before_it(muster, pbs, tmp_path):
    # The user gave no time: the end is the queue's, and qstat tells it. qsub is forbidden in jobs.
    pbs.settings(queue_walltime="00:00:30", refuses=["qsub"])
    (tmp_path / "leave.py").write_text(LEAVE)
    done = muster(*ON, "--warn", "10s", "leave.py")

    assert done.returncode == 0, done.stderr
    assert ways(tmp_path) == [None, "requeue"]


def test_where_no_way_is_allowed_the_run_ends_preempted(muster, pbs, tmp_path):
    pbs.settings(refuses=["qsub", "qrerun"])
    (tmp_path / "leave.py").write_text(LEAVE)
    assert muster(*ON, "--detach", "leave.py").stdout == "r\n"
    log = tmp_path / "home/runs/r/logs/main/train/attempt-0"
    ready = lambda: all("ready" in text(log / f"rank-{rank}.log") for rank in (0, 1))  # noqa: E731
    wait_until(ready, "the handlers", 60.0)
    warn(pbs, jobs(tmp_path)[-1])

    assert muster("wait", "r").returncode == 75
    assert links(tmp_path)["ended"] == "no way to continue"
    (job,) = jobs(tmp_path)
    pbs.wait(job, "F")
    assert "can't continue by submit: qsub: Bad UID for job execution" in said(tmp_path)
    assert "can't continue by requeue: qrerun: Unauthorized Request" in said(tmp_path)


@pytest.mark.lab
def test_cancel_ends_all_jobs_of_a_chain(muster, pbs, tmp_path):
    assert muster(*ON, "--detach", "train.py", "wait", way="chain").stdout == "r\n"
    log = tmp_path / "home/runs/r/logs/main/train/attempt-0/rank-0.log"
    wait_until(lambda: log.exists() and "sum 2" in log.read_text(), "the first line", 60.0)
    job = json.loads((tmp_path / "home/runs/r/job.json").read_text())

    assert muster("cancel", "r").returncode == 0

    for job_id in (job["job_id"], *job["chain"]):
        pbs.wait(job_id, "F")
    assert json.loads(muster("status", "r", "--json").stdout)["state"] == "cancelled"


@pytest.mark.lab
def test_a_complete_run_lets_the_rest_of_its_chain_end_with_0(muster, pbs, tmp_path):
    done = muster(*ON, "train.py", way="chain")

    assert done.returncode == 0, done.stderr
    job = json.loads((tmp_path / "home/runs/r/job.json").read_text())
    for job_id in job["chain"]:
        assert pbs.wait(job_id, "F")["Exit_status"] == 0
    assert os.path.exists(tmp_path / "home/runs/r/result.json")
    assert len(links(tmp_path)["links"]) == 1
