"""A run that another machine has submitted is found by its Job, and its Secret gives what a run directory needs."""

import base64
import json
import os
import stat

import pytest

from kit.packages import keep_package
from kit.workflows import workflow_plan
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.create import failed_before_start
from torchmuster.errors import NotFoundError
from torchmuster.kubernetes.engine.dialect import DIALECT
from torchmuster.kubernetes.pods.bring_group import bring_group, plan_group
from torchmuster.kubernetes.pods.copy import RunCopy
from torchmuster.kubernetes.pods.elsewhere import (
    cancel_groups,
    catch_up_groups,
    find_on_clusters,
    is_elsewhere,
    look_for_groups,
)
from torchmuster.kubernetes.pods.reach import job_of, pod_order
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.jobs.jobs import forget_views
from torchmuster.launcher.model.job import JobState, JobView
from torchmuster.launcher.views.control import stop_and_wait
from torchmuster.launcher.views.find import find_run, owner_lives, view_run
from torchmuster.workflow.owner.view import view_remote_workflow
from torchmuster.workflow.owner.workflow import create_workflow_dir
from torchmuster.workflow.plan import GroupPlan, Resources, TaskPlan
from torchmuster.workflow.record import State
from unit.kubernetes.pods.conftest import (
    JOB_ID,
    RUN_ID,
    SILENT,
    forbidden,
    group_outcome,
    order_of,
    shown_job,
    site_of,
)

JOB = shown_job()
JOB["metadata"]["annotations"] = {"torchmuster.dev/run-id": RUN_ID}
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
    of_group = secret(order_of(group="work"))
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
    down = {"--context=down": SILENT}
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
    refusal = forbidden('secrets "run-7f3a"', "get", "secrets")
    cluster.say(answers=jobs(JOB), refuse={"get secret": refusal})
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
    bad = secret(order_of(run_id=run_id))
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


# A workflow that another machine has submitted: found by the Job of any group, seen, and ended, as its groups come one by one.


SITE = site_of(context="lab", namespace="research", image="team/x:1")
WORKFLOW_ID = "20261123-101010-two-1acd"


def group(name, *after, **more):
    tasks = (TaskPlan(name=f"{name}-t", command=("true",), **more),)
    return GroupPlan(name=name, tasks=tasks, after=after)


GROUPS = (group("made"), group("work", "made"), group("told", "work"))


@pytest.fixture
def workflow(home, tmp_path, monkeypatch):
    """Return plan and folder of a workflow as the machine has them that submits it."""
    keep_package(tmp_path / "theirs")
    keep_package(home)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "theirs"))
    monkeypatch.delenv("MUSTER_DATASETS", raising=False)
    plan = workflow_plan(
        *GROUPS, run_id=WORKFLOW_ID, name="two", spec_path="two.yaml", cwd=str(tmp_path)
    )
    theirs = create_workflow_dir(plan, "", "")
    monkeypatch.setenv("MUSTER_HOME", str(home))
    return plan, theirs


def on_cluster(workflow, *names, changed=None):
    """Return what a cluster answers that has the Jobs of these groups, made from what the owner submits."""
    plan, theirs = workflow
    items, secrets = [], {}
    for name in names:
        one = next(found for found in (changed or plan.groups) if found.name == name)
        pods = bring_group(plan, one, theirs, plan_group(plan, one, SITE))
        for number, job in enumerate(pods.jobs):
            files = {}
            for file, path in job.brings:
                with open(path, "rb") as source:
                    files[file] = source.read()
            objects = json.loads(DIALECT.with_files(job, files))["items"]
            made = {one["kind"]: one for one in objects}
            items.append({**made["Job"], "status": {}})
            items[-1]["metadata"]["namespace"] = "research"
            if not number:
                data = {f: base64.b64encode(text).decode() for f, text in files.items()}
                secrets[f"get secret {job.name} "] = {"kind": "Secret", "data": data}
    return {"get jobs.batch": {"kind": "List", "items": items}, **secrets}


def taken(cluster, answers):
    cluster.say(answers=answers)
    forget_views()
    found = find_on_clusters(WORKFLOW_ID)
    look_for_groups(found)
    return found


def states(run_dir):
    return {one.name: one.state for one in view_run(run_dir).workflow.groups}


def test_a_workflow_is_found_by_its_id_and_has_the_plan_and_the_jobs_of_its_groups(
    cluster, workflow, tmp_path
):
    found = taken(cluster, on_cluster(workflow, "work"))

    assert found.path == str(tmp_path / "mine" / "runs" / WORKFLOW_ID)
    assert is_elsewhere(found)
    assert pod_order(found, "work").group == "work"
    assert job_of(found, "work") == "lab/research/two-1acd-work"
    view = view_run(found)
    assert (view.workflow.plan, view.state) == (workflow[0], RunState.WAITING)
    # What `work` reads has been made, or it would not have begun.
    expected = {"made": State.COMPLETED, "work": State.SCHEDULING, "told": State.WAITING}
    assert states(found) == expected
    assert view.workflow.groups[2].why == "waits for the outputs of work"
    assert owner_lives(found)


def test_it_is_found_by_the_job_of_a_group_too_and_without_its_owner_here(cluster, workflow):
    cluster.say(answers=on_cluster(workflow, "work"))
    forget_views()
    assert find_run("two-1acd-work").run_id == WORKFLOW_ID
    assert find_run("two-1acd").workflow.plan.name == "two"


def test_groups_that_begin_later_are_seen_by_the_next_look(cluster, workflow):
    found = taken(cluster, on_cluster(workflow, "made"))
    assert states(found)["work"] is State.WAITING
    cluster.say(answers=on_cluster(workflow, "work"))
    forget_views()
    catch_up_groups(found)
    assert states(found)["made"] is State.COMPLETED
    assert states(found)["work"] is State.SCHEDULING


def test_a_group_of_several_jobs_is_one_and_all_of_them_are_removed(cluster, workflow):
    tasks = (
        TaskPlan(name="a", command=("true",), lead=True),
        TaskPlan(name="b", command=("true",), resources=Resources(cpu=8)),
    )
    both = (GroupPlan(name="work", tasks=tasks),)
    found = taken(cluster, on_cluster(workflow, "work", changed=both))
    noted = atomic.read_json(found.group("work").job)
    first = "lab/research/two-1acd-work"
    assert (noted["job_id"], noted["more"], noted["set"]) == (first, [f"{first}-b"], None)

    assert cancel_groups(found)

    removed = [line.split()[1] for line in cluster.asked if line.startswith("delete")]
    assert removed == ["jobs.batch/two-1acd-work", "jobs.batch/two-1acd-work-b"]
    assert states(found)["work"] is State.FAILED_CANCELED


def test_a_cancel_from_here_is_the_end_of_the_workflow_as_it_is_seen_here(cluster, workflow):
    found = taken(cluster, on_cluster(workflow, "work"))
    result = stop_and_wait(view_run(found), at_once=False, timeout_s=30.0)
    assert result.state is RunState.CANCELLED
    assert states(found)["told"] is State.FAILED_CANCELED


def test_a_group_whose_name_is_not_of_the_plan_is_left_alone(cluster, workflow):
    """Whoever may make Jobs in the namespace writes their Secrets, and the name becomes a path here."""
    found = taken(cluster, on_cluster(workflow, "work"))
    strange = (group("../../elsewhere"),)
    cluster.say(answers=on_cluster((workflow[0], workflow[1]), "../../elsewhere", changed=strange))
    look_for_groups(found)
    assert set(atomic.read_json(found.jobs)["jobs"]) == {"work"}


def test_a_workflow_without_jobs_is_lost_to_who_is_elsewhere_unless_the_next_group_may_follow(
    cluster, workflow
):
    found = taken(cluster, on_cluster(workflow, "work"))
    begun = frozenset({"work"})
    gone = {"work": JobView(job_id="lab/research/x", state=JobState.SUCCEEDED)}
    seen = view_remote_workflow(found, gone, begun, is_recent=True)
    assert seen.state is RunState.WAITING
    assert view_remote_workflow(found, {}, begun, is_recent=False).state is RunState.LOST


def test_what_a_group_has_left_here_counts_before_what_its_job_says(cluster, workflow):
    found = taken(cluster, on_cluster(workflow, "work"))
    report = Report(error="task work-t failed")
    outcome = group_outcome(State.FAILED, 3, report=report)
    atomic.write_json(found.group("work").result, codec.to_plain(outcome))
    assert states(found)["work"] is State.FAILED
    assert os.path.exists(found.secret)
