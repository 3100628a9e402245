"""Ways to pods: who may, who may not, and what breaks."""

import contextlib
import os

import pytest

from kit.waiting import wait_until
from torchmuster.core.files.layout import RunDir
from torchmuster.kubernetes.pods import reach
from torchmuster.kubernetes.pods.reach import (
    NotAllowedError,
    PodWatch,
    ask,
    find_pod,
    forward,
    job_of,
    pod_order,
)
from torchmuster.launcher.engines.base import EngineError
from unit.kubernetes.pods.conftest import JOB_ID, NO_FORWARD, forbidden, order_of

# Recorded: a pod that has ended, and one that is not there.
ENDED = "error: unable to forward port because pod is not running. Current status=Succeeded\n"
GONE = 'Error from server (NotFound): pods "run-7f3a-0-x" not found\n'


def test_a_run_directory_tells_whether_its_run_is_in_pods(run_dir, tmp_path):
    assert (pod_order(run_dir), job_of(run_dir)) == (order_of(), JOB_ID)
    other = RunDir(str(tmp_path / "other"))
    os.makedirs(other.path)
    assert (pod_order(other), job_of(other)) == (None, None)


@pytest.mark.parametrize("text", ["", "{}", "[]", "no json"])
def test_an_order_that_can_t_be_read_is_none(run_dir, text):
    with open(os.path.join(run_dir.path, "pods", "order.json"), "w") as file:
        file.write(text)
    assert pod_order(run_dir) is None


@pytest.mark.parametrize(
    ("recorded", "index", "is_up", "ended"),
    [
        ("job-pods-running", 0, True, False),
        ("job-pods-flaky", 1, False, True),  # the last of four
        ("job-pods-other-user", 0, False, True),
        ("job-pods-fresh", 1, False, False),
    ],
)
def test_the_pod_of_a_place_is_the_newest(cluster, recorded, index, is_up, ended):
    cluster.say(pods=recorded)
    pod = find_pod(JOB_ID, index)
    assert (pod.index, pod.is_up, pod.end is not None) == (index, is_up, ended)


def test_a_place_without_a_pod_has_none(cluster):
    cluster.say(pods="job-pods-quota")
    assert find_pod(JOB_ID, 1) is None
    cluster.say(pods="job-gone")
    assert find_pod(JOB_ID, 0) is None


def test_a_pod_is_reached_at_a_port_of_ours_until_the_way_is_closed(cluster):
    cluster.say(forward=43210)
    with forward(JOB_ID, "run-7f3a-0-x", 29417) as way:
        assert way.port == 43210
        assert way.command.child.wait(0.0) is None
    assert way.command.child.wait(5.0) is not None
    (asked,) = cluster.asked
    assert asked == "port-forward pod/run-7f3a-0-x :29417 --address=127.0.0.1"


LACKS = '{apiGroups: [""], resources: ["pods/portforward"], verbs: ["create"]}'


@pytest.mark.parametrize(
    ("refusal", "kind", "names_the_line_of_the_role"),
    [(NO_FORWARD, NotAllowedError, True), ([1, ENDED], EngineError, False)],
)
def test_a_way_that_can_t_be_made_is_told_apart_from_one_that_is_forbidden(
    cluster, refusal, kind, names_the_line_of_the_role
):
    cluster.say(refuse={"port-forward": refusal})
    with pytest.raises(EngineError) as caught:
        forward(JOB_ID, "run-7f3a-0-x", 29417)
    assert type(caught.value) is kind
    assert (LACKS in (caught.value.fix or "")) is names_the_line_of_the_role


def test_a_refusal_is_raised_with_the_command_and_the_clusters_words(cluster):
    cluster.say(refuse={"get": [1, GONE]})
    with pytest.raises(EngineError) as caught:
        ask(["kubectl", "get", "pod", "x"])
    assert (caught.value.where, caught.value.why) == ("kubectl get pod x", GONE.strip())


# Changes of pods: who is told of them, and what they cost.


OTHER_ID = "lab/research/other-12ab"


@contextlib.contextmanager
def watched(job_id=JOB_ID, say=lambda _: None):
    watch = PodWatch(job_id, say)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def test_a_change_of_a_pod_wakes_who_waits(cluster):
    cluster.say(watch="pod/run-7f3a-0-x")
    with watched() as watch:
        wait_until(lambda: watch.number == 1, "a change")
        watch.wait(0, 60.0)  # it has changed since, so this ends at once
    assert watch.number == 2
    (asked,) = cluster.asked
    assert asked == "get pods -l app.kubernetes.io/managed-by=torchmuster -o name --watch"


def test_a_burst_of_changes_is_one(cluster, monkeypatch):
    monkeypatch.setattr(reach, "_AGAIN_S", 0.1)
    names = "\n".join(f"pod/run-7f3a-{i}-x" for i in range(64))
    cluster.say(answers={"--watch": "\n".join([names] * 5)})
    with watched() as watch:
        # Its output ends with the names, and another request begins.
        wait_until(lambda: len(cluster.asked) == 2, "the next request", 60)
        assert 1 <= watch.number <= 4


def test_runs_of_one_namespace_share_a_request_and_hear_of_their_own_pods(cluster):
    cluster.say(watch="pod/other-12ab-1-y")
    with watched(OTHER_ID) as other, watched() as watch:
        wait_until(lambda: other.number == 1, "a change")
        assert watch.number == 1  # that it has come to a request which was open
        assert len(cluster.asked) == 1
    assert (watch.number, other.number) == (2, 2)


def test_the_last_who_leaves_ends_the_request_and_the_next_begins_another(cluster):
    for number in (1, 2):
        with watched(), watched(OTHER_ID):
            wait_until(lambda number=number: len(cluster.asked) == number, "a request")


@pytest.mark.parametrize("number", [1, 2])
def test_who_may_not_watch_pods_looks_at_them_and_hears_why_once(cluster, monkeypatch, number):
    monkeypatch.setattr(reach, "_FIRST_POLL_S", 0.1)
    cluster.say(refuse={"--watch": forbidden("pods", "watch", "pods")})
    said = [[] for _ in range(number)]
    with contextlib.ExitStack() as stack:
        watches = [stack.enter_context(watched(JOB_ID, one.append)) for one in said]
        wait_until(lambda: all(watch.number >= 2 for watch in watches), "looks", 60)
    assert len(cluster.asked) == 1
    for one in said:
        (text,) = one
        assert 'resources: ["pods"], verbs: ["watch"]' in text
