"""`muster sweep` on a cluster that a pretended kubectl plays: one Job, a cancel, and what runs again."""

import json
import os
from base64 import b64encode

import pytest

from kit.command import SOURCE, run_muster

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
    environment = {
        "PATH": f"{FAKES}:{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCE),
        "MUSTER_HOME": str(tmp_path / "home"),
        "FAKE_KUBECTL": str(case),
    }

    def call(*words):
        return run_muster(*words, env=environment, cwd=tmp_path)

    return call


def objects(text):
    found = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]["items"]
    return {one["kind"]: one for one in found}


def job_of(shown):
    return objects(shown)["Job"]["spec"]


@pytest.mark.parametrize(
    ("words", "pods", "gpus"),
    [
        ((), 32, "1"),
        (("--slots", "40"), 40, "1"),
        (("--slots", "4", "--nproc-per-node", "2"), 4, "2"),
        (("--slots", "4", "--gpus-per-node", "8"), 4, "8"),
    ],
)
def test_a_sweep_is_one_job_with_a_pod_for_each_slot(muster, words, pods, gpus):
    done = muster(*ON, *words, "--dry-run", "fit.py")
    assert done.returncode == 0, done.stderr
    job = job_of(done.stdout)
    assert (job["completions"], job["parallelism"]) == (pods, pods)
    limits = job["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": gpus}
    assert "sweep.json" in objects(done.stdout)["Secret"]["data"]


def states(muster):
    status = json.loads(muster("status", "s", "--json").stdout)
    return status["state"], set(status["counts"])


def test_a_cancelled_sweep_is_submitted_again_under_another_name(muster, tmp_path):
    begun = muster(*ON, "--slots", "3", "--detach", "fit.py")
    assert (begun.returncode, begun.stdout) == (0, "s\n"), begun.stderr
    assert states(muster) == ("starting", {"waiting"})
    muster("cancel", "s")
    assert states(muster) == ("cancelled", {"cancelled"})
    again = muster("restart", "s", "--detach")
    assert again.returncode == 0, again.stderr
    assert states(muster) == ("starting", {"waiting"})
    noted = json.loads((tmp_path / "home" / "runs" / "s" / "job.json").read_text())
    assert noted["job_id"] == "lab/research/s-1"


def test_a_sweep_of_another_machine_is_found_on_the_cluster(muster, tmp_path):
    muster(*ON, "--detach", "fit.py")
    home = tmp_path / "home" / "runs" / "s"
    made = json.loads((home / "job.sh").read_text())["items"]
    job = next(one for one in made if one["kind"] == "Job")
    brought = {
        "order.json": home / "pods" / "order.json",
        "key": home / "secret",
        "sweep.json": home / "sweep.json",
    }
    data = {name: b64encode(path.read_bytes()).decode() for name, path in brought.items()}
    secret = {"kind": "Secret", "data": data}
    answers = {
        "get jobs.batch -l app.kubernetes.io/managed-by": {"kind": "List", "items": [job]},
        "get secret s": secret,
    }
    case = {"pods": "job-pods-running", "answers": answers}
    (tmp_path / "case.json").write_text(json.dumps(case))
    home.rename(tmp_path / "gone")
    told = muster("status", "s", "--json")
    assert told.returncode == 0, told.stderr
    status = json.loads(told.stdout)
    assert (status["kind"], len(status["members"])) == ("sweep", 40)
