"""What the cluster has on pods that run and can't reach each other: evidence for the user, and no claim."""

from collections.abc import Callable

from torchmuster.engines.kubernetes.answers import RUN_LABEL, Pod, read_objects
from torchmuster.engines.kubernetes.dialect import kubectl, place_of
from torchmuster.engines.kubernetes.policies import policies_on
from torchmuster.errors import MusterError
from torchmuster.model.display.text import few_of
from torchmuster.model.verdict import Result
from torchmuster.owner.pods.reach import NotAllowedError, ask, find_pods

MESH = (
    "ask for a namespace or pods without it: `kubectl label namespace NAME istio-injection-` and linkerd.io/inject=disabled;"
    " other webhooks have words of their own, which `directives` of the site can set"
)
KEPT_APART = (
    "their network may keep them apart: names come from the headless Service of the run and the cluster's DNS, and"
    " a NetworkPolicy or the proxy of a mesh has to let all TCP ports between pods of one run pass"
)
_NO_NETWORK = "no network connects all nodes"
_SILENCE = ("no answer", "no agent has connected", _NO_NETWORK)  # of pods that have names
_MOST = 4


def is_kept_apart(result: Result) -> bool:
    """Say whether a run has ended because its nodes reach their head, but not each other."""
    return result.report is not None and result.report.error.startswith(_NO_NETWORK)


def evidence(job_id: str, whys: str) -> tuple[str, ...]:
    """Return sentences on what may keep the pods of a run apart, by what they have said of it."""
    found = [_told(_of_containers, job_id)]
    if "name is not known" in whys:
        found.append(_told(_of_service, job_id))
    if any(words in whys for words in _SILENCE):
        found.append(_told(_of_policies, job_id))
    return tuple(sentence for sentence in found if sentence)


def _told(look: Callable[[str], str], job_id: str) -> str:
    try:
        return look(job_id)
    except MusterError:
        return ""


def of_containers(pod: Pod) -> str:
    """Return a sentence on what the cluster has put into a pod beside our container; empty where it has not."""
    if not pod.others:
        return ""
    names = few_of([f"`{name}`" for name in pod.others], _MOST)
    return f"the cluster has put {names} into the pods beside muster's container"


def _of_containers(job_id: str) -> str:
    pod = next((pod for pod in find_pods(job_id) if pod.others), None)
    if pod is None:
        return ""
    return (
        f"kubernetes says: {of_containers(pod)}: the proxy of a mesh refuses connections that are not its own,"
        " and keeps the pods from ending"
    )


def _of_service(job_id: str) -> str:
    context, namespace, name = place_of(job_id)
    words = ("get", "services", name, "--ignore-not-found", "-o", "name")
    if ask(kubectl(context, namespace, *words)).strip():
        return f"kubernetes says: the Service {name} is there, which gives the pods their names"
    return f"kubernetes says: the Service {name} is gone, which gives the pods their names"


def _of_policies(job_id: str) -> str:
    context, namespace, name = place_of(job_id)
    asked = kubectl(context, namespace, "get", "networkpolicies.networking.k8s.io", "-o", "json")
    try:
        policies = read_objects(ask(asked))
    except NotAllowedError:
        return "whether NetworkPolicies select these pods is not known: you may not list them"
    pods = read_objects(
        ask(kubectl(context, namespace, "get", "pods", "-l", f"{RUN_LABEL}={name}", "-o", "json"))
    )
    on = dict.fromkeys(
        policy
        for pod in pods
        for policy in policies_on(policies, pod["metadata"].get("labels", {}))
    )
    if on:
        names = ", ".join([*on][:_MOST])
        which = "the NetworkPolicy" if len(on) == 1 else "the NetworkPolicies"
        return f"kubernetes says: {which} {names} of the namespace {_verb(on)} these pods"
    return (
        f"kubernetes says: no NetworkPolicy of the namespace {namespace} selects these pods;"
        " those of the network itself, as of Cilium or Calico, are not seen here"
    )


def _verb(found: dict[str, None]) -> str:
    return "selects" if len(found) == 1 else "select"
