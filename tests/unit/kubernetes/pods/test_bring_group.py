"""A group of a workflow as Jobs: which pods there are, what they bring along, and what is refused before."""

import asyncio
import json
import lzma
import os
import pathlib
import random
import tarfile
from dataclasses import replace

import pytest

from kit.packages import keep_package
from kit.workflows import workflow_plan
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.errors import UsageError
from torchmuster.kubernetes.pods.bring_group import (
    bring_group,
    find_unsupported,
    plan_group,
    pod_kinds,
)
from torchmuster.kubernetes.pods.group import PodGroup
from torchmuster.workflow.owner.workflow import create_workflow_dir, link_reused_outputs
from torchmuster.workflow.plan import (
    Credential,
    GroupInput,
    GroupPlan,
    InputKind,
    InputPlan,
    OutputKind,
    OutputPlan,
    Resources,
    TaskNetwork,
    TaskPlan,
    TrainingPlan,
)
from unit.kubernetes.pods.conftest import site_of

SITE = site_of(image="team/x:1")
SETS = site_of(image="team/x:1", jobset="yes")
ON_A_VOLUME = site_of(image="team/x:1", claims="team:/team", home="/team/home")
BIG = Resources(cpu=8, gpu=4)


def names_in(pods):
    """Return the names in the archive that pods get."""
    with tarfile.open(dict(pods.jobs[0].brings)["code.tar.gz"]) as archive:
        return archive.getnames()


def plan_in(pods):
    """Return the text of the plan that goes into the Secret."""
    with lzma.open(dict(pods.jobs[0].brings)["moved.json.xz"]) as file:
        return file.read()


def files_below(folder):
    return [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]


def task(name, **more):
    return TaskPlan(name=name, command=("true",), **more)


def fit(code, nodes="1", **more):
    """Return a task that trains."""
    script = str(code / "inner" / "train.py")
    return task(
        "fit", training=TrainingPlan(nodes=nodes, nproc_per_node="1", script=script), **more
    )


@pytest.fixture
def code(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    keep_package(tmp_path / "home")
    monkeypatch.delenv("MUSTER_DATASETS", raising=False)
    folder = tmp_path / "code"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "train.py").write_text("")
    return folder


def plan_of(code, *tasks, **more):
    return workflow_plan(
        GroupPlan(name="work", tasks=tasks),
        run_id="20261123-101010-two-1acd",
        name="two",
        spec_path="two.yaml",
        cwd=str(code / "inner"),
        **more,
    )


def plan_on(plan, site):
    return plan_group(plan, plan.groups[0], site)


def bring(plan, run_dir, pods):
    return bring_group(plan, plan.groups[0], run_dir, pods)


def planned(code, *tasks):
    plan = plan_of(code, *tasks)
    run_dir = create_workflow_dir(plan, "", "")
    return plan, run_dir, plan_on(plan, SITE)


def test_equal_pods_are_one_job_and_the_leads_pod_is_the_first():
    group = GroupPlan(name="g", tasks=(task("a"), task("b", resources=BIG), task("c", lead=True)))
    assert [(kind.tasks, kind.node.gpus) for kind in pod_kinds(group)] == [
        (("c", "a"), 0),
        (("b",), 4),
    ]


def test_another_image_is_a_job_of_its_own_that_sees_the_files_of_the_first(code):
    _, _, pods = planned(code, task("a"), task("b", image="other/y:2"), task("c"))
    first, second = pods.jobs
    assert [first.num_nodes, second.num_nodes, second.first_index] == [2, 1, 2]
    assert (first.shares, second.shares) == (None, first.name)
    assert dict(second.own_keys)["image"] == "other/y:2"
    assert pods.order.hosts == tuple(
        f"{job.name}-{index}.{job.name}" for job, index in ((first, 0), (first, 1), (second, 0))
    )
    assert pods.nodes.tasks["b"][0].name == pods.order.hosts[2]


def test_where_there_are_jobsets_pods_of_several_kinds_are_one(code):
    plan = plan_of(code, task("a"), task("b", image="other/y:2"), task("c"))
    pods = plan_on(plan, SETS)
    (job,) = pods.jobs
    assert [chunk.num_nodes for chunk in job.chunks] == [2, 1]
    assert pods.names == (f"{job.name}-a-0", f"{job.name}-b-0")
    assert pods.order.job == pods.names[0]
    assert pods.order.hosts == tuple(
        f"{job.name}-{pod}.{job.name}" for pod in ("a-0-0", "a-0-1", "b-0-0")
    )
    assert pods.nodes.tasks["b"][0].name == pods.order.hosts[2]


def test_equal_pods_and_gangs_of_other_schedulers_are_no_jobset(code):
    plan = plan_of(code, task("a"), task("b"))
    assert len(plan_on(plan, SETS).jobs[0].chunks) == 1
    plan = plan_of(code, task("a"), task("b", image="other/y:2"))
    gang = site_of(image="team/x:1", jobset="yes", gang="volcano")
    assert len(plan_on(plan, gang).jobs) == 2


@pytest.mark.parametrize("site", [SITE, SETS], ids=["jobs", "jobset"])
def test_names_of_pods_fit_however_long_those_of_workflow_and_group_are(code, site):
    plan = plan_of(code, task("a"), task("b", resources=BIG))
    group = GroupPlan(name="g" * 70, tasks=plan.groups[0].tasks)
    pods = plan_group(plan, group, site)
    assert max(len(host.partition(".")[0]) for host in pods.order.hosts) <= 63


def test_pods_get_the_code_where_something_trains_and_the_outputs_that_are_read(code):
    reads = InputPlan(kind=InputKind.TASK, source="made")
    plan, run_dir, pods = planned(code, fit(code, "2", inputs=(reads,)))
    output = run_dir.task_output("made")
    (code.parent / "made").mkdir()
    (code.parent / "made" / "n").write_text("41")
    os.makedirs(os.path.dirname(output))
    os.symlink(code.parent / "made", output)
    brought = bring(plan, run_dir, pods)
    (job,) = brought.jobs
    assert job.num_nodes == 2
    names = names_in(brought)
    assert "tasks/made/output/n" in names
    assert "nodes.json" in dict(job.brings)
    text = plan_in(brought)
    assert [name for name in names if name.endswith("train.py")] == ["code/train.py"]
    there = f"{pods.order.run_dir.path}/code"
    assert f'"cwd": "{there}"'.encode() in text
    assert f'"script": "{there}/train.py"'.encode() in text


def test_another_run_of_the_same_code_has_the_same_archive(code):
    found = []
    for number in range(2):
        plan = replace(plan_of(code, fit(code)), run_id=f"run-{number}")
        os.utime(code / "inner" / "train.py", (1e9 + number, 1e9 + number))
        run_dir = create_workflow_dir(plan, "", "")
        pods = plan_on(plan, ON_A_VOLUME)
        found.append(bring(plan, run_dir, pods).order)
    assert found[0].code_sha == found[1].code_sha
    assert found[0].kept == found[1].kept


def test_a_plan_travels_packed_however_large_it_is(code):
    told = InputPlan(kind=InputKind.URL, source="s3://" + "b" * (6 << 20))
    plan, run_dir, pods = planned(code, task("a", inputs=(told,)))
    brought = bring(plan, run_dir, pods)
    assert b"b" * (6 << 20) in plan_in(brought)
    assert {"nodes.json", "workflow.json.xz"} <= dict(brought.jobs[0].brings).keys()


WANDB = Credential(name="wandb", variables={"TOKEN": "key"})


def know(code, credentials):
    path = str(code.parent / "home" / "credentials.toml")
    atomic.replace_file(path, credentials, mode=0o600)


def test_only_the_credentials_that_the_group_names_go_along(code):
    know(code, b'[wandb]\nkey = "s3\\"cret"\n[other]\nkey = "mine"\n')
    plan, run_dir, pods = planned(code, task("a", credentials=(WANDB,)))
    job = bring(plan, run_dir, pods).jobs[0]
    with open(dict(job.brings)["credentials.toml"]) as file:
        text = file.read()
    assert text == '["wandb"]\n"key" = "s3\\"cret"\n'


def test_credentials_are_not_left_here_when_they_have_been_sent(code, cluster):
    know(code, b'[wandb]\nkey = "s3cret"\n')
    plan, run_dir, _ = planned(code, task("a", credentials=(WANDB,)))
    group = PodGroup(plan, plan.groups[0], run_dir, SITE, lambda _: None, lambda _: None)
    asyncio.run(group.start(GroupInput()))
    group.close()
    folder = run_dir.group("work").path
    assert any("create" in line for line in cluster.asked)
    assert "credentials.toml" not in os.listdir(os.path.join(folder, "pods"))
    assert not any("s3cret" in path.read_text(errors="replace") for path in files_below(folder))


def test_an_archive_without_a_way_to_the_pods_is_refused(code, cluster, monkeypatch):
    (code / "inner" / "large").write_bytes(random.Random(0).randbytes(5 << 20))
    plan, run_dir, pods = planned(code, fit(code))
    settled = replace(pods.jobs[0], own_keys=(("context", "lab"), ("namespace", "research")))
    pods = replace(pods, jobs=(settled,))
    bring(plan, run_dir, pods)
    cluster.say(answers={"can-i": "no"})
    with pytest.raises(UsageError, match="is too large for Secrets") as caught:
        bring(plan, run_dir, pods)
    assert caught.value.where == "group work"


def test_everything_that_pods_can_not_is_said_at_once(code):
    elsewhere = InputPlan(kind=InputKind.TASK, source="t", run_id="other")
    dataset = InputPlan(kind=InputKind.DATASET, source="digits")
    plan = plan_of(
        code,
        task("a", inputs=(elsewhere, dataset), volume_mounts=("/data",)),
        network=TaskNetwork.PRIVATE,
        container="podman",
    )
    said = [error.what for error in find_unsupported(plan, site_of())]
    assert said == [
        "`--task-network private` is for one machine: each pod has a network of its own",
        "`--container` is not for pods: each task's pod is made of its `image`",
        "the task `a` reads a dataset that is in a folder of this machine",
        "the task `a` has no image",
        "the task `a` reads the output of another run, which pods don't see",
        "`/data` of the task `a` is no volume of a cluster",
    ]


def test_outputs_of_another_run_are_read_on_a_volume(code):
    other = InputPlan(kind=InputKind.TASK, source="t", run_id="other")
    plan = plan_of(code, task("a", inputs=(other,)))
    assert find_unsupported(plan, ON_A_VOLUME) == []
    run_dir = create_workflow_dir(plan, "", "")
    pods = plan_on(plan, ON_A_VOLUME)
    names = names_in(bring(plan, run_dir, pods))
    assert not any(name.startswith("tasks/") for name in names)


def test_what_an_earlier_run_has_finished_is_looked_for_on_the_volume_once_for_all_groups(code):
    plan = replace(plan_of(code, task("a")), reused={"work": "/here/home/runs/earlier"})
    run_dir = create_workflow_dir(plan, "", "")
    pods = plan_on(plan, ON_A_VOLUME)
    there = json.loads(plan_in(bring(plan, run_dir, pods)))["reused"]
    assert there == {"work": "/team/home/runs/earlier"}

    earlier = RunDir(str(code.parent / "home" / "runs" / "earlier"))
    os.makedirs(earlier.task_output("a"))
    here = replace(plan, reused={"work": earlier.path})
    link_reused_outputs(here, run_dir)
    link_reused_outputs(here, run_dir)
    assert os.path.samefile(run_dir.task_output("a"), earlier.task_output("a"))


def test_versions_of_datasets_are_made_here_where_pods_can_not_reach_them(code, monkeypatch):
    out = OutputPlan(kind=OutputKind.DATASET, target="model")
    plan, run_dir, pods = planned(code, task("a", outputs=(out,)))
    assert b'"model"' not in plan_in(bring(plan, run_dir, pods))
    monkeypatch.setenv("MUSTER_DATASETS", "s3://bucket/sets")
    pods = plan_on(plan, SITE)
    assert pods.order.environment == {"MUSTER_DATASETS": "s3://bucket/sets"}
    assert b'"model"' in plan_in(bring(plan, run_dir, pods))
