"""Pods of dead nodes are removed only where the cluster and the head both say so."""

from dataclasses import replace

import pytest

from kit.records import lines
from torchmuster.kubernetes.pods.losses import LostPodRemover, warn_of_leaving_pods
from torchmuster.kubernetes.pods.reach import RunInPods
from unit.kubernetes.engine.site_jobs import DEFAULT
from unit.kubernetes.pods.conftest import JOB_ID, order_of

AT = "2026-11-22T00:27:30.000Z"
LOST = {"event": "node_lost", "node": "run-7f3a-0 (n2)"}
BACK = {"event": "agent_joined", "node": "run-7f3a-0 (n1)"}
ANEW = {"event": "run_started"}
POD = "run-7f3a-0-wt22k"  # of `job-pods-node-lost-terminating`: on n2, deleted by the taint manager
NO_DELETE = (
    'Error from server (Forbidden): pods "p" is forbidden: User "u" cannot delete resource "pods" in API group ""'
    ' in the namespace "research"\n'
)


@pytest.fixture
def release(run_dir, cluster):
    cluster.say(pods="job-pods-node-lost-terminating")
    said = []
    return LostPodRemover(RunInPods(run_dir, order_of(), JOB_ID), said.append), said


def events(run_dir, *rows):
    lines(run_dir.events, [{"time": AT, **row} for row in rows])


def changes(cluster):
    return [line for line in cluster.asked if not line.startswith("get ")]


def test_a_pod_that_both_have_given_up_is_removed_with_its_finalizer(release, run_dir, cluster):
    look, said = release
    events(run_dir, BACK, LOST)

    look.look()
    look.look()

    assert changes(cluster) == [
        f"delete pod {POD} --force --grace-period=0 --wait=false",
        f'patch pod {POD} --type=merge -p {{"metadata": {{"finalizers": null}}}}',
    ]
    assert said == [f"n2 does not answer: its pod {POD} was removed, so that another can come"]


@pytest.mark.parametrize(
    ("lines", "goes"),
    [
        ((), True),
        ((LOST, BACK), False),
        ((BACK, ANEW), True),  # its node died with that of the first pod
        ((BACK, ANEW, BACK), False),
    ],
)
def test_a_pod_of_a_dead_node_that_never_joined_is_removed_where_the_record_is_known(
    run_dir, cluster, lines, goes
):
    cluster.say(pods="job-pods-node-lost-terminating")
    events(run_dir, *lines)
    look = LostPodRemover(RunInPods(run_dir, replace(order_of(), index=1), JOB_ID), lambda _: None)
    look.look()
    assert changes(cluster) == []
    look.look(is_known=True)
    assert any(line.startswith(f"delete pod {POD}") for line in changes(cluster)) is goes


@pytest.mark.parametrize(
    "lines", [(), (BACK,), (LOST, BACK), ({"event": "node_lost", "node": "run-7f3a-1"},)]
)
def test_a_pod_that_the_head_has_not_lost_stays(release, run_dir, cluster, lines):
    look, said = release
    events(run_dir, *lines)
    look.look()
    assert (changes(cluster), said) == ([], [])


@pytest.mark.parametrize(
    "pods", ["job-pods-node-lost-5s", "job-pods-evicting", "job-pods-pod-deleting"]
)
def test_a_pod_that_the_cluster_has_not_given_up_stays(release, run_dir, cluster, pods):
    look, said = release
    cluster.say(pods=pods)
    events(run_dir, LOST, {"event": "node_lost", "node": "run-7f3a-1"})
    look.look()
    assert (changes(cluster), said) == ([], [])


def test_a_first_pod_that_the_cluster_has_given_up_is_removed_where_it_can_not_be_reached(
    release, cluster
):
    look, _ = release
    silent = "error: error upgrading connection: dial tcp 10.91.0.2:10250: connect: no route\n"
    cluster.say(pods="job-pods-node-lost-terminating", refuse={"port-forward": [1, silent]})
    look.look()
    assert changes(cluster) == []
    look.look(asks=True)
    assert [line for line in changes(cluster) if not line.startswith("port-forward")] == [
        f"delete pod {POD} --force --grace-period=0 --wait=false",
        f'patch pod {POD} --type=merge -p {{"metadata": {{"finalizers": null}}}}',
    ]


def test_who_may_not_remove_it_hears_so_once_with_the_line_of_the_role(release, run_dir, cluster):
    look, said = release
    cluster.say(pods="job-pods-node-lost-terminating", refuse={"delete pod": [1, NO_DELETE]})
    events(run_dir, LOST)
    look.look()
    look.look()
    (sentence,) = said
    assert f"its pod {POD} keeps its place" in sentence
    assert 'resources: ["pods"], verbs: ["delete"]' in sentence


def test_a_pod_that_has_just_gone_is_nothing_to_speak_of(release, run_dir, cluster):
    look, said = release
    gone = f'Error from server (NotFound): pods "{POD}" not found\n'
    cluster.say(pods="job-pods-node-lost-terminating", refuse={"delete pod": [1, gone]})
    events(run_dir, LOST)
    look.look()
    assert said == []


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        (
            "job-pods-node-lost-terminating",
            f"pods of an earlier run `run-7f3a` have not ended yet: {POD} on n2; ",
        ),
        ("job-pods-running", None),
    ],
)
def test_pods_of_a_run_that_had_this_name_are_told_before_it_starts(cluster, pods, said):
    cluster.say(pods=pods)
    settled = replace(DEFAULT, own_keys=(("context", "lab"), ("namespace", "research")))
    words = warn_of_leaving_pods(settled)
    assert words is None if said is None else words.startswith(said)


def test_who_can_not_ask_is_told_nothing_of_them(cluster):
    cluster.say(refuse={"get pods": [1, "Unable to connect to the server: i/o timeout\n"]})
    settled = replace(DEFAULT, own_keys=(("context", "lab"), ("namespace", "research")))
    assert warn_of_leaving_pods(settled) is None
