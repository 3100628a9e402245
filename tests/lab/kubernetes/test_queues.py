"""Runs and groups in a queue of a real Kueue, and groups of several kinds of pods as JobSets of a real controller."""

import re

import pytest

from kit.waiting import wait_until
from lab.kubernetes import extensions
from lab.kubernetes.cluster import GPU
from lab.kubernetes.user import NAMESPACE

LIMIT_S = 90.0
JOBSETS = "jobsets.jobset.x-k8s.io"
QUEUE, URGENT = "team", "urgent"
WORKFLOW = """\
workflow:
  name: two
  groups:
  - name: work
    tasks:
    - name: lead
      lead: true
      command: ["bash", "-c"]
      args: ["echo lead {{attempt}} finds $(getent hosts {{host:other}}); until [ -e STOP ]; do sleep 0.1; done"]
      resource: small
    - name: other
      command: ["bash", "-c"]
      args: ["echo other {{attempt}}; exec sleep 1000"]
      resource: big
  resources:
    small: {cpu: 0, gpu: 1, memory: 200Mi}
    big: {cpu: 0, gpu: 2, memory: 200Mi}
"""


@pytest.fixture(scope="module")
def extended(cluster):
    """Return the cluster with both extensions and a queue of 4 GPUs."""
    for name in extensions.PORTS:
        if (reason := extensions.why_not(name)) is not None:
            pytest.skip(reason)
    for name in extensions.PORTS:
        extensions.start(cluster, name)
    resources = {"cpu": "8", "memory": "16Gi", GPU: "4"}
    quota = [{"name": name, "nominalQuota": number} for name, number in resources.items()]
    flavors = [{"name": "gpu", "resources": quota}]
    spec = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": list(resources), "flavors": flavors}],
    }
    kueue = {"apiVersion": "kueue.x-k8s.io/v1beta1"}
    place = {"name": QUEUE, "namespace": NAMESPACE}
    cluster.create(
        {**kueue, "kind": "ResourceFlavor", "metadata": {"name": "gpu"}},
        {**kueue, "kind": "ClusterQueue", "metadata": {"name": QUEUE}, "spec": spec},
        {**kueue, "kind": "LocalQueue", "metadata": place, "spec": {"clusterQueue": QUEUE}},
        {
            **kueue,
            "kind": "WorkloadPriorityClass",
            "metadata": {"name": URGENT},
            "value": 1000,
            "description": "",
        },
    )
    return cluster


@pytest.fixture
def queue(extended, bench):
    """Return what a test does, with its runs in the queue."""
    bench.site(queue=QUEUE, home=str(bench.shared / "home"))
    return bench


def submit(bench, run_id, **keys):
    """Start the workflow of two kinds of pods, which ends when `end` says so; return the process."""
    bench.site(queue=QUEUE, **keys)
    text = WORKFLOW.replace("STOP", str(bench.shared / f"stop-{run_id}"))
    (bench.user.folder / "two.yaml").write_text(text)
    return bench.start_words(run_id, "submit", "two.yaml", "--on", "kubernetes")


def end(bench, run_id, process):
    """Let a workflow end well; return its exit code."""
    (bench.shared / f"stop-{run_id}").touch()
    return bench.end(process)


def test_a_run_in_a_queue_trains_and_leaves_nothing(queue):
    run = queue.train("--gpus-per-node", "1")
    queue.end_well(run)
    queue.wait_nothing_left()


def test_more_than_the_whole_quota_ends_with_the_sentence_of_the_queue(queue):
    run = queue.start("--gpus-per-node", "3")
    assert queue.end(run, limit_s=60) != 0
    assert "it asks for more than its queue can ever give" in queue.said
    assert re.search(r"maximum capacity \((6 > )?4\)", queue.said)  # by the release of Kueue
    queue.wait_nothing_left()


def test_a_run_whose_place_is_taken_goes_on_later_as_the_same_run(queue):
    run = queue.train("--gpus-per-node", "2")
    step = queue.step()
    urgent = submit(queue, "u", queue_priority=URGENT)
    queue.wait_said("a run of a higher priority has its place", run_id="r")
    queue.wait_said("lead 0 finds")
    assert len(queue.user.objects("pods")) == 2  # those of the group alone
    assert end(queue, "u", urgent) == 0
    queue.run_id = "r"
    queue.wait_up(attempt=1, process=run)
    queue.end_well(run)
    assert queue.begun_at() >= step
    assert (queue.result()["attempts"], queue.result()["restarts_spent"]) == (2, 0)


def test_a_group_of_two_kinds_of_pods_is_one_jobset_that_goes_as_a_whole(queue):
    group = submit(queue, "a")
    queue.wait_said("lead 0 finds")
    (jobset,) = queue.user.objects(JOBSETS)
    assert len(jobset["spec"]["replicatedJobs"]) == 2
    assert end(queue, "a", group) == 0
    assert not queue.user.objects(f"{JOBSETS},jobs.batch,services,secrets")


def test_of_two_groups_that_do_not_fit_together_one_waits_as_a_whole(queue):
    first = submit(queue, "a")
    queue.wait_said("lead 0 finds")
    second = submit(queue, "b")
    queue.wait_said("its queue has no room for it now")
    assert len(queue.user.objects("pods")) == 2
    assert end(queue, "a", first) == 0
    assert end(queue, "b", second) == 0


def test_a_task_whose_pod_is_deleted_runs_again_in_the_same_jobset(queue):
    group = submit(queue, "a")
    queue.wait_said("other 0")
    pods = [pod["metadata"]["name"] for pod in queue.user.objects("pods")]
    (other,) = [name for name in pods if "-b-0-0-" in name]
    queue.kubectl("delete", "pod", other, "--wait=false")
    queue.wait_said("other 1")
    assert end(queue, "a", group) == 0


def test_a_cancel_removes_the_jobset_with_all_that_is_its(queue):
    group = submit(queue, "a")
    queue.wait_said("lead 0 finds")
    code, _ = queue.user.run("cancel", "a")
    assert code == 0
    assert queue.end(group) != 0
    kinds = f"{JOBSETS},jobs.batch,services,secrets,pods"
    wait_until(lambda: not queue.user.objects(kinds), "an empty namespace", LIMIT_S)
