"""What a user may do on a cluster, by answers that a server of 1.36 gave to a user with a small Role."""

import json
import socket
import threading

import pytest

from kit.ports import reserve_port
from kit.tables import rows
from kit.waiting import wait_until
from torchmuster.kubernetes.pods import probe
from torchmuster.kubernetes.pods.check import (
    HELPFUL,
    NEEDED,
    check_cluster,
    finding_of_queue,
    missing,
    offers_of,
    role_line,
    rules_of,
)
from unit.kubernetes.pods.conftest import forbidden


def rule(group, resources, verbs):
    return {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}


# Recorded: SelfSubjectRulesReview of a user whose Role lacks watch on pods, port-forward and events.
ANSWER = {
    "kind": "SelfSubjectRulesReview",
    "status": {
        "incomplete": False,
        "resourceRules": [
            rule("batch", "jobs", "create get list watch delete"),
            rule("", "services secrets", "create get list delete patch"),
            rule("", "pods", "get list"),
            rule("", "pods/log", "get"),
        ],
    },
}


def queue(name, pending, status, reason, message):
    active = {"type": "Active", "status": status, "reason": reason, "message": message}
    return {
        "metadata": {"name": name},
        "status": {"pendingWorkloads": pending, "conditions": [active]},
    }


# Recorded: LocalQueues of Kueue 0.13.
GIVES_NONE = "Can't submit new workloads to clusterQueue"
QUEUES = [
    queue("held", 0, "False", "Stopped", "LocalQueue is stopped"),
    queue("nowhere", 1, "False", "ClusterQueueDoesNotExist", GIVES_NONE),
    queue("stopped", 1, "False", "ClusterQueueIsInactive", GIVES_NONE),
    queue("team", 1, "True", "Ready", "Can submit new workloads to localQueue"),
]
ADMIN = {"status": {"resourceRules": [rule("*", "*", "*")]}}


def lacks(answer, wanted):
    rules = rules_of(json.dumps(answer))
    return [
        role_line(group, resource, verbs)
        for group, resource, all_verbs, *_ in wanted
        if (verbs := missing(rules, group, resource, all_verbs))
    ]


def test_the_lines_that_a_role_lacks_are_named():
    assert lacks(ANSWER, NEEDED) == ['{apiGroups: [""], resources: ["pods"], verbs: [watch]}']
    assert lacks(ANSWER, HELPFUL) == [
        '{apiGroups: [""], resources: ["pods/portforward"], verbs: [create]}',
        '{apiGroups: [""], resources: ["pods"], verbs: [delete, patch]}',
        '{apiGroups: [""], resources: ["events"], verbs: [list]}',
        '{apiGroups: [""], resources: ["namespaces"], verbs: [get]}',
    ]


def test_an_administrator_lacks_nothing():
    assert lacks(ADMIN, NEEDED) == lacks(ADMIN, HELPFUL) == []


def test_a_right_to_one_named_object_is_not_one_to_all():
    named = {**rule("*", "*", "*"), "resourceNames": ["mine"]}
    assert len(lacks({"status": {"resourceRules": [named]}}, NEEDED)) == len(NEEDED)


def test_devices_are_summed_over_nodes_and_cpus_are_none():
    node = {"status": {"allocatable": {"cpu": "2", "memory": "24Gi", "nvidia.com/gpu": "4"}}}
    none = {"status": {"allocatable": {"rdma/ib": "0"}}}
    assert offers_of([node, node, none]) == {"nvidia.com/gpu": 8}


@pytest.mark.parametrize(
    ("queue", "words"),
    rows(
        """
        team     a LocalQueue of Kueue, 1 waits in it
        held     it admits nothing: LocalQueue is stopped (Stopped)
        stopped  it admits nothing: Can't submit new workloads to clusterQueue (ClusterQueueIsInactive)
        teem     there is no such LocalQueue: did you mean `team`?
        """
    ),
)
def test_a_queue_that_admits_nothing_is_found_before_anything_waits_in_it(queue, words):
    found = finding_of_queue(queue, QUEUES)
    assert (found.ok, found.words) == (queue == "team", words)


NO_CLAIMS = forbidden('persistentvolumeclaims "team"', "get", "persistentvolumeclaims")


def found(cluster, *, sets):
    """Return what is found with the rights of `ANSWER`, on a cluster with JobSet or without."""
    cluster.say(
        refuse={"persistentvolumeclaim": NO_CLAIMS},
        answers={
            "version": {"serverVersion": {"gitVersion": "v1.36.2"}},
            "create": ANSWER,
            "api-resources": "jobsets.jobset.x-k8s.io" if sets else "",
            "get localqueues": {"items": QUEUES},
        },
    )
    return check_cluster({"claims": "team:/home/team"}, "team")


def test_a_claim_that_may_not_be_looked_at_is_no_failure(cluster):
    (claim,) = [one for one in found(cluster, sets=False) if one.check == "volume team"]
    assert (claim.ok, claim.words) == (None, "you may not look at claims")


@pytest.mark.parametrize("sets", [False, True])
def test_rights_to_jobsets_lack_only_where_there_are_some(cluster, sets):
    lacks = [one.words for one in found(cluster, sets=sets) if one.check == "right"]
    assert (
        sum('resources: ["jobsets"], verbs: [create, delete]' in words for words in lacks) == sets
    )
    assert sum("the place in the queue is not told" in words for words in lacks) == 1


@pytest.mark.parametrize("answer", ["[]", "no JSON"])
def test_an_answer_that_is_no_review_is_a_value_error(answer):
    with pytest.raises(ValueError, match=r"no review|Expecting value"):
        rules_of(answer)


# What the check runs in two pods: each stays until the other has reached it.


LIMIT_S = 60.0


@pytest.fixture
def port(monkeypatch):
    found = reserve_port()
    monkeypatch.setattr(probe, "PORT", found)
    monkeypatch.setattr(probe.platform, "node", lambda: "check-0")
    return found


def calls(port):
    """Say whether somebody answers at the port of the probe."""
    try:
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as call:
            return call.recv(16) == b"muster"
    except OSError:
        return False


def test_a_pod_that_is_done_stays_until_the_other_one_has_called(port, monkeypatch):
    monkeypatch.setattr(probe, "STAY_S", LIMIT_S)
    monkeypatch.setattr(probe, "reach", lambda host: {"ok": True, "words": host})
    monkeypatch.setattr(probe, "look", lambda folders: {"folders": folders})
    told = []
    monkeypatch.setattr("builtins.print", lambda line, **_: told.append(json.loads(line)))
    thread = threading.Thread(target=probe.main, args=([],))
    thread.start()
    wait_until(lambda: told, "the findings")
    assert thread.is_alive()
    wait_until(lambda: calls(port), "an answer")
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert told == [
        {"folders": [], "reached": {"check-1.check": {"ok": True, "words": "check-1.check"}}}
    ]


def test_a_pod_that_nobody_calls_goes_in_the_end(port, monkeypatch):
    monkeypatch.setattr(probe, "STAY_S", 0.0)
    monkeypatch.setattr(probe, "reach", lambda host: {"ok": False, "words": ""})
    monkeypatch.setattr(probe, "look", lambda folders: {})
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    probe.main([])
