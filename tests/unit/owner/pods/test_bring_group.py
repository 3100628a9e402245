"""A group of a workflow as Jobs: which pods there are, what they bring along, and what is refused before."""

import os
import tarfile

import pytest

from torchmuster.files import atomic
from torchmuster.model.workflow import (
    Credential,
    GroupPlan,
    InputKind,
    InputPlan,
    OutputKind,
    OutputPlan,
    Resources,
    TaskNetwork,
    TaskPlan,
    TrainingPlan,
    WorkflowPlan,
)
from torchmuster.owner.create import create_workflow_dir
from torchmuster.owner.pods.bring_group import (
    bring_group,
    plan_group,
    pod_kinds,
    refuse_what_pods_can_not,
)
from torchmuster.spec.sites.site import Site

SITE = Site(
    name="k", kind="kubernetes", origin="muster.toml:1:1", own_keys=(("image", "team/x:1"),)
)
BIG = Resources(cpu=8, gpu=4)


def task(name, **more):
    return TaskPlan(name=name, command=("true",), **more)


@pytest.fixture
def code(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MUSTER_DATASETS", raising=False)
    folder = tmp_path / "code"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "train.py").write_text("")
    return folder


def plan_of(code, *tasks, **more):
    return WorkflowPlan(
        run_id="20261123-101010-two-1acd",
        name="two",
        groups=(GroupPlan(name="work", tasks=tasks),),
        spec_path="two.yaml",
        python=("python3",),
        cwd=str(code / "inner"),
        **more,
    )


def planned(code, *tasks):
    plan = plan_of(code, *tasks)
    run_dir = create_workflow_dir(plan, "", "")
    return plan, run_dir, plan_group(plan, plan.groups[0], SITE)


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


def test_names_of_pods_fit_however_long_those_of_workflow_and_group_are(code):
    plan = plan_of(code, task("a"), task("b", resources=BIG))
    group = GroupPlan(name="g" * 70, tasks=plan.groups[0].tasks)
    pods = plan_group(plan, group, SITE)
    assert max(len(host.partition(".")[0]) for host in pods.order.hosts) <= 63


def test_pods_get_the_code_where_something_trains_and_the_outputs_that_are_read(code):
    script = str(code / "inner" / "train.py")
    training = TrainingPlan(nodes="2", nproc_per_node="1", script=script)
    reads = InputPlan(kind=InputKind.TASK, source="made")
    plan, run_dir, pods = planned(code, task("fit", training=training, inputs=(reads,)))
    output = run_dir.task_output("made")
    (code.parent / "made").mkdir()
    (code.parent / "made" / "n").write_text("41")
    os.makedirs(os.path.dirname(output))
    os.symlink(code.parent / "made", output)
    job = bring_group(plan, plan.groups[0], run_dir, pods).jobs[0]
    assert job.num_nodes == 2
    with tarfile.open(dict(job.brings)["code.tar.gz"]) as archive:
        names = archive.getnames()
        text = archive.extractfile("workflow.json").read()
    assert {"tasks/made/output/n", "nodes.json"} <= set(names)
    assert [name for name in names if name.endswith("train.py")] == ["code/train.py"]
    there = f"{pods.order.run_dir.path}/code"
    assert f'"cwd": "{there}"'.encode() in text
    assert f'"script": "{there}/train.py"'.encode() in text


def test_only_the_credentials_that_the_group_names_go_along(code):
    (code.parent / "home").mkdir()
    known = b'[wandb]\nkey = "s3\\"cret"\n[other]\nkey = "mine"\n'
    atomic.replace_file(str(code.parent / "home" / "credentials.toml"), known, mode=0o600)
    named = Credential(name="wandb", variables={"TOKEN": "key"})
    plan, run_dir, pods = planned(code, task("a", credentials=(named,)))
    job = bring_group(plan, plan.groups[0], run_dir, pods).jobs[0]
    with open(dict(job.brings)["credentials.toml"]) as file:
        text = file.read()
    assert text == '["wandb"]\n"key" = "s3\\"cret"\n'


def test_everything_that_pods_can_not_is_said_at_once(code):
    elsewhere = InputPlan(kind=InputKind.TASK, source="t", run_id="other")
    dataset = InputPlan(kind=InputKind.DATASET, source="digits")
    plan = plan_of(
        code,
        task("a", inputs=(elsewhere, dataset), volume_mounts=("/data",)),
        network=TaskNetwork.PRIVATE,
        container="podman",
    )
    bare = Site(name="k", kind="kubernetes", origin="muster.toml:1:1")
    said = [error.what for error in refuse_what_pods_can_not(plan, bare)]
    assert said == [
        "`--task-network private` is for one machine: each pod has a network of its own",
        "`--container` is not for pods: each task's pod is made of its `image`",
        "the task `a` reads a dataset that is in a folder of this machine",
        "the task `a` has no image",
        "the task `a` reads the output of another run, which pods don't see",
        "`/data` of the task `a` is no volume of a cluster",
    ]


def test_versions_of_datasets_are_made_here_where_pods_can_not_reach_them(code, monkeypatch):
    out = OutputPlan(kind=OutputKind.DATASET, target="model")
    plan, run_dir, pods = planned(code, task("a", outputs=(out,)))
    job = bring_group(plan, plan.groups[0], run_dir, pods).jobs[0]
    with tarfile.open(dict(job.brings)["code.tar.gz"]) as archive:
        assert b'"model"' not in archive.extractfile("workflow.json").read()
    monkeypatch.setenv("MUSTER_DATASETS", "s3://bucket/sets")
    pods = plan_group(plan, plan.groups[0], SITE)
    assert pods.order.environment == {"MUSTER_DATASETS": "s3://bucket/sets"}
    job = bring_group(plan, plan.groups[0], run_dir, pods).jobs[0]
    with tarfile.open(dict(job.brings)["code.tar.gz"]) as archive:
        assert b'"model"' in archive.extractfile("workflow.json").read()
