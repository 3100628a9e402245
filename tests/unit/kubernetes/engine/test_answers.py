"""Every answer that was recorded from a real control plane (1.36, Kueue 0.13 and 0.19), and what is made of it: one row for each."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kit.tables import rows
from torchmuster.kubernetes.engine.answers import (
    policies_on,
    queue_reasons,
    read_objects,
    runs_of,
    view_of,
    warnings_of,
)
from torchmuster.kubernetes.engine.dialect import REASONS
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.model.job import JobState, JobView

# Trimmed to what is read: `kubectl get jobs.batch,pods -l ... -o json`, and events.
RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
# What happened: state, exit code, whether it waits for what can heal or never can, hosts, and how the reason begins.
VIEWS = {
    what: cells
    for what, *cells in rows(
        """
        job-pods-fresh                  PENDING    -  waits  n1 n2  ContainerCreating
        job-pods-running                RUNNING    -  -      n1 n2  -
        job-pods-succeeded              SUCCEEDED  0  -      n1     -
        job-pods-failed-113             FAILED     -  -      n2     PodFailurePolicy:
        job-pods-unschedulable          PENDING    -  waits  -      Unschedulable: 0/2 nodes
        job-pods-errimagepull           PENDING    -  waits  n1     ErrImagePull:
        job-pods-imagepullbackoff       PENDING    -  waits  n2 n1  ErrImagePull:
        job-pods-neverpull              PENDING    -  never  n1 n2  ErrImageNeverPull:
        job-pods-command-not-found      PENDING    -  never  n1     StartError:
        job-pods-oomkilled              RUNNING    -  waits  n1 n2  OOMKilled (pod 1)
        job-pods-evicting               RUNNING    -  waits  n1 n2  EvictionByEvictionAPI:
        job-pods-evicted                RUNNING    -  waits  n1 n2  EvictionByEvictionAPI:
        job-pods-node-lost-5s           RUNNING    -  -      n2 n1  -
        job-pods-node-lost-terminating  PENDING    -  waits  n2 n1  DeletionByTaintManager:
        job-pods-node-lost-forced       PENDING    -  waits  n2 n1  DeletionByTaintManager:
        job-pods-pod-deleting           RUNNING    -  -      n1     -
        job-pods-pod-replaced           RUNNING    -  -      n1     -
        job-pods-jdl                    TIMED_OUT  -  -      -      DeadlineExceeded:
        job-pods-deleting-foreground    ENDING     -  -      n1 n2  -
        pods-deleting                   ENDING     -  -      n1 n2  -
        job-suspended                   HELD       -  waits  -      JobSuspended:
        job-suspending                  HELD       -  waits  n1     JobSuspended:
        job-resumed                     RUNNING    -  -      n1     -
        kueue-no-queue                  HELD       -  never  -      Inadmissible: LocalQueue nosuch
        kueue-readmitted-job-pods       RUNNING    -  -      n1     -
        kueue-admitted                  RUNNING    -  -      n2     -
        kueue-next                      HELD       -  waits  -      Pending: couldn't assign
        kueue-second                    HELD       -  waits  -      Pending: couldn't assign
        kueue-preempted                 HELD       -  waits  -      Preempted: Preempted to accommodate
        kueue-deactivated               HELD       -  waits  -      Deactivated: The workload is
        kueue-stopped                   HELD       -  waits  -      Inadmissible: ClusterQueue stopped
        kueue-held                      HELD       -  waits  -      Inadmissible: LocalQueue held
        kueue-nowhere                   HELD       -  waits  -      Inadmissible: ClusterQueue nosuch
        kueue-too-far                   HELD       -  waits  -      Pending: couldn't assign
        kueue-too-large                 HELD       -  never  -      Pending: couldn't assign
        """,
        6,
    )
}


WAITS = {"waits": False, "never": True, "-": None}


def run_of(what):
    (run,) = runs_of(RECORDED[what]).values()
    return run


def explained(what):
    """Return what is shown of a run, with the reason of its queue."""
    run = run_of(what)
    return REASONS.explained(view_of(run, queue=queue_reasons(RECORDED[what]).get(run.uid)))


def explained_by(reason, state=JobState.PENDING):
    return REASONS.explained(JobView(job_id="j", state=state, reason=reason))


@pytest.mark.parametrize("what", VIEWS)
def test_an_answer_is_read_as_it_was_meant(what):
    state, code, waits, nodes, begins = VIEWS[what]
    view = explained(what)
    assert view.state is JobState[state]
    assert view.exit_code == (None if code == "-" else int(code))
    assert view.nodes == (() if nodes == "-" else tuple(nodes.split()))
    assert (view.reason or "-").startswith(begins + " " * begins.endswith(":"))
    assert (view.reason is None) == (begins == "-")
    assert (view.wait.never if view.wait is not None else None) == WAITS[waits]


@pytest.mark.parametrize(
    ("what", "events", "waits", "sentence"),
    rows(
        """
        job-pods-quota        events-quota        waits  the namespace's quota has no room for its pods
        job-pods-podsecurity  events-podsecurity  never  the namespace's Pod Security level forbids its pods
        job-pods-podsecurity  events-limit-range  never  the namespace's LimitRange forbids what its pods ask for
        """,
        4,
    ),
)
def test_what_keeps_pods_from_being_made_is_said_by_events_alone(what, events, waits, sentence):
    run = run_of(what)
    assert view_of(run).reason is None
    view = view_of(run, warnings_of(RECORDED[events], [run.run]))
    wait = REASONS.explained(replace(view, state=JobState.PENDING)).wait
    assert wait is not None
    assert (wait.sentence, wait.never) == (sentence, WAITS[waits])


@pytest.mark.parametrize(
    ("what", "state", "waits", "sentence"),
    rows(
        """
        job-pods-claim-missing  PENDING  never  a volume that it names does not exist
        job-pods-claim-unbound  PENDING  waits  a claim that it names has no volume yet
        job-pods-claim-one-pod  RUNNING  waits  a volume that it names is for one pod, and another pod has it
        """,
        4,
    ),
)
def test_what_is_wrong_with_a_volume_is_told_apart(what, state, waits, sentence):
    view = explained(what)
    assert (view.state, view.wait.sentence) == (JobState[state], sentence)
    assert view.wait.never is WAITS[waits]


def test_a_pod_that_is_prepared_for_ever_says_why_in_events_alone():
    run = run_of("job-pods-mounting")
    assert view_of(run).reason == "ContainerCreating"
    warnings = warnings_of(RECORDED["events-mounting"], [pod.name for pod in run.pods])
    view = REASONS.explained(view_of(run, warnings))
    assert view.reason.startswith("FailedMount: ")
    assert view.wait.sentence.startswith("something that it mounts does not exist")


@pytest.mark.parametrize(
    ("sentence", "reason"),
    rows(
        """
        # kubernetes pkg/volume/util/operationexecutor: of a volume that is ReadWriteOnce, for a pod on another node.
        a volume that it names is attached to another node, and can be to one only  FailedAttachVolume: Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) run-0
        a volume that it names is not to be had on the nodes that would have room   Unschedulable: 0/4 nodes are available: 4 node(s) had volume node affinity conflict.
        # Of a scheduler of 1.36, for nodes of which one has the label.
        no node has room for it now                                                 Unschedulable: 0/3 nodes are available: 1 Insufficient memory, 2 node(s) didn't match Pod's node affinity/selector.
        no node has room for it now                                                 Unschedulable: 0/3 nodes are available: 1 node(s) were unschedulable, 2 node(s) didn't match Pod's node affinity/selector.
        no node has the labels that it asks for                                     Unschedulable: 0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.
        the node can't give it a network                                            FailedCreatePodSandBox: Failed to create pod sandbox: plugin type="calico" failed
        """
    ),
)
def test_what_no_record_has_is_read_from_kubernetes_source(reason, sentence):
    assert explained_by(reason).wait.sentence == sentence


def test_a_pod_that_ended_at_once_leaves_its_own_error():
    ended = run_of("job-pods-other-user").newest()[0].end
    assert "can't be started again" in ended.last_message


def test_warnings_about_other_objects_are_not_ours():
    assert warnings_of(RECORDED["events-quota"], ["another"]) == ()


def test_a_place_belongs_to_the_pod_that_stays():
    run = run_of("job-pods-flaky")
    ended = [pod for pod in run.pods if pod.end is not None]
    assert len(ended) == 4
    assert run.newest()[1] is ended[-1]
    assert all(pod.is_up for pod in run_of("job-pods-pdl").newest().values())


def test_the_queues_reason_is_found_by_the_jobs_uid():
    found = queue_reasons(RECORDED["kueue-workloads"])
    assert [str(reason) for reason in found.values()] == [
        "Pending: couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor gpu, 2 more needed",
        "Inadmissible: LocalQueue nosuch doesn't exist",
    ]


def test_documents_one_after_the_other_are_read_as_those_of_a_list():
    one, other = {"kind": "Job"}, {"kind": "Secret"}
    texts = f"{json.dumps(one)}\n{json.dumps(other, indent=1)}\n"
    assert read_objects(texts) == [one, other]
    assert read_objects(json.dumps({"kind": "List", "items": [one, other]})) == [one, other]
    assert read_objects("") == []


@pytest.mark.parametrize("text", ["no json", '{"kind": "Job"} and more', "[1, 2]", "{" * 5000])
def test_an_answer_that_is_no_object_is_said_to_be_unreadable(text):
    with pytest.raises(EngineError) as caught:
        read_objects(text)
    assert caught.value.what == "the answer of kubectl can't be read"


@pytest.mark.parametrize(
    ("what", "sentence", "ends"),
    rows(
        """
        kueue-next         its queue has no room for it now                 4 more needed; it is the next
        kueue-second       its queue has no room for it now                 ; 1 before it in the queue
        kueue-preempted    a run of a higher priority has its place         flavor gpu, 4 more needed
        kueue-deactivated  its queue was told to leave it out               The workload is deactivated
        kueue-stopped      its queue is stopped, or does not lead anywhere  is inactive
        kueue-too-far      no part of the topology                          doesn't allow to fit any of 2 pod(s)
        kueue-too-large    it asks for more than its queue can ever give    (5 > 4)
        """,
        3,
    ),
)
def test_a_queue_says_why_it_does_not_admit_and_how_many_are_before(what, sentence, ends):
    view = explained(what)
    assert view.wait.sentence.startswith(sentence)
    assert view.reason.endswith(ends)


NO_ROOM = "insufficient unused quota for nvidia.com/gpu in flavor b, 2 more needed"
TOO_MUCH = "insufficient quota for nvidia.com/gpu in flavor a, request > maximum capacity (5 > 4)"


@pytest.mark.parametrize(
    ("kinds", "never"),
    [
        ([f"{TOO_MUCH}, {NO_ROOM}"], False),  # another flavor may have room
        ([f"{NO_ROOM}, {TOO_MUCH}"], False),
        ([NO_ROOM, TOO_MUCH], True),  # recorded, of a JobSet
        ([TOO_MUCH, NO_ROOM], True),
        ([NO_ROOM, f"{TOO_MUCH}, {NO_ROOM}"], False),
    ],
)
@pytest.mark.parametrize("word", ["Pending", "ExceedsMaxQuota", "WaitingForQuota"])
def test_one_kind_of_pods_that_no_flavor_can_ever_take_keeps_all_from_starting(kinds, never, word):
    said = [
        f"couldn't assign flavors to pod set {name}: {k}"
        for name, k in zip("ab", kinds, strict=False)
    ]
    reason = f"{word}: {'; '.join(said)}; 1 before it in the queue"
    assert explained_by(reason, JobState.HELD).wait.never == never


@pytest.mark.parametrize(
    ("reason", "sentence", "never"),
    [
        ("Misconfigured: LocalQueue nosuch doesn't exist", "there is no such queue", True),
        ("Misconfigured: ClusterQueue nosuch doesn't exist", "its queue is stopped, or", False),
        ("Suspended: LocalQueue held is on hold", "its queue is stopped, or", False),
        ("WaitingForPreemptedWorkloads: Pending the preemption", "runs of a lower", False),
        ("NoMatchingFlavor: couldn't assign flavors", "no kind of nodes of its queue", False),
        ("WaitingForPodsReady: waiting", "its queue waits until the pods", False),
        ("PendingEvaluation: not yet", "it waits in its queue", False),
        ("WaitingForQuota: insufficient unused quota for cpu", "its queue has no room", False),
    ],
)
def test_the_words_of_a_newer_kueue_are_known(reason, sentence, never):
    wait = explained_by(reason, JobState.HELD).wait
    assert wait.sentence.startswith(sentence)
    assert wait.never == never


def test_the_jobs_of_a_jobset_are_read_one_by_one():
    runs = runs_of(RECORDED["jobset-running"])
    assert [view_of(run).state for run in runs.values()] == [JobState.RUNNING] * 2
    assert [view_of(run).nodes for run in runs.values()] == [("n2",), ("n1",)]


def test_a_queue_holds_a_jobset_as_one_and_each_of_its_jobs_says_why():
    objects = RECORDED["jobset-queued"]
    queues = queue_reasons(objects)
    views = [view_of(run, queue=queues.get(run.uid)) for run in runs_of(objects).values()]
    assert [view.state for view in views] == [JobState.HELD] * 2
    assert len({view.reason for view in views}) == 1
    assert "couldn't assign flavors to pod set b" in views[0].reason


def test_a_container_that_is_not_ours_stands_beside_it_and_does_not_keep_a_run_from_ending():
    """The proxy of a mesh may be first among the containers; of ours, which ended, the pod still runs."""
    objects = json.loads(json.dumps(RECORDED["job-pods-running"]))
    for one in (one for one in objects if one["kind"] == "Pod"):
        one["spec"]["containers"] = [{"name": "istio-proxy"}, {"name": "node"}]
        proxy = {"name": "istio-proxy", "state": {"running": {}}}
        one["status"]["containerStatuses"].insert(0, proxy)
    (run,) = runs_of(objects).values()
    assert {pod.others for pod in run.pods} == {("istio-proxy",)}
    assert view_of(run).state is JobState.RUNNING
    for code, state in ((0, JobState.SUCCEEDED), (113, JobState.FAILED), (75, JobState.PENDING)):
        for one in (one for one in objects if one["kind"] == "Pod"):
            one["status"]["containerStatuses"][1]["state"] = {"terminated": {"exitCode": code}}
        (run,) = runs_of(objects).values()
        assert view_of(run).state is state


# Which NetworkPolicies select a pod, by all forms of a selector.


LABELS = {"app": "a", "tier": "b"}


def policy(selector, **spec):
    return {"metadata": {"name": "p"}, "spec": {"podSelector": selector, **spec}}


def needs(operator, key, *values):
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("selector", "selects"),
    [
        ({}, True),
        ({"matchLabels": {"app": "a"}}, True),
        ({"matchLabels": {"app": "a", "tier": "c"}}, False),
        (needs("In", "app", "x", "a"), True),
        (needs("In", "other", "a"), False),
        (needs("NotIn", "app", "a"), False),
        (needs("NotIn", "other", "a"), True),
        (needs("Exists", "app"), True),
        (needs("Exists", "other"), False),
        (needs("DoesNotExist", "other"), True),
        (needs("DoesNotExist", "app"), False),
        (needs("Unheard", "app"), False),
    ],
)
def test_a_selector_is_read_as_the_api_does(selector, selects):
    assert bool(policies_on([policy(selector)], LABELS)) == selects


def test_a_policy_is_named_with_what_it_is_for():
    assert policies_on([policy({})], LABELS) == ("p (Ingress)",)
    assert policies_on([policy({}, egress=[{}])], LABELS) == ("p (Ingress, Egress)",)
    assert policies_on([policy({}, policyTypes=["Egress"])], LABELS) == ("p (Egress)",)
