"""A run in pods as its client knows it, and a cluster that a pretended kubectl plays."""

import json
import os

import pytest

from kit.command import SOURCE
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.kubernetes.node.order import PodOrder

RUN_ID = "20261123-150000-train-7f3a"
JOB_ID = "lab/research/run-7f3a"
FAKES = SOURCE.parent / "tests" / "fakes" / "kubernetes"


class Cluster:
    """What the cluster says; every command is noted."""

    def __init__(self, folder):
        self.case = folder / "case.json"
        self.say()

    def say(self, **case):
        """Set all answers: `refuse`, `answers`, `pods`, `events`, `logs`, `forward`, `queues`, `watch`."""
        self.case.write_text(json.dumps(case))
        self.case.with_suffix(".made").write_text("run-7f3a")

    @property
    def asked(self):
        """Return the commands so far, without the words that all have."""
        log = self.case.with_name("case.json.log")
        lines = log.read_text().splitlines() if log.exists() else []
        return [
            " ".join(
                w
                for w in line.split()
                if not w.startswith(("--context", "--namespace", "--request"))
            )
            for line in lines
        ]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return a healthy cluster."""
    found = Cluster(tmp_path)
    monkeypatch.setenv("FAKE_KUBECTL", str(found.case))
    monkeypatch.setenv("PATH", f"{FAKES}:{os.environ['PATH']}")
    return found


@pytest.fixture
def run_dir(tmp_path):
    """Return the run directory of a run in two pods."""
    found = RunDir(str(tmp_path / "home" / "runs" / RUN_ID))
    os.makedirs(os.path.join(found.path, "pods"))
    os.makedirs(found.logs)
    with open(found.secret, "w") as file:
        file.write("ab" * 32)
    atomic.write_json(os.path.join(found.path, "pods", "order.json"), codec.to_plain(order_of()))
    atomic.write_json(found.job, {"engine": "kubernetes", "job_id": JOB_ID})
    return found


def order_of(**given):
    """Return what the pods of the run were told."""
    plain = {"job": "run-7f3a", "num_pods": 2, "port": 29417, "home": "/scratch/muster"}
    return PodOrder(run_id=RUN_ID, code_root="/home/me/code", code_sha="", **{**plain, **given})


def answers(*, ended=None):
    """Return what the cluster says of a Job whose first pod runs, or has ended with this message."""
    own = {"torchmuster.dev/run": "run-7f3a"}
    about = {"namespace": "research", "annotations": {"torchmuster.dev/context": "lab"}}
    conditions = [{"type": "Complete", "status": "True"}] if ended else []
    job = {
        "kind": "Job",
        "metadata": {"name": "run-7f3a", "labels": own, **about},
        "spec": {"completions": 1},
        "status": {"conditions": conditions},
    }
    state = {"running": {}}
    if ended:
        state = {"terminated": {"exitCode": 0, "message": json.dumps(ended)}}
    first = {**own, "batch.kubernetes.io/job-completion-index": "0"}
    pod = {
        "kind": "Pod",
        "metadata": {"name": "run-7f3a-0-x", "labels": first, **about},
        "spec": {"nodeName": "n1"},
        "status": {"containerStatuses": [{"name": "node", "state": state}]},
    }
    return {"get jobs.batch,pods": {"items": [job, pod]}, "get pods": {"items": [pod]}}
