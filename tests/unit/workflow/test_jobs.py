import pytest

from kit.workflows import workflow_plan
from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.errors import UsageError
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.engines.sites import job_of_site
from torchmuster.launcher.model.job import NodeChunk
from torchmuster.launcher.spec.site import Site
from torchmuster.workflow.jobs import MARGIN_S, job_variables, plan_jobs
from torchmuster.workflow.plan import GroupPlan, Resources, TaskPlan, TrainingPlan

SLURM = load_dialect("slurm")


def task(name, *, nodes=None, **given):
    if nodes:
        given["training"] = TrainingPlan(nodes=nodes, nproc_per_node=None, script="t.py")
    fields = ("cpu", "gpu", "memory_bytes", "platform", "nodes_excluded", "topology")
    resources = Resources(**{key: given.pop(key) for key in fields if key in given})
    return TaskPlan(name=name, resources=resources, **given)


def group(name, *tasks, **given):
    return GroupPlan(name=name, tasks=tasks or (task(f"{name}-task"),), **given)


def workflow(*groups, **given):
    defaults = {"run_id": "r1", "name": "flow", "python": ("/env/bin/python",)}
    return workflow_plan(*groups, **{**defaults, **given})


def jobs(plan, dialect=SLURM, **site):
    run_dir = RunDir("/runs/r1")
    site_job = job_of_site(Site(name=dialect.name, kind=dialect.name, **site))
    ids = {name: f"${variable}" for name, variable in job_variables(plan).items()}
    return plan_jobs(plan, dialect, run_dir, site_job, ids)


def test_each_group_waits_for_the_jobs_of_what_it_reads():
    plan = workflow(group("a"), group("b", after=("a",)), group("c", after=("a", "b")))
    found = [[entry.job_id for entry in job.job.after] for job in jobs(plan)]
    assert found == [[], ["$JOB_a"], ["$JOB_a", "$JOB_b"]]


def test_group_comes_after_those_that_it_reads_whatever_the_files_order():
    plan = workflow(group("c", after=("b",)), group("b", after=("a",)), group("a"))
    assert [job.group for job in jobs(plan)] == ["a", "b", "c"]


def test_groups_of_an_earlier_run_have_no_job():
    plan = workflow(group("a"), group("b", after=("a",)), reused={"a": "/runs/r0"})
    assert [(job.group, job.job.after) for job in jobs(plan)] == [("b", ())]


def test_groups_that_wait_for_each_other_are_an_error():
    with pytest.raises(UsageError, match="a, b wait for each other"):
        jobs(workflow(group("a", after=("b",)), group("b", after=("a",))))


def test_equal_tasks_are_one_chunk_and_the_leads_comes_first():
    tasks = (
        task("small-1", cpu=1),
        task("big", cpu=8, gpu=2, lead=True),
        task("small-2", cpu=1),
        task("many", nodes="3", cpu=1),
    )
    (job,) = jobs(workflow(group("g", *tasks)))
    assert job.job.chunks == (NodeChunk(cpus=8, gpus=2), NodeChunk(num_nodes=5, cpus=1))
    assert job.node_tasks == ("big", "small-1", "small-2", "many", "many", "many")


def test_range_of_nodes_is_passed_on():
    (job,) = jobs(workflow(group("g", task("t", nodes="2:4"))))
    assert (job.job.min_nodes, job.job.num_nodes) == (2, 4)


def test_time_limit_is_the_timeout_and_the_time_for_data():
    (job,) = jobs(workflow(group("g", exec_timeout_s=3600.0)))
    assert job.job.time_limit_s == 3600.0 + MARGIN_S


def test_head_conducts_its_group():
    (job,) = jobs(workflow(group("g")), queue="gpu", account="p")
    words = f"$PYTHON {proc.NODE_ENTRY} conduct-group --run-dir=/runs/r1 --group=g --engine=slurm"
    assert job.job.head == tuple(words.split())
    assert (job.job.queue, job.job.account, job.job.python) == ("gpu", "p", "/env/bin/python")


def test_what_cannot_be_mapped_is_named_by_its_key():
    tasks = (
        task("a", platform="dgx", topology=("rack",), image="img:1", nodes_excluded=("n1",)),
        task("b", nodes_excluded=("n2", "n1")),
    )
    plan = workflow(group("g", *tasks, queue_timeout_s=60.0), pool="p")
    (on_slurm,), (on_pbs,) = jobs(plan), jobs(plan, load_dialect("pbs"))
    keys = [sentence.partition(":")[0] for sentence in on_slurm.warnings]
    assert keys == ["platform", "topology", "queue_timeout", "exec_timeout", "image", "pool"]
    assert [entry.partition(":")[0] for entry in on_pbs.warnings[6:]] == ["nodesExcluded", "warn_s"]
    assert on_slurm.job.nodes_excluded == ("n1", "n2")


def test_image_in_a_container_is_no_warning():
    plan = workflow(group("g", task("a", image="i"), exec_timeout_s=1.0), container="apptainer")
    assert jobs(plan)[0].warnings == ()


def test_variables_of_groups_are_different_words_of_the_shell():
    names = job_variables(workflow(group("n-nodes"), group("n_nodes"), group("a")))
    assert list(names.values()) == ["JOB_n_nodes", "JOB_n_nodes_2", "JOB_a"]
