"""A workflow that another machine has submitted: found by the Job of any group, seen, and ended, as its groups come one by one."""

import base64
import json
import os

import pytest

from kit.packages import keep_package
from kit.workflows import workflow_plan
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.kubernetes.engine.dialect import DIALECT
from torchmuster.kubernetes.pods.bring_group import bring_group, plan_group
from torchmuster.kubernetes.pods.elsewhere import (
    cancel_groups,
    catch_up_groups,
    find_on_clusters,
    is_elsewhere,
    look_for_groups,
)
from torchmuster.kubernetes.pods.reach import job_of, pod_order
from torchmuster.launcher.jobs.jobs import forget_views
from torchmuster.launcher.model.job import JobState, JobView
from torchmuster.launcher.spec.site import Site
from torchmuster.launcher.views.control import stop_and_wait
from torchmuster.launcher.views.find import find_run, owner_lives, view_run
from torchmuster.workflow.owner.view import view_remote_workflow
from torchmuster.workflow.owner.workflow import create_workflow_dir
from torchmuster.workflow.plan import GroupPlan, Resources, TaskPlan
from torchmuster.workflow.record import GroupOutcome, State

SITE = Site(
    name="k",
    kind="kubernetes",
    origin="muster.toml:1:1",
    own_keys=(("context", "lab"), ("namespace", "research"), ("image", "team/x:1")),
)
RUN_ID = "20261123-101010-two-1acd"


def group(name, *after, **more):
    tasks = (TaskPlan(name=f"{name}-t", command=("true",), **more),)
    return GroupPlan(name=name, tasks=tasks, after=after)


GROUPS = (group("made"), group("work", "made"), group("told", "work"))


@pytest.fixture
def workflow(tmp_path, monkeypatch):
    """Return plan and folder of a workflow as the machine has them that submits it."""
    for home in ("theirs", "mine"):
        keep_package(tmp_path / home)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "theirs"))
    monkeypatch.delenv("MUSTER_DATASETS", raising=False)
    plan = workflow_plan(
        *GROUPS, run_id=RUN_ID, name="two", spec_path="two.yaml", cwd=str(tmp_path)
    )
    theirs = create_workflow_dir(plan, "", "")
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "muster.toml").write_text('[engines.k]\nkind = "kubernetes"\nimage = "x"\n')
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
    found = find_on_clusters(RUN_ID)
    look_for_groups(found)
    return found


def states(run_dir):
    return {one.name: one.state for one in view_run(run_dir).workflow.groups}


def test_a_workflow_is_found_by_its_id_and_has_the_plan_and_the_jobs_of_its_groups(
    cluster, workflow, tmp_path
):
    found = taken(cluster, on_cluster(workflow, "work"))

    assert found.path == str(tmp_path / "mine" / "runs" / RUN_ID)
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
    assert find_run("two-1acd-work").run_id == RUN_ID
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
    outcome = GroupOutcome(
        group="work",
        state=State.FAILED,
        exit_code=3,
        elapsed_s=1.0,
        report=Report(error="task work-t failed"),
    )
    atomic.write_json(found.group("work").result, codec.to_plain(outcome))
    assert states(found)["work"] is State.FAILED
    assert os.path.exists(found.secret)
