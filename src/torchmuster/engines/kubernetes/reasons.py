"""Kubernetes' reasons in sentences: why pods wait, what can't heal, and why kubectl refuses a command.

Source: kubernetes pkg/kubelet/images/types.go, pkg/kubelet/container/sync_result.go, pkg/apis/core/types.go (1.31 to 1.36), Kueue 0.19;
those marked "recorded" were seen from a real control plane.
"""

import re
from dataclasses import replace

from torchmuster.engines.base import Refusal
from torchmuster.engines.wait_reasons import WaitReason, WaitReasons
from torchmuster.model.verdict import Report

_EVENTS = "`kubectl get events --sort-by=.lastTimestamp` shows what the cluster says"
_IMAGE = "set `image` in muster.toml to a name that the nodes can pull"
_ONE_NODE = (
    "pods on several nodes need a volume that is ReadWriteMany: `kubectl get pvc` shows the modes"
)
_OF_KIND = r"(?:(?!; couldn't).)*"  # Kueue's words on one kind of pods of a JobSet
# Kueue after 0.19 says `Pending` and `Inadmissible` with more words: apis/kueue/v1beta2/workload_types.go.
_QUEUED = (
    "(?:Pending|ExceedsMaxQuota|WaitingForQuota|WaitingForPreemptedWorkloads|TopologyPlacementFailed"
    "|PendingEvaluation)"
)
_MISLED = "(?:Inadmissible|Misconfigured)"
_STANDS_S = 2.0  # the next answer has to agree; with the time to ask twice it is told within 5 s of the first sign
_PULLS_S = 60.0  # a registry that is away for a moment is tried again by the node


def _reason(
    word: str,
    sentence: str,
    hint: str = "",
    *,
    never: bool = False,
    patience_s: float | None = None,
) -> WaitReason:
    pattern = rf"{word}(?![A-Za-z])"
    if never and patience_s is None:
        patience_s = _STANDS_S
    return WaitReason(
        pattern=pattern, sentence=sentence, hint=hint, never=never, patience_s=patience_s
    )


REASONS = WaitReasons(
    table=(
        # The scheduler's; recorded.
        _reason(
            r"Unschedulable: (?!.*(?:Insufficient|not found)).*untolerated taint",
            "no node takes it: those that would have room refuse it by a taint",
            "`tolerations` of the site names the taints that a run accepts",
        ),
        _reason(
            r"Unschedulable: .*unbound immediate PersistentVolumeClaims",
            "a claim that it names has no volume yet",
            "`kubectl describe pvc` tells why it is not bound",
        ),
        _reason(
            r"Unschedulable: .*ReadWriteOncePod",
            "a volume that it names is for one pod, and another pod has it",
            _ONE_NODE,
        ),
        _reason(
            r"Unschedulable: .*volume node affinity conflict",
            "a volume that it names is not to be had on the nodes that would have room",
            _ONE_NODE,
        ),
        _reason(
            r"Unschedulable: .*(?:node affinity|node selector)",
            "no node has the labels that it asks for",
            "`kubectl get nodes --show-labels` lists them; `node_selector` of the site asks for some",
        ),
        _reason(
            r"Unschedulable: .*(?i:persistentvolumeclaim)\S* (?:\"[^\"]*\" )?not found",
            "a volume that it names does not exist",
            "`kubectl get pvc` lists the volumes of the namespace",
            never=True,
        ),
        _reason("Unschedulable", "no node has room for it now"),
        _reason(
            "SchedulingGated", "a gate of the cluster holds it: mostly that of a queue", _EVENTS
        ),
        # Of the image; the first three recorded.
        _reason(
            "ErrImageNeverPull",
            "the image is not on the node, and its pull policy is Never",
            'load it there, or set `pull_policy = "IfNotPresent"`',
            never=True,
        ),
        _reason(
            r"ErrImagePull: .*(?:no such host|i/o timeout|connection refused)",
            "the node can't reach the image's registry",
            f"{_IMAGE}; a wrong host in its name looks the same",
            patience_s=_PULLS_S,
        ),
        _reason(
            r"ErrImagePull: .*(?:[Uu]nauthorized|denied|403|no basic auth)",
            "the registry refuses the image: it needs a login, or there is none of this name",
            "`pull_secrets` of the site names the Secrets with logins",
            never=True,
        ),
        _reason(
            r"ErrImagePull: .*(?:not found|manifest unknown|does not exist)",
            "the registry has no such image or tag",
            _IMAGE,
            never=True,
        ),
        _reason(
            r"ErrImagePull: .*no match for platform",
            "the image is not made for the processor of the node",
            "build it for that too (docker buildx build --platform), or choose nodes by `node_selector`",
            never=True,
        ),
        _reason("ErrImagePull", "the image could not be pulled", _IMAGE, patience_s=_PULLS_S),
        _reason("ImagePullBackOff", "the image could not be pulled", _IMAGE, patience_s=_PULLS_S),
        _reason("InvalidImageName", "the image's name is no name of an image", _IMAGE, never=True),
        _reason(
            "ContainerCreating", "the node prepares it: the image is pulled, volumes are mounted"
        ),
        _reason("PodInitializing", "its first containers run"),
        _reason(
            "CreateContainerConfigError",
            "something that it names does not exist: a Secret, a ConfigMap or a key of one",
            _EVENTS,
            never=True,
        ),
        _reason(
            "CreateContainerError",
            "the node can't make the container",
            _EVENTS,
            patience_s=_PULLS_S,
        ),
        # StartError recorded.
        _reason(
            r"StartError: .*exec format error",
            "the image is made for another processor than that of the node",
            "build it for that too, or choose nodes by `node_selector`",
            never=True,
        ),
        _reason(
            r"StartError: .*(?:no such file or directory|executable file not found)",
            "the image has no such interpreter: Python 3.11 or later is needed",
            "set `python` of the site to the image's interpreter, or take an image that has Python 3.11",
            never=True,
        ),
        _reason(
            r"StartError: .*permission denied",
            "the user of the pods may not run the image's interpreter",
            "`run_as` of the site sets the user, `python` another interpreter of the image",
            never=True,
        ),
        _reason(
            "StartError", "the node can't start the program in the container", _EVENTS, never=True
        ),
        _reason(
            "OOMKilled",
            "its container used more memory than its limit, and was killed as a whole",
            "ask for more memory: `memory` of the site; /dev/shm is charged to the same limit",
        ),
        # Of events; recorded.
        _reason(
            r"FailedCreate: .*exceeded quota",
            "the namespace's quota has no room for its pods",
            "`kubectl describe quota` shows what is used; wait, ask for less, or for a larger quota",
        ),
        _reason(
            r"FailedCreate: .*violates PodSecurity",
            "the namespace's Pod Security level forbids its pods",
            "`kubectl get namespace NAME --show-labels` tells the level; `pod_security` of the site fits the pods to it",
            never=True,
        ),
        _reason(
            r"FailedCreate: .*serviceaccount \S+ not found|FailedCreate: .*service account \S+ was not found",
            "the service account that it names does not exist",
            "`kubectl get serviceaccounts` lists them",
            never=True,
        ),
        _reason("FailedCreate", "the cluster makes no pods for it", _EVENTS),
        _reason(
            r"FailedAttachVolume: Multi-Attach",
            "a volume that it names is attached to another node, and can be to one only",
            _ONE_NODE,
        ),
        _reason("FailedAttachVolume", "the node can't have a volume that it names", _EVENTS),
        _reason(
            r"FailedMount: .*(?:secret|configmap|references non-existent).* (?:not found|key)",
            "something that it mounts does not exist: a Secret, a ConfigMap or a key of one",
            _EVENTS,
        ),
        _reason("FailedMount", "the node can't mount a volume of it", _EVENTS),
        _reason("FailedCreatePodSandBox", "the node can't give it a network", _EVENTS),
        # Kueue's; recorded.
        _reason(
            rf"{_MISLED}: LocalQueue \S+ doesn't exist",
            "there is no such queue in the namespace",
            "`kubectl get localqueues` lists them; another one with --queue",
            never=True,
        ),
        _reason(
            f"(?:{_MISLED}|Suspended)",
            "its queue is stopped, or does not lead anywhere",
            "`kubectl describe localqueue NAME` tells more; it goes on when somebody resumes the queue",
        ),
        # Of any one kind of pods; with a second flavor that has room at times, it is no such case.
        _reason(
            rf"{_QUEUED}: (?:.*; (?=couldn't))?(?!{_OF_KIND}more needed){_OF_KIND}> maximum capacity",
            "it asks for more than its queue can ever give",
            "ask for less, or take another queue with --queue",
            never=True,
        ),
        _reason(
            r"Pending: .*Pending the preemption of|WaitingForPreemptedWorkloads",
            "runs of a lower priority leave their place to it",
        ),
        _reason(
            rf"{_QUEUED}: .*topology \"[^\"]*\" doesn't allow",
            "no part of the topology has room for all of its pods now",
            "`topology` of the site asks that one has",
        ),
        _reason(rf"{_QUEUED}: .*insufficient unused quota", "its queue has no room for it now"),
        _reason(
            "NoMatchingFlavor",
            "no kind of nodes of its queue takes it: their labels or taints don't fit",
            "`node_selector` and `tolerations` of the site; `kubectl get resourceflavors` lists the kinds of nodes",
        ),
        _reason("WaitingForPodsReady", "its queue waits until the pods of earlier runs are ready"),
        _reason(_QUEUED, "it waits in its queue"),
        _reason(
            "Preempted", "a run of a higher priority has its place; it goes on when there is room"
        ),
        _reason(
            r"(?:Deactivated[A-Za-z]*|InactiveWorkload)",
            "its queue was told to leave it out",
            "it goes on when `active: true` is set in its Workload: kubectl get workloads",
        ),
        _reason(
            "(?:Cluster|Local)QueueStopped",
            "its queue has been stopped; it goes on when somebody resumes that",
        ),
        _reason(
            "PodsReadyTimeout",
            "its pods did not all start in the time that its queue gives; it waits for another turn",
            _EVENTS,
        ),
        _reason("JobSuspended", "it is suspended: by its queue, or by somebody"),
        # What takes a pod away; the first two recorded.
        _reason("EvictionByEvictionAPI", "its node is drained: the pod moves to another"),
        _reason("DeletionByTaintManager", "its node does not answer or is not ready any more"),
        _reason("PreemptionByScheduler", "pods of a higher priority take its place"),
        _reason("DeletionByPodGC", "its node is gone"),
        _reason("TerminationByKubelet", "its node shuts down, or ran short of memory or disk"),
        _reason("Evicted", "its node ran short of memory or disk"),
    ),
    parts_wait=True,
    capacity_argv=lambda job_id: [],
    shortage=lambda answers: None,
)

# Recorded, each; the last line of stderr says it, after those of the discovery cache.
REFUSALS = (
    # First: the sentence of a webhook ends with how it could not be reached, which would be taken for the server.
    Refusal(
        pattern=r"failed calling webhook",
        error="an extension of the cluster that checks what is made does not answer",
        hint="try again in a minute; the cluster's people can tell whether it runs",
    ),
    Refusal(
        pattern=r"current-context is not set|localhost:8080 was refused",
        error="there is no configuration for a cluster",
        hint="kubectl config get-contexts lists those of ~/.kube/config; the cluster's people give out the file, or the command that writes it",
    ),
    Refusal(
        pattern=r"context \"[^\"]*\" does not exist|cannot locate context",
        error="kubectl knows no such context",
        hint="kubectl config get-contexts lists them; `context` of the site names one",
    ),
    Refusal(
        pattern=r"error loading config file",
        error="the configuration of kubectl can't be read",
        hint="correct the file that is named, or set KUBECONFIG to another",
    ),
    Refusal(
        pattern=r"\(Unauthorized\)|must be logged in|asked for the client to provide credentials",
        error="the cluster does not accept the credentials: they are wrong or have expired",
        hint="log in again as the cluster's people say, then try `kubectl auth whoami`",
    ),
    Refusal(
        pattern=r"getting credentials: exec: executable \S+ not found",
        error="the login plug-in that the configuration of kubectl names is not installed",
        hint="install it: the cluster's provider says how",
    ),
    Refusal(
        pattern=r"no such host",
        error="the name of the cluster's server is not known here",
        hint="look at the VPN, and at the server in `kubectl config view --minify`",
    ),
    Refusal(
        pattern=r"connection to the server \S+ was refused|connect: connection refused",
        error="the cluster's server does not answer",
        hint="look at the VPN or tunnel, and at the server in `kubectl config view --minify`",
    ),
    Refusal(
        pattern=r"i/o timeout|context deadline exceeded|TLS handshake timeout|network is unreachable|no route to host|request canceled",
        error="the cluster's server does not answer in time",
        hint="look at the VPN, and at the server in `kubectl config view --minify`",
    ),
    Refusal(
        pattern=r"exceeded quota",
        error="the namespace's quota has no room for another",
        hint="kubectl describe quota shows what is used; muster ps --all lists runs that may end",
    ),
    Refusal(
        pattern=r"violates PodSecurity",
        error="the namespace's Pod Security level forbids such pods",
        hint="`pod_security` of the site fits the pods to it",
    ),
    Refusal(
        pattern=r"namespaces \"[^\"]*\" not found",
        error="there is no such namespace",
        hint="`namespace` of the site, or of the context, names one: kubectl config view --minify",
    ),
    Refusal(
        pattern=r"\(Forbidden\): .*cannot \w+ resource",
        error="the cluster does not let you do this",
        hint="docs/kubernetes.md has the Role that is needed, for the cluster's people",
    ),
    Refusal(
        pattern=r"\(AlreadyExists\)",
        error="an object of this name exists already",
        hint="the run of that name is there: muster ps --all",
    ),
    Refusal(
        pattern=r"no matches for kind|doesn't have a resource type",
        error="the cluster does not have this kind of object",
        hint="its extension (JobSet, Kueue, Volcano) is not installed there, or of another version",
    ),
    Refusal(
        pattern=r"invalid DNS label|must be no more than 63|must not contain dots|RFC 1123",
        error="a name is not one that Kubernetes takes",
        hint="letters, digits and `-`, at most 63 characters with the number of the pod",
    ),
    Refusal(
        pattern=r"unknown field \"(?:spec\.)?scheduling\"",
        error="the cluster can't start a Job's pods as a gang by itself",
        hint='`gang = "native"` needs Kubernetes 1.37 with its gates; `queue` of Kueue, or the gang of volcano or kai, need none',
    ),
    Refusal(
        pattern=r"strict decoding error|unknown field",
        error="the cluster does not know a field of the manifest",
        hint="`directives` of the site name it, or the cluster is older than Kubernetes 1.31",
    ),
    Refusal(
        pattern=r"RequestEntityTooLarge|may not be more than 1048576 bytes",
        error="what the run brings along is too large for a Secret",
        hint="at most 1 MiB goes there: leave large files out of `code`, or put them on a volume",
    ),
)

_FORBIDDEN = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<kind>[\w./-]+)" in API group "(?P<group>[\w.-]*)"'
)


def missing_rule(report: Report, stderr: str) -> Report:
    """Return the report on a refusal with the lines that the user's Role lacks, where the cluster names them."""
    rules = [
        f'{{apiGroups: ["{found["group"]}"], resources: ["{found["kind"]}"], verbs: ["{found["verb"]}"]}}'
        for found in _FORBIDDEN.finditer(stderr)
    ]
    if not rules:
        return report
    words = " and ".join(dict.fromkeys(rules))
    return replace(
        report, hint=f"the Role of the namespace lacks {words}; docs/kubernetes.md has it whole"
    )
