"""Training longer than its job, on the pretended Slurm: three links by each way, and what is refused."""

import json
import subprocess
from pathlib import Path

import pytest

from cluster.test_fake_slurm import SCRIPT, cluster, muster
from kit.command import muster_env, run_muster
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
__all__ = ["cluster"]
CHAIN_SCRIPT = Path(__file__).with_name("chain_script.py")
ON = ("run", "--on", "gpu", "--nproc-per-node", "2", "--run-id", "r", "--resubmit", "2")
NUM_STEPS = 24
DEAF = """
import os, signal, time
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while True:
        signal.pause()
"""
LEAVE = """
import os, signal, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    print("ready", flush=True)
    signal.pause()
"""


@pytest.fixture
def site(cluster, tmp_path):
    """Return a function that says what the pretended cluster and the section of muster.toml are like."""

    def configure(way=None, **settings):
        line = f'resubmit_with = "{way}"\n' if way else ""
        (tmp_path / "muster.toml").write_text(f'[engines.gpu]\nkind = "slurm"\n{line}')
        (tmp_path / "queue" / "settings").write_text(json.dumps(settings))
        return cluster

    return configure


def links(folder):
    return json.loads((folder / "home/runs/r/links.json").read_text())


def ways(folder):
    return [link["way"] for link in links(folder)["links"]]


def jobs(folder):
    return [link["job_id"] for link in links(folder)["links"]]


def text(path):
    return path.read_text() if path.exists() else ""


def said(folder):
    return text(folder / "home/runs/r/job.log")


def steps(folder):
    """Return the attempt of each step that rank 0 has done."""
    return [line.split()[0] for line in text(folder / "steps-0").splitlines()]


def assert_each_step_once(folder):
    numbers = [int(line.split()[1]) for line in text(folder / "steps-0").splitlines()]
    assert numbers == list(range(1, NUM_STEPS + 1))
    assert sorted(set(steps(folder))) == ["0", "1", "2"]


def warn(environment, job):
    """Send what a site's own `--signal=B:USR1@...` sends."""
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=environment, check=True)


def weights(folder):
    return [(folder / f"weights-{rank}").read_text() for rank in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the weights of a run that nobody interrupts."""
    out = tmp_path_factory.mktemp("undisturbed")
    words = ["run", "--here", "--nproc-per-node", "2", str(CHAIN_SCRIPT), str(out)]
    done = run_muster(*words, env=muster_env(out / "home"))
    assert done.returncode == 0, done.stderr
    return weights(out)


@pytest.mark.parametrize(
    "way",
    [
        "requeue",
        pytest.param("submit", marks=pytest.mark.lab),
        pytest.param("chain", marks=pytest.mark.lab),
    ],
)
def test_three_links_train_exactly_what_one_job_would(way, site, tmp_path, undisturbed):
    environment = site(way, limit_s=3600, tells_end=False)
    words = (*ON, "--detach", str(CHAIN_SCRIPT), str(tmp_path), "--hold", "2")
    assert muster(environment, tmp_path, *words).returncode == 0
    for attempt in ("0", "1"):
        wait_until(lambda attempt=attempt: steps(tmp_path).count(attempt) >= 3, "three steps", 90.0)
        warn(environment, jobs(tmp_path)[-1])
    done = muster(environment, tmp_path, "wait", "r", limit_s=120)

    assert done.returncode == 0, done.stderr
    assert weights(tmp_path) == undisturbed
    assert ways(tmp_path) == [None, way, way]
    assert jobs(tmp_path) == (["1"] * 3 if way == "requeue" else ["1", "2", "3"])
    assert_each_step_once(tmp_path)


@pytest.mark.lab
def test_the_queues_own_limit_is_the_end_and_workers_are_warned_before_it(site, tmp_path):
    # The user gave no time and the job's environment has none: squeue tells what is left.
    environment = site(limit_s=30, tells_end=False)
    (tmp_path / "leave.py").write_text(LEAVE)
    done = muster(environment, tmp_path, *ON, "--warn", "10s", "leave.py")

    assert done.returncode == 0, done.stderr
    assert ways(tmp_path) == [None, "requeue"]
    assert "the job ends in 10 s: workers get SIGUSR1" in said(tmp_path)
    assert "link 2 of 3" in done.stderr


@pytest.mark.lab
def test_workers_that_do_not_follow_are_stopped_and_the_run_goes_on(site, tmp_path):
    environment = site("submit", limit_s=30)
    (tmp_path / "deaf.py").write_text(DEAF)
    done = muster(environment, tmp_path, *ON, "--warn", "14s", "--tee", "all", "deaf.py")

    assert done.returncode == 0, done.stderr
    assert "attempt 1" in done.stdout
    assert "the workers did not leave, and the job ends in 7 s" in said(tmp_path)


def leave(environment, folder):
    """Start a run whose workers leave at the warning, and warn them."""
    (folder / "leave.py").write_text(LEAVE)
    started = muster(environment, folder, *ON, "--detach", "leave.py")
    assert started.stdout == "r\n", started.stderr
    log = folder / "home/runs/r/logs/main/train/attempt-0"
    ready = lambda: all("ready" in text(log / f"rank-{rank}.log") for rank in (0, 1))  # noqa: E731
    wait_until(ready, "the handlers", 60.0)
    warn(environment, "1")
    return started


def test_a_refused_requeue_is_followed_by_a_submission_and_one_line_says_why(site, tmp_path):
    environment = site("requeue", limit_s=3600, refuse=["requeue"])
    leave(environment, tmp_path)

    assert muster(environment, tmp_path, "wait", "r").returncode == 0
    assert ways(tmp_path) == [None, "submit"]
    refused = "can't continue by requeue: slurm: error: requeue: Access/permission denied"
    assert refused in said(tmp_path)
    assert "the run continues: link 2 of 3 is job 2, by submit" in said(tmp_path)


@pytest.mark.lab
def test_where_no_way_is_allowed_the_run_ends_preempted(site, tmp_path):
    environment = site(limit_s=3600, refuse=["requeue", "sbatch"])
    leave(environment, tmp_path)

    assert muster(environment, tmp_path, "wait", "r").returncode == 75
    assert links(tmp_path)["ended"] == "no way to continue"
    status = muster(environment, tmp_path, "status", "r", "--json").stdout
    assert json.loads(status)["state"] == "preempted"


@pytest.mark.lab
def test_a_refused_chain_is_said_and_the_head_continues_by_itself(site, tmp_path):
    environment = site("chain", limit_s=3600, refuse=["dependency"])
    started = leave(environment, tmp_path)

    assert "only 0 of 2 further jobs were taken" in started.stderr
    assert muster(environment, tmp_path, "wait", "r").returncode == 0
    assert ways(tmp_path) == [None, "requeue"]


@pytest.mark.lab
def test_a_run_whose_next_link_waits_has_not_ended(site, tmp_path):
    environment = site("requeue", limit_s=3600, pending_s=8.0)
    leave(environment, tmp_path)
    path = tmp_path / "home/runs/r/links.json"
    wait_until(lambda: path.exists() and len(links(tmp_path)["links"]) == 2, "the second link")

    status = muster(environment, tmp_path, "status", "r").stdout
    assert "link 2 of 3" in status
    assert "preempted" not in status
    assert muster(environment, tmp_path, "wait", "r").returncode == 0


def test_a_failed_run_is_not_continued_and_its_chain_ends_at_once(site, tmp_path):
    environment = site("chain", limit_s=60)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = (*ON, "--max-restarts", "0", "train.py", "fail")
    done = muster(environment, tmp_path, *words)

    assert done.returncode == 1
    queue = tmp_path / "queue"
    for number in (2, 3):
        path = queue / f"{number}.json"
        over = lambda path=path: json.loads(path.read_text())["state"] == "COMPLETED"  # noqa: E731
        wait_until(over, f"job {number} to end with 0")
    assert len(links(tmp_path)["links"]) == 1
    log = (tmp_path / "home/runs/r/job.log").read_text()
    assert log.count("the run is complete (failed): nothing is left to do") == 2


def test_cancel_ends_all_jobs_of_a_chain(site, tmp_path):
    environment = site("chain", limit_s=60)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert muster(environment, tmp_path, *ON, "--detach", "train.py", "wait").stdout == "r\n"
    log = tmp_path / "home/runs/r/logs/main/train/attempt-0/rank-0.log"
    wait_until(lambda: log.exists() and "sum 2" in log.read_text(), "the first line")
    assert "link 1 of 3" in muster(environment, tmp_path, "status", "r").stdout

    assert muster(environment, tmp_path, "cancel", "r").returncode == 0

    for number in (1, 2, 3):
        path = tmp_path / "queue" / f"{number}.json"
        over = lambda path=path: json.loads(path.read_text())["state"] == "CANCELLED"  # noqa: E731
        wait_until(over, f"job {number} to be cancelled")
    status = muster(environment, tmp_path, "status", "r", "--json").stdout
    assert json.loads(status)["state"] == "cancelled"
