"""`muster sweep` on a cluster that a pretended kubectl plays: what its Job asks for, and what is refused."""

import json
import os

import pytest

from kit.command import SOURCE, muster_env, run_muster
from kit.packages import keep_package

FAKES = SOURCE.parent / "tests" / "fakes" / "kubernetes"
SITE = (
    '[engines.kube]\nkind = "kubernetes"\nimage = "example.com/team/train:7"\ngpus_per_node = 8\n'
)
ON = ("sweep", "--on", "kube", "--run-id", "s", "--grid", "n=0:40")


@pytest.fixture
def muster(tmp_path):
    """Return a function that runs `muster` beside a cluster whose pods are about to start."""
    (tmp_path / "fit.py").write_text("print('loss=1')\n")
    (tmp_path / "muster.toml").write_text(SITE)
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"pods": "job-pods-running"}))
    home, path = tmp_path / "home", f"{FAKES}:{os.environ['PATH']}"
    environment = muster_env(home, PATH=path, FAKE_KUBECTL=str(case))
    keep_package(home)
    return lambda *words: run_muster(*words, env=environment, cwd=tmp_path)


def objects(text):
    found = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]["items"]
    return {one["kind"]: one for one in reversed(found)}  # of Secrets the run's own


def job_of(shown):
    return objects(shown)["Job"]["spec"]


@pytest.mark.parametrize(
    ("words", "parallel", "gpus"),
    [
        ((), 32, "1"),
        (("--slots", "50"), 40, "1"),
        (("--slots", "4", "--nproc-per-node", "2"), 4, "2"),
        (("--slots", "4", "--gpus-per-node", "8"), 4, "8"),
    ],
)
def test_a_sweep_is_one_job_with_a_pod_for_each_member(muster, words, parallel, gpus):
    done = muster(*ON, *words, "--dry-run", "fit.py")
    assert done.returncode == 0, done.stderr
    job = job_of(done.stdout)
    assert (job["completions"], job["parallelism"]) == (40, parallel)
    limits = job["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": gpus}
    assert "sweep.json" in objects(done.stdout)["Secret"]["data"]


def test_a_member_that_fails_ends_no_other(muster):
    """Kubernetes 1.29 and later know limits of each index."""
    job = job_of(muster(*ON, "--time", "2h", "--dry-run", "fit.py").stdout)
    assert job["backoffLimitPerIndex"] == 2
    failure = job["podFailurePolicy"]["rules"][0]
    assert (failure["action"], failure["onExitCodes"]["values"]) == ("FailIndex", [113])
    for of_a_run in ("successPolicy", "backoffLimit", "activeDeadlineSeconds"):
        assert of_a_run not in job


def test_members_of_several_pods_are_jobs_of_their_own(muster):
    job = job_of(muster(*ON, "--nodes", "2", "--dry-run", "fit.py").stdout)
    assert (job["completions"], job["parallelism"]) == (2, 2)
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


UNFOLLOWED = "`--stop` can't end members that nobody follows"
TWO_NODES = "members of several nodes are for clusters whose nodes are pods"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--per-gpu", "2"), "a pod has its GPUs for itself"),
        (("--metric", "loss", "--stop", "median", "--detach"), UNFOLLOWED),
        (("--on", "local", "--nodes", "2"), TWO_NODES),
    ],
)
def test_what_pods_have_not_is_refused_with_what_to_use(muster, words, says):
    done = muster(*ON, *words, "fit.py")
    assert done.returncode == 2
    assert says in done.stderr
    assert "hint: " in done.stderr


def test_a_sweep_that_the_cluster_refuses_has_failed_and_is_submitted_again(muster, tmp_path):
    case = tmp_path / "case.json"
    refusal = 'Error from server (Forbidden): jobs.batch is forbidden: User "u" cannot create resource "jobs"'
    refusal += ' in API group "batch" in the namespace "research"\n'
    case.write_text(json.dumps({"refuse": {"create": [1, refusal]}}))
    assert muster(*ON, "--detach", "fit.py").returncode != 0
    status = json.loads(muster("status", "s", "--json").stdout)
    assert status["state"] == "failed"
    case.write_text(json.dumps({"pods": "job-pods-running"}))
    again = muster("restart", "s", "--detach")
    assert again.returncode == 0, again.stderr
    assert json.loads(muster("status", "s", "--json").stdout)["state"] != "failed"


def test_a_sweep_whose_pods_were_slots_is_still_shown(muster, tmp_path):
    """Of an earlier version of muster, which left these files; a restart has to be typed again."""
    run_dir = tmp_path / "home" / "runs" / "s"
    begun = muster(*ON[:5], "--grid", "n=0:2", "--detach", "fit.py")
    assert begun.returncode == 0, begun.stderr
    for new in ("arrays.json", "pods/order.json"):
        (run_dir / new).unlink()
    event = {"time": "2026-11-01T10:00:00Z", "event": "member_started", "member": 0, "attempt": 0}
    end = {**event, "event": "member_ended", "state": "succeeded", "elapsed_s": 1, "exit_code": 0}
    lines = (event, {**end, "why": None}, {**event, "member": 1})
    (run_dir / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    job = {"engine": "kubernetes", "job_id": "lab/research/s"}
    (run_dir / "job.json").write_text(json.dumps(job))
    result = {"run_id": "s", "state": "failed", "exit_code": 1, "attempts": 2}
    result |= {"restarts_spent": 0, "elapsed_s": 1.0, "report": None}
    (run_dir / "result.json").write_text(json.dumps(result))
    log = run_dir / "members" / "s.0" / "logs" / "main" / "train" / "attempt-0" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("loss=1\n")

    status = json.loads(muster("status", "s", "--json").stdout)
    assert status["state"] == "failed"
    assert [one["state"] for one in status["members"]] == ["succeeded", "lost"]
    assert muster("logs", "s.0").stdout == "loss=1\n"
    again = muster("restart", "s")
    assert (again.returncode, "earlier version of muster" in again.stderr) == (2, True)
