"""A run in pods as its client knows it, and a cluster that a pretended kubectl plays."""

import json
import os
from pathlib import Path

import pytest

from kit.command import SOURCE
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.launcher.spec.site import Site
from torchmuster.workflow.record import GroupOutcome

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
    os.makedirs(found.logs)
    Path(found.secret).write_text("ab" * 32)
    write_order(found, order_of())
    atomic.write_json(found.job, {"engine": "kubernetes", "job_id": JOB_ID})
    return found


def order_of(**given):
    """Return what the pods of the run were told."""
    plain = {"job": "run-7f3a", "num_pods": 2, "port": 29417, "home": "/scratch/muster"}
    plain |= {"run_id": RUN_ID, "code_root": "/home/me/code", "code_sha": ""}
    return PodOrder(**{**plain, **given})


def site_of(**keys):
    """Return a site on a cluster with these keys of its own."""
    own = tuple(keys.items())
    return Site(name="k", kind="kubernetes", origin="muster.toml:1:1", own_keys=own)


def forbidden(what, verb, kind, group=""):
    """Return how a command ends that the user's Role does not allow, as it was recorded."""
    said = f'{what} is forbidden: User "u" cannot {verb} resource "{kind}" in API group "{group}"'
    return [1, f'Error from server (Forbidden): {said} in the namespace "research"\n']


NO_FORWARD = forbidden('pods "run-7f3a-0-x"', "create", "pods/portforward")
SILENT = [1, "Unable to connect to the server: i/o timeout\n"]


def shown_job(name="run-7f3a", num_pods=1, **status):
    """Return what the cluster shows of a Job."""
    labels = {"torchmuster.dev/run": name}
    metadata = {"name": name, "labels": labels, **_PLACE}
    spec = {"completions": num_pods}
    return {"kind": "Job", "metadata": metadata, "spec": spec, "status": status}


def shown_pod(state, index=0, job="run-7f3a", **status):
    """Return what it shows of the pod of a place, whose container is in this state."""
    labels = {"torchmuster.dev/run": job, "batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": f"{job}-{index}-x", "labels": labels, **_PLACE}
    status = {"containerStatuses": [{"name": "node", "state": state}], **status}
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n1"}, "status": status}


_PLACE = {"namespace": "research", "annotations": {"torchmuster.dev/context": "lab"}}


def answers(*, ended=None):
    """Return what the cluster says of a Job whose first pod runs, or has ended with this message."""
    state, conditions = {"running": {}}, []
    if ended:
        state = {"terminated": {"exitCode": 0, "message": json.dumps(ended)}}
        conditions = [{"type": "Complete", "status": "True"}]
    pod = shown_pod(state)
    items = [shown_job(conditions=conditions), pod]
    return {"get jobs.batch,pods": {"items": items}, "get pods": {"items": [pod]}}


def group_outcome(state, exit_code=0, **given):
    """Return how the group `work` has ended."""
    usual = {"group": "work", "state": state, "exit_code": exit_code, "elapsed_s": 1.0}
    return GroupOutcome(**{**usual, **given})


def write_order(run_dir, order):
    """Leave what the pods of a run, or of a group, were told."""
    os.makedirs(os.path.join(run_dir.path, "pods"), exist_ok=True)
    atomic.write_json(os.path.join(run_dir.path, "pods", "order.json"), codec.to_plain(order))
