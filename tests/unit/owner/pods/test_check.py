"""What a user may do on a cluster, by answers that a server of 1.36 gave to a user with a small Role."""

import json

from torchmuster.owner.pods.check import HELPFUL, NEEDED, missing, offers_of, role_line, rules_of

# Recorded: SelfSubjectRulesReview of a user whose Role lacks watch on pods, port-forward and events.
ANSWER = {
    "kind": "SelfSubjectRulesReview",
    "status": {
        "incomplete": False,
        "resourceRules": [
            {
                "apiGroups": ["batch"],
                "resources": ["jobs"],
                "verbs": ["create", "get", "list", "watch", "delete"],
            },
            {
                "apiGroups": [""],
                "resources": ["services", "secrets"],
                "verbs": ["create", "get", "list", "delete", "patch"],
            },
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
            {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
        ],
    },
}
ADMIN = {"status": {"resourceRules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}}


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
    ]


def test_an_administrator_lacks_nothing():
    assert lacks(ADMIN, NEEDED) == lacks(ADMIN, HELPFUL) == []


def test_a_right_to_one_named_object_is_not_one_to_all():
    named = {**ADMIN["status"]["resourceRules"][0], "resourceNames": ["mine"]}
    assert len(lacks({"status": {"resourceRules": [named]}}, NEEDED)) == len(NEEDED)


def test_devices_are_summed_over_nodes_and_cpus_are_none():
    node = {"status": {"allocatable": {"cpu": "2", "memory": "24Gi", "nvidia.com/gpu": "4"}}}
    none = {"status": {"allocatable": {"rdma/ib": "0"}}}
    assert offers_of([node, node, none]) == {"nvidia.com/gpu": 8}
