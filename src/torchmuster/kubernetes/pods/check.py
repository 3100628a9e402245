"""Checks a cluster before anything is made there: rights, queue, volumes, and nodes' resources.

`muster engines check` shows the findings. kubectl uses the user's own credentials.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core.model.text import did_you_mean, few_of
from torchmuster.errors import MusterError
from torchmuster.kubernetes.engine.dialect import JOBSETS, kubectl
from torchmuster.kubernetes.engine.manifest import claims_of
from torchmuster.kubernetes.pods.bring import place_of_keys
from torchmuster.kubernetes.pods.reach import NotAllowedError, ask
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.model.job import JobRequest

_ASK_S = 20.0
_SEVERAL = 2
_NOT_SHARED = frozenset({"ReadWriteOnce", "ReadWriteOncePod"})
QUEUES = "localqueues.kueue.x-k8s.io"
# What a run requires: (API group, resource, verbs).
NEEDED = (
    ("batch", "jobs", ("create", "get", "list", "delete")),
    ("", "services", ("create", "get", "delete", "patch")),
    ("", "secrets", ("create", "get", "delete", "patch")),
    ("", "pods", ("get", "list", "watch")),
    ("", "pods/log", ("get",)),
)
# What is useful: the same, and what happens without it.
HELPFUL = (
    (
        "",
        "pods/portforward",
        ("create",),
        "files, logs and record of a run don't come out of its pods: it needs a volume, or --take-within 0s, which loses them",
    ),
    ("", "pods", ("delete", "patch"), "pods on dead nodes are not removed"),
    ("", "events", ("list",), "why pods can't be made is not told (a quota, Pod Security)"),
    (
        "",
        "namespaces",
        ("get",),
        "`pod_security` of the site has to say what the namespace asks for",
    ),
)
# The same, for a site with a queue.
OF_QUEUES = (
    ("kueue.x-k8s.io", "localqueues", ("get", "list"), "a wrong queue is told late"),
    ("kueue.x-k8s.io", "workloads", ("get", "list"), "why a run waits in its queue is not told"),
    (
        "visibility.kueue.x-k8s.io",
        "localqueues/pendingworkloads",
        ("get",),
        "the place in the queue is not told",
    ),
)
# The same, for a cluster with JobSet.
OF_SETS = (
    (
        "jobset.x-k8s.io",
        "jobsets",
        ("create", "delete"),
        "a group of a workflow with several kinds of pods is several Jobs",
    ),
)
_REVIEW = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFinding:
    """One finding; `ok` is None if nobody can tell, or if it is only information."""

    check: str
    ok: bool | None
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What the user may do with some resources."""

    groups: frozenset[str]
    resources: frozenset[str]
    verbs: frozenset[str]

    def allows(self, group: str, resource: str, verb: str) -> bool:
        """Say whether the rule covers this verb on this resource."""
        asked = ((self.groups, group), (self.resources, resource), (self.verbs, verb))
        return all("*" in names or name in names for names, name in asked)


def check_cluster(keys: Mapping[str, str], queue: str | None) -> list[ClusterFinding]:
    """Return the findings about a site's cluster; the list ends if the cluster does not answer."""
    try:
        context, namespace = place_of_keys(keys)
        version = _version(context)
    except EngineError as error:
        return [ClusterFinding(check="cluster", ok=False, words=_words_of(error))]
    found = [ClusterFinding(check="cluster", ok=True, words=f"{context}: Kubernetes {version}")]
    found.append(_namespace(context, namespace))
    helpful = [*HELPFUL, *(OF_QUEUES if queue is not None else ())]
    helpful += OF_SETS if _has_sets(context, namespace) else ()
    found += _rights(context, namespace, helpful)
    if queue is not None:
        found.append(_queue(context, namespace, queue))
    claims = filter(None, keys.get("claims", "").split("\n"))
    found += [_claim(context, namespace, line) for line in claims]
    found.append(_nodes(context, keys))
    return found


def _version(context: str) -> str:
    place = [f"--context={context}"] if context else []
    argv = ["kubectl", *place, "version", "-o", "json", "--request-timeout=20s"]
    said = json.loads(ask(argv))
    return str(said.get("serverVersion", {}).get("gitVersion", "of an unknown version"))


def _namespace(context: str, namespace: str) -> ClusterFinding:
    check = f"namespace {namespace}"
    try:
        text = ask(kubectl(context, namespace, "get", "namespace", namespace, "-o", "json"))
    except NotAllowedError:
        return ClusterFinding(check=check, ok=None, words="you may not look at namespaces")
    except EngineError as error:
        return ClusterFinding(check=check, ok=False, words=_words_of(error))
    labels = json.loads(text).get("metadata", {}).get("labels", {})
    level = labels.get("pod-security.kubernetes.io/enforce")
    return ClusterFinding(
        check=check, ok=True, words=f"Pod Security {level}" if level else "is there"
    )


def rules_of(answer: str) -> list[Rule]:
    """Parse a SelfSubjectRulesReview; skip rules for named resources only.

    Raises:
        ValueError: It is not JSON, or no review.
    """
    review = json.loads(answer)
    if not isinstance(review, dict):
        raise ValueError(f"no review: {answer[:80]}")  # noqa: TRY004 - an answer, not an argument
    status = review.get("status", {})
    return [
        Rule(
            groups=frozenset(rule.get("apiGroups", ())),
            resources=frozenset(rule.get("resources", ())),
            verbs=frozenset(rule.get("verbs", ())),
        )
        for rule in status.get("resourceRules", ())
        if not rule.get("resourceNames")
    ]


def missing(rules: Iterable[Rule], group: str, resource: str, verbs: Iterable[str]) -> list[str]:
    """Return the verbs that no rule covers."""
    known = list(rules)
    return [verb for verb in verbs if not any(r.allows(group, resource, verb) for r in known)]


def role_line(group: str, resource: str, verbs: Iterable[str]) -> str:
    """Return the line to add to a Role."""
    return f'{{apiGroups: ["{group}"], resources: ["{resource}"], verbs: [{", ".join(verbs)}]}}'


def _rights(
    context: str, namespace: str, helpful: "Iterable[tuple[str, str, tuple[str, ...], str]]"
) -> list[ClusterFinding]:
    review = json.dumps({**_REVIEW, "spec": {"namespace": namespace}})
    # kubectl would validate it by schemas that a user with few rights may not read.
    argv = kubectl(context, namespace, "create", "--validate=false", "-f", "-", "-o", "json")
    try:
        rules = rules_of(ask(argv, review.encode()))
    except (MusterError, ValueError) as error:
        return [ClusterFinding(check="rights", ok=None, words=f"could not be asked: {error}")]
    lacks = [
        role_line(group, resource, verbs)
        for group, resource, wanted in NEEDED
        if (verbs := missing(rules, group, resource, wanted))
    ]
    words = f"the Role lacks {'; '.join(lacks)}" if lacks else "all that a run needs"
    found = [ClusterFinding(check="rights", ok=not lacks, words=words)]
    for group, resource, wanted, without in helpful:
        if verbs := missing(rules, group, resource, wanted):
            line = role_line(group, resource, verbs)
            found.append(ClusterFinding(check="right", ok=None, words=f"without {line}: {without}"))
    return found


def _queue(context: str, namespace: str, queue: str) -> ClusterFinding:
    try:
        text = ask(kubectl(context, namespace, "get", QUEUES, "-o", "json"))
    except EngineError as error:
        return ClusterFinding(check=f"queue {queue}", ok=None, words=_words_of(error))
    return finding_of_queue(queue, json.loads(text).get("items", []))


def finding_of_queue(queue: str, queues: "Iterable[Mapping[str, Any]]") -> ClusterFinding:
    """Return the finding about one queue among a namespace's LocalQueues."""
    check = f"queue {queue}"
    known = {one["metadata"]["name"]: one.get("status", {}) for one in queues}
    if queue not in known:
        names = list(known)
        hint = did_you_mean(
            queue, names, f"there are: {few_of(names, 8)}" if names else "there is none"
        )
        return ClusterFinding(check=check, ok=False, words=f"there is no such LocalQueue: {hint}")
    for condition in known[queue].get("conditions", ()):
        if condition.get("type") == "Active" and condition.get("status") != "True":
            words = f"it admits nothing: {condition.get('message')} ({condition.get('reason')})"
            return ClusterFinding(check=check, ok=False, words=words)
    number = known[queue].get("pendingWorkloads", 0)
    words = f"a LocalQueue of Kueue, {number} wait{'s' if number == 1 else ''} in it"
    return ClusterFinding(check=check, ok=True, words=words)


def queues_of(context: str, namespace: str) -> list[str]:
    """List the LocalQueues of a namespace.

    Raises:
        EngineError: The cluster has no Kueue, or the user may not list them.
    """
    return _names(kubectl(context, namespace, "get", QUEUES, "-o", "name"))


def _has_sets(context: str, namespace: str) -> bool:
    words = ("api-resources", "--api-group=jobset.x-k8s.io", "-o", "name")
    try:
        return JOBSETS in ask(kubectl(context, namespace, *words)).split()
    except EngineError:
        return False


def _claim(context: str, namespace: str, entry: str) -> ClusterFinding:
    name = entry.partition(":")[0]
    check = f"volume {name}"
    try:
        words = ("get", "persistentvolumeclaim", name, "-o", "json")
        claim = json.loads(ask(kubectl(context, namespace, *words)))
    except NotAllowedError:
        return ClusterFinding(check=check, ok=None, words="you may not look at claims")
    except EngineError as error:
        return ClusterFinding(check=check, ok=False, words=_words_of(error))
    modes = claim.get("spec", {}).get("accessModes", [])
    phase = claim.get("status", {}).get("phase", "of an unknown state")
    if set(modes) <= _NOT_SHARED:
        words_of = f"{phase}, {', '.join(modes)}: pods of one node only can have it"
        return ClusterFinding(check=check, ok=None, words=words_of)
    return ClusterFinding(check=check, ok=True, words=f"{phase}, {', '.join(modes)}")


def check_claims(job: JobRequest) -> list[str]:
    """Return a warning for each volume that pods on several nodes can't share.

    The job must know its cluster.

    Raises:
        EngineError: A volume does not exist, or the pods can't share it at all.
    """
    keys = dict(job.own_keys)
    context, namespace = keys.get("context", ""), keys.get("namespace", "default")
    apart = keys.get("host_network") == "yes"
    found: list[str] = []
    for claim in claims_of(job):
        words = ("get", "persistentvolumeclaim", claim.name, "-o", "json")
        try:
            modes = json.loads(ask(kubectl(context, namespace, *words)))["spec"]["accessModes"]
        except (NotAllowedError, ValueError, KeyError):
            continue  # the scheduler will report it
        except EngineError as error:
            if "(NotFound)" in (error.why or ""):
                raise EngineError(
                    f"there is no volume `{claim.name}` in the namespace `{namespace}`",
                    where="claims",
                    fix="`kubectl get pvc` lists them",
                ) from error
            continue
        if job.num_nodes < _SEVERAL or not set(modes) <= _NOT_SHARED:
            continue
        if apart or set(modes) == {"ReadWriteOncePod"}:
            raise _not_shared(claim.name, modes, job.num_nodes)
        found.append(
            f"the volume `{claim.name}` is {', '.join(modes)}: pods that come to another node than the first don't start"
            f" (a ReadWriteMany one is shared: `kubectl get pvc`)"
        )
    return found


def _not_shared(name: str, modes: Sequence[str], num_pods: int) -> EngineError:
    return EngineError(
        f"the volume `{name}` can't be shared by {num_pods} pods",
        where="claims",
        why=f"it is {', '.join(modes)}: for one {'pod' if modes == ['ReadWriteOncePod'] else 'node'} only",
        fix="take a volume that is ReadWriteMany (NFS, CephFS, Lustre): `kubectl get pvc` shows the modes; or --nodes 1",
    )


def _nodes(context: str, keys: Mapping[str, str]) -> ClusterFinding:
    try:
        nodes = nodes_of(context)
    except EngineError:
        return ClusterFinding(check="nodes", ok=None, words="you may not list them")
    offers = offers_of(nodes)
    shown = ", ".join(f"{count} {name}" for name, count in sorted(offers.items()))
    wanted = keys.get("gpu_resource")
    words = f"{len(nodes)} nodes" + (f", {shown}" if shown else ", no GPUs")
    if wanted is not None and wanted not in offers:
        return ClusterFinding(check="nodes", ok=None, words=f"{words}; none offers {wanted}")
    return ClusterFinding(check="nodes", ok=True, words=words)


def nodes_of(context: str) -> list[dict[str, Any]]:
    """List the cluster's nodes.

    Raises:
        EngineError: The user may not list them.
    """
    text = ask(kubectl(context, "default", "get", "nodes", "-o", "json"))
    found: list[dict[str, Any]] = json.loads(text).get("items", [])
    return found


def offers_of(nodes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many devices the nodes offer, by resource name (those with a domain)."""
    offers: dict[str, int] = {}
    for node in nodes:
        for name, number in node.get("status", {}).get("allocatable", {}).items():
            if "/" in name and str(number).isdecimal() and int(number):
                offers[name] = offers.get(name, 0) + int(number)
    return offers


def contexts() -> tuple[list[str], str]:
    """Return the contexts of kubectl's configuration, and the current one (or an empty string).

    Raises:
        EngineError: There is no configuration.
    """
    names = _names(["kubectl", "config", "get-contexts", "-o", "name"])
    try:
        current = ask(["kubectl", "config", "current-context"]).strip()
    except EngineError:
        current = ""
    return names, current


def _names(argv: list[str]) -> list[str]:
    lines = ask(argv).splitlines()
    return [line.rpartition("/")[2] if "kueue" in line else line for line in lines if line]


def _words_of(error: MusterError) -> str:
    return ": ".join(word for word in (error.what, error.fix) if word)
