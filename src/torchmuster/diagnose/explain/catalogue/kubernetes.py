"""Kubernetes: events of pods, the kubelet, quotas and admission, gang schedulers, jobs of the training operator.

Sources: Kubernetes 1.24 to 1.34 pkg/kubelet/events, pkg/scheduler, pkg/controller/job; Volcano 1.8, Kueue 0.6 to 0.14,
the training operator 1.5 to 1.9 and Trainer 2.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_scheduler = partial(
    KnownMessage,
    source="Kubernetes 1.24 to 1.34, pkg/scheduler/framework/plugins",
    tells=Tells.PROVES,
    cause="no-capacity",
    confirm="kubectl describe pod POD | tail -20",
)
_kubelet = partial(
    KnownMessage,
    source="Kubernetes 1.24 to 1.34, pkg/kubelet",
    tells=Tells.PROVES,
    confirm="kubectl describe pod POD | tail -20",
)
_admission = partial(
    KnownMessage,
    source="Kubernetes 1.24 to 1.34, admission plugins",
    tells=Tells.PROVES,
    cause="admission",
)
_NODES = r"\d+/\d+ nodes are available:.*"

ENTRIES: tuple[KnownMessage, ...] = (
    # Why a pod waits.
    _scheduler(
        name="k8s.no-gpus",
        wordings=(
            rf"{_NODES}Insufficient (?P<name>(?:nvidia|amd|habana|gpu)[\w.]*/\S*?)[,. ]",
            r"Insufficient (?P<name2>nvidia\.com/\S+?|[a-z][\w.-]*/[\w.-]*gpu[\w-]*)\.? *$",
        ),
        tells=Tells.NAMES,
        error="nodes have fewer free GPUs than the pod asks for ({name}{name2})",
        advice="ask for no more per pod than one node has, wait for others to end, or let the cluster grow; with no GPUs at all the device plugin does not run",
        confirm="kubectl get nodes -o custom-columns=N:.metadata.name,GPU:.status.allocatable.nvidia\\.com/gpu",
    ),
    _scheduler(
        name="k8s.no-rdma-devices",
        wordings=(
            rf"{_NODES}Insufficient (?P<name>(?:rdma|vpc\.amazonaws|openshift|mellanox|intel)[\w.]*/\S*?)[,. ]",
        ),
        tells=Tells.NAMES,
        error="no node offers the network devices that the pod asks for ({name})",
        advice="correct the name of the resource, or see that its device plugin runs on the nodes",
        confirm="kubectl describe node NODE | grep -A12 Allocatable",
    ),
    _scheduler(
        name="k8s.no-cpu-or-memory",
        wordings=(rf"{_NODES}Insufficient (?P<name>cpu|memory|ephemeral-storage|pods)",),
        tells=Tells.NAMES,
        error="no node has enough free {name} for the pod",
        advice="lower resources.requests of the pod, or let the cluster grow",
        confirm="kubectl describe nodes | grep -A8 'Allocated resources'",
    ),
    _scheduler(
        name="k8s.taints",
        wordings=(
            rf"{_NODES}(?:had|have) (?:untolerated )?taints? \{{(?P<name>[^}}:]+)",
            rf"{_NODES}taints? .*that the pod did(?:n't| not) tolerate",
        ),
        tells=Tells.NAMES,
        error="the nodes that would do carry a taint that the pod does not tolerate {name}",
        advice="add the toleration, e.g. key nvidia.com/gpu with operator Exists; taints not-ready and disk-pressure are the node's own trouble",
        confirm="kubectl get nodes -o custom-columns=N:.metadata.name,T:.spec.taints[*].key",
    ),
    _scheduler(
        name="k8s.affinity",
        wordings=(
            rf"{_NODES}didn't match (?:Pod's )?(?:node affinity|node selector|pod (?:anti-)?affinity|pod topology)",
        ),
        tells=Tells.NAMES,
        error="no node fits the pod's nodeSelector, affinity or spread",
        advice="correct the labels that the pod asks for",
        confirm="kubectl get nodes --show-labels",
    ),
    _scheduler(
        name="k8s.unschedulable",
        wordings=(rf"{_NODES}(?:were|was) unschedulable", rf"{_NODES}node\(s\) not ready"),
        tells=Tells.NAMES,
        error="nodes that would do are cordoned or not ready",
        advice="wait for the cluster's staff to open them: kubectl get nodes shows which",
        confirm="kubectl get nodes",
    ),
    _scheduler(
        name="k8s.volume-binding",
        wordings=(
            r"pod has unbound immediate PersistentVolumeClaims",
            rf"{_NODES}(?:volume node affinity conflict|didn't find available persistent volumes)",
            r"persistentvolumeclaim \"(?P<name>[^\"]+)\" not found",
            r"waiting for a volume to be created",
        ),
        tells=Tells.NAMES,
        cause="volume",
        error="a volume that the pod needs does not exist, or lies in another zone than the nodes {name}",
        advice="make the claim first, with a storage class that exists and, for many nodes, ReadWriteMany",
        confirm="kubectl get pvc; kubectl describe pvc NAME",
    ),
    _scheduler(
        name="k8s.failed-scheduling",
        wordings=(r"FailedScheduling", r"\d+/\d+ nodes are available"),
        tells=Tells.HINTS,
        error="the pod is not placed on a node: {words:.200}",
        advice="read why in the event; the other pods of the job wait for this one",
    ),
    _scheduler(
        name="k8s.gang",
        wordings=(
            r"pod group is not ready, (?P<why>.+)",
            r"(?P<why2>\d+/\d+ tasks in gang unschedulable.*)",
            r"PodGroup \S+ is unschedulable|NotEnoughResources.*(?:gang|minMember|PodGroup)",
            r"minAvailable \d+ .*(?:not|less)",
        ),
        tells=Tells.NAMES,
        error="the gang scheduler waits until all pods of the job fit at once {why}{why2}",
        advice="ask for fewer replicas or GPUs than the queue has free, or wait; minAvailable lower than the replicas starts a part",
        confirm="kubectl describe podgroup; kubectl get queue",
    ),
    _scheduler(
        name="k8s.kueue",
        wordings=(
            r"couldn't assign flavors to pod set (?P<name>\S+): (?P<why>.+)",
            r"[Ww]orkload .*(?:doesn't|does not|didn't) fit.*(?P<why2>quota|cohort|flavor)",
            r"(?:LocalQueue|ClusterQueue) (?P<name2>\S+) (?:doesn't exist|is inactive|is stopped)",
            r"Waiting for quota reservation",
        ),
        tells=Tells.NAMES,
        cause="site-limits",
        error="Kueue has not admitted the job: {why}{why2}{name2}",
        advice="ask for less, wait, or name another queue with the label kueue.x-k8s.io/queue-name",
        confirm="kubectl describe workload; kubectl get clusterqueue -o wide",
    ),
    # What the cluster refuses.
    _admission(
        name="k8s.quota",
        wordings=(
            r"exceeded quota: (?P<name>[^,]+), requested: (?P<asked>[^,]+), used: (?P<used>[^,]+), limited: (?P<limit>\S+)",
            r"is forbidden: exceeded quota",
            r"failed quota: (?P<name2>[^:]+): must specify",
        ),
        cause="site-limits",
        error="the namespace's quota {name}{name2} is used up: asked for {asked}, in use {used}, limit {limit}",
        advice="delete finished jobs of the namespace, or ask for less",
        confirm="kubectl describe quota",
    ),
    _admission(
        name="k8s.limit-range",
        wordings=(
            r"is forbidden: \[?(?:maximum|minimum) (?P<name>\S+) usage per (?:Container|Pod) is (?P<limit>[^,]+)",
        ),
        cause="site-limits",
        error="the {name} of a container is outside of what the namespace allows ({limit})",
        advice="ask for no more than that in resources",
        confirm="kubectl describe limitrange",
    ),
    _admission(
        name="k8s.pod-security",
        wordings=(
            r"violates PodSecurity \"(?P<name>[^\"]+)\": (?P<why>.+)",
            r"unable to validate against any (?:security context constraint|pod security policy)",
        ),
        error="the namespace's security level {name} forbids what the pod wants: {why}",
        advice="drop privileged, hostIPC, hostNetwork, hostPath and IPC_LOCK (use an emptyDir of medium Memory for /dev/shm), or use a namespace that allows them",
        confirm="kubectl get ns NAMESPACE --show-labels",
    ),
    _admission(
        name="k8s.webhook",
        wordings=(
            r"admission webhook \"(?P<name>[^\"]+)\" denied the request:? ?(?P<why>.*)",
            r"failed calling webhook \"(?P<name2>[^\"]+)\"",
        ),
        error="a rule of the cluster refused the object ({name}{name2}): {why}",
        advice="change what it names; `failed calling` means that the cluster's own webhook is down",
    ),
    _admission(
        name="k8s.rbac",
        wordings=(
            r"(?:is )?forbidden: User \"(?P<name>[^\"]+)\" cannot (?P<why>\w+ resource \"[^\"]+\")",
        ),
        error="the account {name} may not do this in the cluster: {why}",
        advice="bind a role to the service account of the pod, or name another with serviceAccountName",
        confirm="kubectl auth can-i --list",
    ),
    _admission(
        name="k8s.invalid-object",
        wordings=(
            r"(?:The|the) \w+ \"[^\"]*\" is invalid: (?P<why>.+)",
            r"error validating data: (?P<why2>.+)",
            r"no matches for kind \"(?P<name>[^\"]+)\" in version",
            r"strict decoding error: (?P<why3>.+)",
        ),
        cause="bad-arguments",
        error="Kubernetes refused the object: {why}{why2}{why3}{name}",
        advice="correct the field that it names; `no matches for kind` means that the operator is not installed in this cluster",
        confirm="kubectl apply --dry-run=server -f FILE",
    ),
    # What the kubelet could not do.
    _kubelet(
        name="k8s.mount",
        wordings=(
            r"MountVolume\.(?:SetUp|MountDevice|NewMounter\w*) failed for volume \"(?P<name>[^\"]+)\" ?: (?P<why>.+)",
            r"Unable to attach or mount volumes: unmounted volumes=\[(?P<name2>[^\]]+)\]",
            r"FailedMount|FailedAttachVolume|Multi-Attach error for volume",
        ),
        tells=Tells.NAMES,
        cause="volume",
        error="a volume of the pod could not be mounted {name}{name2}: {why}",
        advice="see that its claim, secret or NFS server exists and is reachable from that node; a disk with ReadWriteOnce serves one node only",
        rivals=("no-route", "permission"),
    ),
    _kubelet(
        name="k8s.missing-config",
        wordings=(
            r"(?:configmap|secret) \"(?P<name>[^\"]+)\" not found",
            r"couldn't find key (?P<key>\S+) in (?:ConfigMap|Secret) (?P<name2>\S+)",
            r"serviceaccount \"(?P<name3>[^\"]+)\" not found",
            r"CreateContainerConfigError",
        ),
        tells=Tells.NAMES,
        cause="pod-config",
        error="the pod names a secret, config map or account that is not in its namespace {name}{name2}{name3} {key}",
        advice="make it in the same namespace, under that name",
        confirm="kubectl get secret,configmap,serviceaccount",
    ),
    _kubelet(
        name="k8s.image-name",
        wordings=(
            r"InvalidImageName",
            r"couldn't parse image (?:name|reference) \"(?P<name>[^\"]+)\"",
        ),
        cause="image-missing",
        error="the name of the image is not well-formed {name}",
        advice="write registry/name:tag in lower case",
    ),
    _kubelet(
        name="k8s.image-login",
        wordings=(
            r"[Ff]ailed to pull image \"(?P<name>[^\"]+)\".*(?:unauthorized|401|403|authentication required|denied)",
            r"pull access denied(?: for (?P<name2>\S+?))?,",
            r"no basic auth credentials",
            r"FailedToRetrieveImagePullSecret",
        ),
        cause="image-missing",
        error="the registry did not give out the image {name}{name2}: it asks for a login, or the image does not exist",
        advice="name a secret of the registry in imagePullSecrets, and check the image's name",
        advice_in={
            "slurm": "put the registry's login into ~/.config/enroot/.credentials or `apptainer registry login`"
        },
        confirm="docker pull IMAGE   with the same login",
    ),
    _kubelet(
        name="k8s.image-not-found",
        wordings=(
            r"manifest (?:for (?P<name>\S+) )?(?:unknown|not found)",
            r"failed to resolve reference \"(?P<name2>[^\"]+)\": .*not found",
            r"[Ff]ailed to pull image \"(?P<name3>[^\"]+)\".*(?:not found|NotFound)",
        ),
        cause="image-missing",
        error="the registry has no image {name}{name2}{name3}",
        advice="correct its name or tag; the tag may exist for another platform only",
        confirm="docker manifest inspect IMAGE",
    ),
    _kubelet(
        name="k8s.image-limit",
        wordings=(
            r"toomanyrequests|You have reached your (?:unauthenticated )?pull rate limit",
            r"[Ff]ailed to pull image.*(?:i/o timeout|TLS handshake timeout|connection refused|no such host|EOF)",
        ),
        tells=Tells.NAMES,
        cause="image-missing",
        error="the registry could not be reached, or takes no more pulls from this address",
        advice="log in to the registry, or use a mirror or the cluster's own registry",
    ),
    _kubelet(
        name="k8s.image-disk",
        wordings=(
            r"[Ff]ailed to (?:pull|extract|register|prepare|copy).*(?:layer|image|extraction).*no space left on device",
        ),
        cause="disk-full",
        error="the node's disk is full: the image does not fit on it",
        advice="use a node with a larger disk, or a smaller image; the cluster's staff can prune old images",
        confirm="kubectl describe node NODE | grep -i pressure",
    ),
    _kubelet(
        name="k8s.evicted-memory",
        wordings=(
            r"low on resource: (?P<what>memory|ephemeral-storage|nodefs|imagefs|inodes|pids?)",
            r"[Pp]od ephemeral local storage usage exceeds (?P<limit>.+)",
            r"[Cc]ontainer \S+ exceeded its local ephemeral storage limit \"?(?P<limit2>[^\". ]+)",
            r"[Uu]sage of EmptyDir volume \"(?P<name>[^\"]+)\" exceeds the limit \"?(?P<limit3>[^\". ]+)",
        ),
        cause="evicted",
        error="the pod was evicted: its node ran short, or the pod used more than it may: {what}{name} {limit}{limit2}{limit3}",
        advice="ask for what it really needs (resources.requests, ephemeral-storage, sizeLimit of the emptyDir), or write checkpoints to a volume; short of disk while an image is pulled: nodes with a larger root disk, or a smaller image",
    ),
    _kubelet(
        name="k8s.node-lost",
        wordings=(
            r"NodeNotReady|NodeLost",
            r"node\.kubernetes\.io/(?:unreachable|not-ready)(?!.*(?:nodes are available|op=Exists|for \d+s))",
            r"(?:TaintManagerEviction|DeletionByTaintManager|DeletionByPodGC)",
            r"Pod was terminated in response to (?:imminent )?node shutdown",
            r"Node (?P<host>\S+) status is now: NodeNotReady",
        ),
        kind="node_failed",
    ),
    _kubelet(
        name="k8s.preempted",
        wordings=(
            r"Preempted by (?:pod )?\S+ on node",
            r"PreemptionByScheduler|TerminationByKubelet.*preempt",
            r"[Pp]reempted to accommodate a higher prior",
            r"Evicted due to preemption",
        ),
        kind="preempted",
    ),
    _kubelet(
        name="k8s.deadline",
        wordings=(r"was active (?:on the node )?longer than (?:the )?specified deadline",),
        kind="time_limit",
    ),
    _kubelet(
        name="k8s.liveness",
        wordings=(
            r"[Cc]ontainer (?P<name>\S+) failed (?P<what>liveness|startup) probe, will be restarted",
        ),
        cause="probe",
        error="Kubernetes ended the container {name}: its {what} probe had failed too often",
        advice="a training container needs no liveness probe: remove it, or raise timeoutSeconds and failureThreshold",
    ),
    _kubelet(
        name="k8s.unhealthy",
        wordings=(
            r"(?:Liveness|Startup|Readiness) probe (?:failed|errored)",
            r"\bUnhealthy\b.*probe",
        ),
        tells=Tells.NOISE,
        confirm=None,
    ),
    _kubelet(
        name="k8s.post-start",
        wordings=(r"FailedPostStartHook|PostStartHookError", r"FailedPreStopHook"),
        tells=Tells.NAMES,
        cause="container-runtime",
        error="a lifecycle hook of the container failed: {words:.160}",
        advice="correct postStart of the container; its output is in the event",
    ),
    _kubelet(
        name="k8s.sandbox",
        wordings=(
            r"[Ff]ailed to create pod sandbox: (?P<why>.+)",
            r"FailedCreatePodSandBox",
            r"failed to setup network for sandbox",
        ),
        tells=Tells.NAMES,
        cause="node-setup",
        error="the node could not set up the pod: {why:.200}",
        advice="let the pod start on another node; the cluster's staff has to look at the network plugin of this one",
        rivals=("node-failed",),
    ),
    _kubelet(
        name="k8s.device-plugin",
        wordings=(
            r"UnexpectedAdmissionError|Allocate failed due to (?P<why>.+), which is unexpected",
            r"no healthy devices present; cannot allocate unhealthy devices (?P<name>\S+)",
        ),
        cause="gpu-hardware",
        tells=Tells.NAMES,
        error="the node could not give the pod its GPUs {why}{name}",
        advice="let it start on another node; the device plugin of this one has lost its GPUs",
        confirm="kubectl describe node NODE | grep -A8 Allocatable",
        rivals=("gpu-runtime",),
    ),
    _kubelet(
        name="k8s.topology",
        wordings=(r"TopologyAffinityError|Resources cannot be allocated with Topology locality",),
        cause="no-capacity",
        error="the node cannot give CPUs and GPUs of one NUMA part, as its policy demands",
        advice="ask for fewer CPUs per GPU, or for the whole node",
    ),
    _kubelet(
        name="k8s.crash-loop",
        wordings=(r"CrashLoopBackOff", r"Back-off restarting failed container"),
        tells=Tells.ECHO,
        confirm=None,
    ),
    _kubelet(
        name="k8s.ended-with-an-error",
        wordings=(r"^\s*Reason: +Error\s*$",),  # kubectl's word for any exit code but zero
        tells=Tells.NOISE,
        confirm=None,
    ),
    _kubelet(
        name="k8s.tolerations",
        wordings=(r":No(?:Execute|Schedule) op=(?:Exists|Equal)",),
        tells=Tells.NOISE,
        confirm=None,
    ),
    # Jobs.
    _kubelet(
        name="k8s.backoff-limit",
        wordings=(
            r"BackoffLimitExceeded|has reached the specified backoff limit",
            r"PyTorchJob (?P<name>\S+) is failed because (?P<why>.+)",
            r"(?:JobSet|TrainJob|MPIJob|RayJob|PyTorchJob)\S* .*(?:failed because|has failed|is failed)",
            r"PodFailurePolicy",
        ),
        tells=Tells.ECHO,
        confirm=None,
    ),
    _kubelet(
        name="k8s.logs-gone",
        wordings=(
            r"previous terminated container \"[^\"]+\" in pod \"[^\"]+\" not found",
            r"unable to retrieve container logs for",
        ),
        tells=Tells.NOISE,
        confirm=None,
    ),
    _kubelet(
        name="k8s.name-not-found",
        wordings=(
            r"lookup (?P<host>[\w.-]+\.svc\S*?) on \S+: (?:no such host|server misbehaving)",
            r"Error: (?:getaddrinfo|lookup) .*(?P<host2>[\w.-]+\.svc\.cluster\.local)",
        ),
        tells=Tells.NAMES,
        cause="name-not-resolved",
        error="the service {host}{host2} has no address in the cluster",
        advice="make the headless service of the job (clusterIP: None, publishNotReadyAddresses: true), with the name that the pods use",
        confirm="kubectl get svc,endpoints",
    ),
    KnownMessage(
        name="k8s.replica-failed",
        wordings=(
            r"\w+Job \S+ (?:has failed|is failed) because (?P<number>\d+) (?P<kind_of>\w+) replica",
        ),
        source="Kubeflow training-operator 1.x status messages",
        tells=Tells.HINTS,
        cause="exit-code",
        error="{number} {kind_of} pod of the job failed; why is in that pod's own log",
        advice="kubectl logs POD --previous and kubectl describe pod POD of the failed replica",
    ),
)
