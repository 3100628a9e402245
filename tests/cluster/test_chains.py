"""Training longer than its job, on the pretended Slurm and PBS: three links by each way, and what is refused."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from cluster.slurm import SCRIPT
from kit.command import SOURCE, muster_env, run_muster
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
CHAIN_SCRIPT = Path(__file__).with_name("chain_script.py")
ON = ("run", "--on", "site", "--nproc-per-node", "2", "--run-id", "r", "--resubmit", "2")
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


class SlurmSite:
    """A pretended Slurm, and its user `user`, whose training script is `SCRIPT`."""

    def __init__(self, cluster):
        self.user = cluster

    def set(self, way=None, **settings):
        """Say what the cluster and the section of muster.toml are like."""
        configure(self.user, "slurm", way)
        self.user.set(**settings)

    def warn(self):
        """Send to the newest job what a site's own `--signal=B:USR1@...` sends."""
        words = ["scancel", "--signal=USR1", "--batch", jobs(self.user)[-1]]
        subprocess.run(words, env=self.user.env, check=True)

    def wait_for(self, state, job):
        wait_until(lambda: self.user.record(job)["state"] == state, f"job {job} to be {state}")


class PbsSite:
    """The same of a pretended PBS."""

    def __init__(self, pbs):
        self.pbs, self.user = pbs, pbs.muster
        self.user.script(SCRIPT)

    def set(self, way=None, **settings):
        lines = ["export OMP_NUM_THREADS=1", f"export PYTHONPATH={SOURCE}"]
        configure(self.user, "pbs", way, f"setup = {json.dumps(lines)}\n")
        self.pbs.settings(**settings)

    def warn(self):
        os.kill(self.pbs.pids_of(jobs(self.user)[-1], "script")[0], signal.SIGUSR1)


def configure(user, kind, way, more=""):
    line = f'resubmit_with = "{way}"\n' if way else ""
    (user.folder / "muster.toml").write_text(f'[engines.site]\nkind = "{kind}"\n{more}{line}')


@pytest.fixture
def slurm(cluster):
    return SlurmSite(cluster)


@pytest.fixture
def of_pbs(pbs):
    return PbsSite(pbs)


def ways(user):
    return [link["way"] for link in user.links()]


def jobs(user):
    return [link["job_id"] for link in user.links()]


def steps(user):
    """Return attempt and number of each step that rank 0 has done."""
    path = user.folder / "steps-0"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines]


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
    ("kind", "way"),
    [
        ("slurm", "requeue"),
        pytest.param("slurm", "submit", marks=pytest.mark.lab),
        pytest.param("slurm", "chain", marks=pytest.mark.lab),
        pytest.param("of_pbs", "requeue", marks=pytest.mark.lab),
        ("of_pbs", "submit"),
        pytest.param("of_pbs", "chain", marks=pytest.mark.lab),
    ],
)
def test_three_links_train_exactly_what_one_job_would(kind, way, request, undisturbed):
    site = request.getfixturevalue(kind)
    site.set(way, **({"limit_s": 3600, "tells_end": False} if kind == "slurm" else {}))
    user = site.user
    words = (*ON, "--detach", str(CHAIN_SCRIPT), str(user.folder), "--hold", "2")
    assert user(*words).returncode == 0
    for attempt in (0, 1):

        def three(attempt=attempt):
            return [one for one, _ in steps(user)].count(attempt) >= 3

        wait_until(three, "three steps", 90.0)
        site.warn()
    done = user("wait", "r")

    assert done.returncode == 0, done.stderr
    assert weights(user.folder) == undisturbed
    assert ways(user) == [None, way, way]
    first = 1 if kind == "slurm" else 0
    numbers = [int(job.partition(".")[0]) - first for job in jobs(user)]
    assert numbers == ([0] * 3 if way == "requeue" else [0, 1, 2])
    assert [number for _, number in steps(user)] == list(range(1, NUM_STEPS + 1))
    assert {attempt for attempt, _ in steps(user)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        # The user gave no time and the job's environment has none: squeue tells what is left.
        pytest.param("slurm", {"limit_s": 30, "tells_end": False}, marks=pytest.mark.lab),
        # The end is the queue's, and qstat tells it. qsub is forbidden in jobs.
        ("of_pbs", {"queue_walltime": "00:00:30", "refuses": ["qsub"]}),
    ],
    ids=["slurm", "pbs"],
)
def test_the_queues_own_limit_is_the_end_and_workers_are_warned_before_it(kind, settings, request):
    site = request.getfixturevalue(kind)
    site.set(**settings)
    site.user.script(LEAVE)
    done = site.user(*ON, "--warn", "10s", "train.py")

    assert done.returncode == 0, done.stderr
    assert ways(site.user) == [None, "requeue"]
    assert "the job ends in 10 s: workers get SIGUSR1" in site.user.said()
    assert "link 2 of 3" in done.stderr


def leave(site):
    """Start a run whose workers leave at the warning, and warn them."""
    site.user.script(LEAVE)
    started = site.user(*ON, "--detach", "train.py")
    assert started.stdout == "r\n", started.stderr
    for rank in (0, 1):
        site.user.wait_for("ready", rank, limit_s=60.0)
    site.warn()
    return started


@pytest.mark.lab
def test_workers_that_do_not_follow_are_stopped_and_the_run_goes_on(slurm):
    slurm.set("submit", limit_s=30)
    slurm.user.script(DEAF)
    done = slurm.user(*ON, "--warn", "14s", "--tee", "all", "train.py")

    assert done.returncode == 0, done.stderr
    assert "attempt 1" in done.stdout
    assert "the workers did not leave, and the job ends in 7 s" in slurm.user.said()


def test_a_refused_requeue_is_followed_by_a_submission_and_one_line_says_why(slurm):
    slurm.set("requeue", limit_s=3600, refuse=["requeue"])
    leave(slurm)

    assert slurm.user("wait", "r").returncode == 0
    assert ways(slurm.user) == [None, "submit"]
    refused = "can't continue by requeue: slurm: error: requeue: Access/permission denied"
    assert refused in slurm.user.said()
    assert "the run continues: link 2 of 3 is job 2, by submit" in slurm.user.said()


@pytest.mark.lab
def test_where_slurm_allows_no_way_the_run_ends_preempted(slurm):
    slurm.set(limit_s=3600, refuse=["requeue", "sbatch"])
    leave(slurm)

    assert slurm.user("wait", "r").returncode == 75
    assert slurm.user.read("links.json")["ended"] == "no way to continue"
    assert slurm.user.state() == "preempted"


def test_where_pbs_allows_no_way_the_run_ends_preempted_and_says_why(of_pbs):
    of_pbs.set(refuses=["qsub", "qrerun"])
    leave(of_pbs)

    assert of_pbs.user("wait", "r").returncode == 75
    assert of_pbs.user.read("links.json")["ended"] == "no way to continue"
    (job,) = jobs(of_pbs.user)
    of_pbs.pbs.wait(job, "F")
    said = of_pbs.user.said()
    assert "can't continue by submit: qsub: Bad UID for job execution" in said
    assert "can't continue by requeue: qrerun: Unauthorized Request" in said


@pytest.mark.lab
def test_a_refused_chain_is_said_and_the_head_continues_by_itself(slurm):
    slurm.set("chain", limit_s=3600, refuse=["dependency"])
    started = leave(slurm)

    assert "only 0 of 2 further jobs were taken" in started.stderr
    assert slurm.user("wait", "r").returncode == 0
    assert ways(slurm.user) == [None, "requeue"]


@pytest.mark.lab
def test_a_run_whose_next_link_waits_has_not_ended(slurm):
    slurm.set("requeue", limit_s=3600, pending_s=8.0)
    leave(slurm)
    slurm.user.wait_for_links(2)

    status = slurm.user("status", "r").stdout
    assert "link 2 of 3" in status
    assert "preempted" not in status
    assert slurm.user("wait", "r").returncode == 0


def test_a_failed_run_is_not_continued_and_its_chain_ends_at_once(slurm):
    slurm.set("chain", limit_s=60)
    done = slurm.user(*ON, "--max-restarts", "0", "train.py", "fail")

    assert done.returncode == 1
    for number in (2, 3):
        slurm.wait_for("COMPLETED", number)
    assert len(slurm.user.links()) == 1
    assert slurm.user.said().count("the run is complete (failed): nothing is left to do") == 2


def test_cancel_ends_all_jobs_of_a_chain_of_slurm(slurm):
    slurm.set("chain", limit_s=60)
    assert slurm.user(*ON, "--detach", "train.py", "wait").stdout == "r\n"
    slurm.user.wait_for("sum 2")
    assert "link 1 of 3" in slurm.user("status", "r").stdout

    assert slurm.user("cancel", "r").returncode == 0

    for number in (1, 2, 3):
        slurm.wait_for("CANCELLED", number)
    assert slurm.user.state() == "cancelled"


@pytest.mark.lab
def test_cancel_ends_all_jobs_of_a_chain_of_pbs(of_pbs):
    of_pbs.set("chain")
    assert of_pbs.user(*ON, "--detach", "train.py", "wait").stdout == "r\n"
    of_pbs.user.wait_for("sum 2")
    job = of_pbs.user.read("job.json")

    assert of_pbs.user("cancel", "r").returncode == 0

    for job_id in (job["job_id"], *job["chain"]):
        of_pbs.pbs.wait(job_id, "F")
    assert of_pbs.user.state() == "cancelled"


@pytest.mark.lab
def test_a_complete_run_lets_the_rest_of_its_chain_end_with_0(of_pbs):
    of_pbs.set("chain")
    done = of_pbs.user(*ON, "train.py")

    assert done.returncode == 0, done.stderr
    for job_id in of_pbs.user.read("job.json")["chain"]:
        assert of_pbs.pbs.wait(job_id, "F")["Exit_status"] == 0
    assert of_pbs.user.path("result.json").exists()
    assert len(of_pbs.user.links()) == 1
