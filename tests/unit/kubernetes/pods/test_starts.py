"""Starts that come to nothing: which of them end a run, and what is said."""

import pytest

from kit.values import run_result
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.errors import JoinTimeoutError
from torchmuster.kubernetes.engine.dialect import DIALECT
from torchmuster.kubernetes.pods.starts import PodStarts
from torchmuster.launcher.engines.wait_reasons import reasons_of
from torchmuster.launcher.model.job import JobState, JobView
from unit.kubernetes.pods.conftest import JOB_ID, SILENT, forbidden, order_of, shown_pod

ERROR = "Error: exit code 1"


def starts_of(**given):
    return PodStarts(order_of(**given), JOB_ID)


def view(state, reason=None):
    return reasons_of(DIALECT).explained(JobView(job_id=JOB_ID, state=state, reason=reason))


def late(**given):
    """Return a result of pods of which one did not come."""
    report = Report(error="only 1 of 2 pods came", because=("run-7f3a-1 (its name is not known)",))
    plain = {"exit_code": JoinTimeoutError.exit_code, "attempts": 0, "report": report, **given}
    return run_result(RunState.FAILED, **plain)


def test_a_start_may_take_as_long_as_a_queue_unless_a_limit_was_given(cluster):
    waits = view(JobState.PENDING, "Unschedulable: 0/2 nodes are available: 2 Insufficient cpu.")
    assert starts_of().judge(waits, has_begun=False) is None
    assert starts_of(start_limit_s=600.0).judge(waits, has_begun=False) is None

    report = starts_of(start_limit_s=0.0).judge(waits, has_begun=False)
    assert report.error == "no pod came within 0 s (--join-timeout): no node has room for it now"
    assert report.because == (f"kubernetes says: {waits.reason}",)
    assert "--join-timeout" in report.hint
    assert cluster.asked == []


def test_pods_without_room_are_told_to_the_first_one_and_not_at_every_look():
    starts = starts_of()
    short = view(JobState.RUNNING, "Unschedulable: 0/2 nodes are available (pod 1)")
    assert starts.no_room(short).startswith("no node has room for it now")
    assert starts.no_room(short) == ""
    for other in (view(JobState.RUNNING), view(JobState.PENDING, "ContainerCreating"), None):
        assert starts_of().no_room(other) == ""


def test_nothing_is_too_late_once_the_run_has_begun_or_its_job_has_ended():
    starts = starts_of(start_limit_s=0.0)
    assert starts.judge(view(JobState.PENDING), has_begun=True) is None
    assert starts.judge(view(JobState.FAILED), has_begun=False) is None
    assert starts.judge(view(JobState.RUNNING), has_begun=False) is None
    assert starts.judge(None, has_begun=False) is None


def test_two_pods_that_end_at_once_end_the_run_with_what_they_wrote(cluster):
    cluster.say(pods="job-pods-exec-format", logs="\n  sh: a line\nand another\n")
    report = starts_of().judge(view(JobState.PENDING, ERROR), has_begun=False)
    assert report.error == "its pods end as soon as they start, with exit code 1"
    assert report.because == ("  sh: a line", "and another")
    assert report.at.startswith("pod run-7f3a-0-")


def test_one_pod_that_ended_may_be_an_accident_and_our_own_codes_are_none(cluster):
    starts = starts_of()
    for recorded in ("job-pods-running", "job-pods-failed-113", "job-pods-other-user"):
        cluster.say(pods=recorded)
        assert starts.judge(view(JobState.PENDING, ERROR), has_begun=False) is None


def test_a_cluster_that_does_not_answer_ends_no_run(cluster):
    cluster.say(refuse={"get pods": SILENT})
    starts = starts_of()
    assert starts.judge(view(JobState.PENDING, ERROR), has_begun=False) is None


def test_a_verdict_on_pods_that_did_not_come_has_the_clusters_reason():
    starts = starts_of()
    starts.judge(view(JobState.RUNNING, "Unschedulable: no room (pod 1)"), has_begun=False)
    report = starts.joined(late()).report
    assert report.because == (
        "kubernetes says: no node has room for it now: Unschedulable: no room (pod 1)",
        "run-7f3a-1 (its name is not known)",
    )
    assert starts.joined(late(report=report)).report == report  # once


def policy(name, **labels):
    spec = {"podSelector": {"matchLabels": labels}}
    return {"kind": "NetworkPolicy", "metadata": {"name": name}, "spec": spec}


POLICY = policy("deny", **{"torchmuster.dev/run": "run-7f3a"})
OTHER = policy("other", a="b")
NOT_LISTED = forbidden(
    "networkpolicies.networking.k8s.io", "list", "networkpolicies", "networking.k8s.io"
)
SELECTS = "kubernetes says: the NetworkPolicy deny (Ingress) of the namespace selects these pods"
SEES_NONE = (
    "kubernetes says: no NetworkPolicy of the namespace research selects these pods;"
    " those of the network itself, as of Cilium or Calico, are not seen here"
)
MAY_NOT = "whether NetworkPolicies select these pods is not known: you may not list them"


@pytest.mark.parametrize("why", ["run-7f3a-1 (no answer in time)", "n2: no agent has connected"])
@pytest.mark.parametrize(
    ("answers", "refuse", "said"),
    [
        ([OTHER, POLICY], {}, SELECTS),
        ([OTHER], {}, SEES_NONE),
        ([], {"networkpolicies": NOT_LISTED}, MAY_NOT),
        ([], {"networkpolicies": SILENT}, None),
    ],
)
def test_pods_that_run_and_do_not_answer_get_what_the_cluster_has_on_it(
    cluster, why, answers, refuse, said
):
    cluster.say(
        pods="job-pods-running", refuse=refuse, answers={"networkpolicies": {"items": answers}}
    )
    starts = starts_of()
    starts.judge(view(JobState.PENDING, "ContainerCreating"), has_begun=False)
    starts.judge(view(JobState.RUNNING), has_begun=False)
    came = starts.joined(late(report=Report(error="only 1 of 2 pods came", because=(why,))))
    told = ("kubernetes says: all pods run", said, why)
    assert came.report.because == tuple(text for text in told if text)
    assert "may keep them apart" in came.report.hint
    assert starts.joined(came) is came  # once


@pytest.mark.parametrize(("found", "word"), [("service/run-7f3a\n", "there"), ("", "gone")])
def test_pods_without_names_get_whether_their_service_is_there(cluster, found, word):
    cluster.say(answers={"get services": found})
    starts = starts_of()
    starts.judge(view(JobState.RUNNING), has_begun=False)
    assert starts.joined(late()).report.because[1] == (
        f"kubernetes says: the Service run-7f3a is {word}, which gives the pods their names"
    )
    assert not any("networkpolicies" in line for line in cluster.asked)


def test_nodes_that_no_network_connects_get_the_same(cluster):
    error = "no network connects all nodes: run-7f3a-0 and run-7f3a-1 don't reach each other"
    cluster.say(pods="job-pods-running", answers={"networkpolicies": {"items": [POLICY]}})
    apart = late(exit_code=7, report=Report(error=error))
    assert starts_of().joined(apart).report.because[1] == SELECTS


def test_other_verdicts_stay_as_they_are():
    starts = starts_of()
    starts.judge(view(JobState.RUNNING, "OOMKilled: (pod 1)"), has_begun=True)
    for result in (late(exit_code=1), late(report=None)):
        assert starts.joined(result) is result


@pytest.mark.parametrize("where", ["containers", "initContainers"])
def test_a_container_that_a_mesh_has_put_beside_ours_is_named(cluster, where):
    cluster.say(pods="job-pods-running", answers={"get pods": {"items": [with_proxy(where)]}})
    starts = starts_of()
    report = starts.joined(late()).report
    assert report.because[0] == (
        "kubernetes says: the cluster has put `istio-proxy` into the pods beside muster's container: the proxy of a mesh"
        " refuses connections that are not its own, and keeps the pods from ending"
    )
    assert "istio-injection-" in report.hint
    waits = "muster: waiting for pods: run-7f3a-1 (no answer in time); 9 min 55 s left"
    cluster.say(logs=waits, answers={"get pods": {"items": [with_proxy(where)]}})
    assert starts.waits_for(view(JobState.RUNNING)).endswith("beside muster's container")


def with_proxy(where):
    pod = shown_pod({"running": {}}, phase="Running")
    pod["spec"]["containers"] = [{"name": "node"}]
    beside = {"name": "istio-proxy", "restartPolicy": "Always"}
    pod["spec"].setdefault(where, []).insert(0, beside)
    proxy = {"name": "istio-proxy", "state": {"running": {}}}
    pod["status"]["containerStatuses"].insert(0, proxy)
    return pod


def test_what_the_first_pod_waits_for_is_told_once(cluster):
    starts, running = starts_of(), view(JobState.RUNNING)
    waits = "waiting for pods: run-7f3a-1 (its name is not known); 9 min 55 s left"
    cluster.say(pods="job-pods-running", logs=f"muster: {waits}\n")
    assert starts.waits_for(running) == waits
    assert starts.waits_for(running) is None
    cluster.say(pods="job-pods-running", logs="muster: run on run-7f3a-0, run-7f3a-1\n")
    assert starts.waits_for(running) is None


def test_before_the_pods_run_none_of_them_is_asked_what_it_waits_for(cluster):
    assert starts_of().waits_for(view(JobState.PENDING)) is None
    assert cluster.asked == []
