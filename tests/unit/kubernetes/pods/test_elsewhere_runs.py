"""A run that another machine has submitted is found by its Job, and its Secret gives what a run directory needs."""

import base64
import json
import os
import stat
from dataclasses import replace

import pytest

from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.create import failed_before_start
from torchmuster.errors import NotFoundError
from torchmuster.kubernetes.pods.copy import RunCopy
from torchmuster.kubernetes.pods.elsewhere import find_on_clusters
from torchmuster.kubernetes.pods.reach import job_of, pod_order
from torchmuster.launcher.engines.base import EngineError
from unit.kubernetes.pods.conftest import JOB_ID, RUN_ID, order_of

JOB = {
    "kind": "Job",
    "metadata": {
        "name": "run-7f3a",
        "labels": {"torchmuster.dev/run": "run-7f3a"},
        "annotations": {"torchmuster.dev/run-id": RUN_ID},
    },
}
OTHER = {"kind": "Job", "metadata": {"name": "x", "labels": {}}}


def secret(order=None):
    files = {
        "order.json": json.dumps(codec.to_plain(order or order_of())).encode(),
        "key": b"ab" * 32,
        "plan.json": b"{}",
    }
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return {"kind": "Secret", "data": data}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "muster.toml").write_text('[engines.lab]\nkind = "kubernetes"\nimage = "x"\n')
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "mine"))
    return tmp_path / "mine"


def test_a_secret_without_a_plan_is_refused_and_leaves_nothing_here(cluster, home):
    lacks = secret()
    del lacks["data"]["plan.json"]
    cluster.say(answers={**jobs(JOB), "get secret": lacks})
    with pytest.raises(EngineError, match="has no plan of it"):
        find_on_clusters(RUN_ID)
    assert not home.exists()


def test_a_group_of_a_workflow_without_its_plan_is_refused_and_leaves_nothing_here(cluster, home):
    of_group = secret(replace(order_of(), group="work"))
    cluster.say(answers={**jobs(JOB), "get secret": of_group})
    with pytest.raises(EngineError, match="workflow train-7f3a can't be followed from here") as it:
        find_on_clusters(RUN_ID)
    assert "muster status train-7f3a" in it.value.fix
    assert not home.exists()


def test_a_run_that_is_found_and_can_not_be_looked_at_says_why(cluster, home, tmp_path):
    """Not that there is no such run; a cluster that can't be asked says nothing."""
    sites = '[engines.down]\nkind = "kubernetes"\ncontext = "down"\nimage = "x"\n'
    sites += '[engines.lab]\nkind = "kubernetes"\ncontext = "lab"\nimage = "x"\n'
    (tmp_path / "muster.toml").write_text(sites)
    down = {"--context=down": [1, "Unable to connect to the server: i/o timeout\n"]}
    cluster.say(answers={**jobs(JOB), "get secret": {"kind": "Secret", "data": {}}}, refuse=down)
    with pytest.raises(EngineError, match="can't be read"):
        find_on_clusters(RUN_ID)
    assert find_on_clusters("train-0000") is None


def jobs(*found):
    return {"get jobs.batch": {"kind": "List", "items": list(found)}, "get secret": secret()}


@pytest.mark.parametrize("word", [RUN_ID, "train-7f3a", "run-7f3a"])
def test_a_run_is_known_by_its_id_its_short_id_and_its_job(cluster, home, word):
    cluster.say(answers=jobs(OTHER, JOB))

    found = find_on_clusters(word)

    assert found.path == str(home / "runs" / RUN_ID)
    assert (job_of(found), pod_order(found)) == (JOB_ID, order_of())
    with open(found.secret) as file:
        assert file.read() == "ab" * 32
    assert stat.S_IMODE(os.stat(found.secret).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(found.path).st_mode) & 0o077 == 0


def test_an_unknown_run_leaves_nothing_here_and_asks_for_no_secret(cluster, home):
    cluster.say(answers=jobs(OTHER, JOB))
    assert find_on_clusters("train-0000") is None
    assert not home.exists()
    assert not any("secret" in line for line in cluster.asked)


def test_a_secret_that_may_not_be_read_is_an_error_with_its_rule(cluster, home):
    refusal = (
        'Error from server (Forbidden): secrets "run-7f3a" is forbidden: User "u" cannot get resource "secrets"'
        ' in API group "" in the namespace "research"\n'
    )
    cluster.say(answers=jobs(JOB), refuse={"get secret": [1, refusal]})
    with pytest.raises(EngineError) as caught:
        find_on_clusters(RUN_ID)
    assert 'resources: ["secrets"], verbs: ["get"]' in caught.value.fix
    assert not home.exists()


def test_a_folder_that_is_there_is_not_written_over(cluster, home):
    cluster.say(answers=jobs(JOB))
    (home / "runs" / RUN_ID / "pods").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="its folder can't be made here"):
        find_on_clusters(RUN_ID)


@pytest.mark.parametrize("run_id", ["../../elsewhere", "/tmp/x", "", ".hidden"])
def test_a_run_id_that_leads_out_of_the_runs_is_refused(cluster, home, tmp_path, run_id):
    """Whoever may make Jobs in the namespace writes their Secrets."""
    bad = secret(replace(order_of(), run_id=run_id))
    cluster.say(answers={**jobs(JOB), "get secret": bad})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(EngineError, match="is not the id of a run"):
        find_on_clusters("run-7f3a")
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == [
        tmp_path / "case.json.log"
    ]


def test_who_looks_at_a_run_of_another_machine_leaves_its_job(cluster):
    """Its files may have to come to the machine that has submitted it."""
    cluster.say(answers=jobs(JOB))
    found = find_on_clusters(RUN_ID)
    copy = RunCopy.of(found, print, print)
    ended = failed_before_start(found, 3, Report(error="it could not start"))
    atomic.write_json(found.result, codec.to_plain(ended))
    copy.close()
    assert not any("delete" in line for line in cluster.asked)
