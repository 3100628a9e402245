"""Which NetworkPolicies select a pod, by all forms of a selector."""

import pytest

from torchmuster.kubernetes.engine.answers import policies_on

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
