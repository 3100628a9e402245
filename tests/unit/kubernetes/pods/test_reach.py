"""Ways to pods: who may, who may not, and what breaks."""

import os

import pytest

from torchmuster.core.files.layout import RunDir
from torchmuster.kubernetes.pods.reach import (
    NotAllowedError,
    ask,
    find_pod,
    forward,
    job_of,
    pod_order,
)
from torchmuster.launcher.engines.base import EngineError
from unit.kubernetes.pods.conftest import JOB_ID, order_of

# Recorded: a user without the right, a pod that has ended, one that is not there.
FORBIDDEN = (
    'Error from server (Forbidden): pods "run-7f3a-0-x" is forbidden: User "u" cannot create resource "pods/portforward"'
    ' in API group "" in the namespace "research"\n'
)
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


@pytest.mark.parametrize(("stderr", "kind"), [(FORBIDDEN, NotAllowedError), (ENDED, EngineError)])
def test_a_way_that_can_t_be_made_is_told_apart_from_one_that_is_forbidden(cluster, stderr, kind):
    cluster.say(refuse={"port-forward": [1, stderr]})
    with pytest.raises(EngineError) as caught:
        forward(JOB_ID, "run-7f3a-0-x", 29417)
    assert type(caught.value) is kind


def test_the_missing_line_of_the_role_is_named(cluster):
    cluster.say(refuse={"port-forward": [1, FORBIDDEN]})
    with pytest.raises(NotAllowedError) as caught:
        forward(JOB_ID, "run-7f3a-0-x", 29417)
    assert (
        '{apiGroups: [""], resources: ["pods/portforward"], verbs: ["create"]}' in caught.value.fix
    )


def test_a_refusal_is_raised_with_the_command_and_the_clusters_words(cluster):
    cluster.say(refuse={"get": [1, GONE]})
    with pytest.raises(EngineError) as caught:
        ask(["kubectl", "get", "pod", "x"])
    assert (caught.value.where, caught.value.why) == ("kubectl get pod x", GONE.strip())
