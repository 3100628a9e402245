"""Changes of pods: who is told of them, and what they cost."""

import contextlib

import pytest

from kit.waiting import wait_until
from torchmuster.kubernetes.pods.reach import PodWatch
from unit.kubernetes.pods.conftest import JOB_ID

# Recorded: a user without the right.
FORBIDDEN = (
    'Error from server (Forbidden): pods is forbidden: User "u" cannot watch resource "pods" in API group "" in the'
    ' namespace "research"\n'
)
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


def test_a_burst_of_changes_is_one(cluster):
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
def test_who_may_not_watch_pods_looks_at_them_and_hears_why_once(cluster, number):
    cluster.say(refuse={"--watch": [1, FORBIDDEN]})
    said = [[] for _ in range(number)]
    with contextlib.ExitStack() as stack:
        watches = [stack.enter_context(watched(JOB_ID, one.append)) for one in said]
        wait_until(lambda: all(watch.number >= 2 for watch in watches), "looks", 60)
    assert len(cluster.asked) == 1
    for one in said:
        (text,) = one
        assert 'resources: ["pods"], verbs: ["watch"]' in text
