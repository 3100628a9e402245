"""Which NetworkPolicies select a pod: what an answer of the API proves, and no more.

Whether a policy's rules let a connection pass is for the cluster's network to say, which may not even look at them. Source:
networking.k8s.io/v1, and the label selectors of meta/v1.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def policies_on(
    policies: Iterable[Mapping[str, Any]], labels: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the policies that select a pod with these labels, as `NAME (Ingress, Egress)`."""
    found = []
    for one in policies:
        spec = one.get("spec", {})
        if _selects(spec.get("podSelector", {}), labels):
            default = ["Ingress", *(["Egress"] if spec.get("egress") else [])]
            found.append(
                f"{one['metadata']['name']} ({', '.join(spec.get('policyTypes') or default)})"
            )
    return tuple(found)


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_holds(one, labels) for one in selector.get("matchExpressions") or ())


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression.get("key", ""), expression.get("values") or ()
    match expression.get("operator"):
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case _:
            return False
