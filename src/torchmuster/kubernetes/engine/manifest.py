"""The objects of a run: Secrets with its files, a headless Service for names, an Indexed Job.

The keys of a site and a job request become values of pods, and these a manifest. The Job is created
last and owns the others, so that one delete removes all. If pods differ in kind, a JobSet of such
Jobs replaces it. Source: Kubernetes 1.31 to 1.37, batch/v1 and v1, JobSet 0.11 and 0.12; what a
real control plane accepted is marked "recorded" in the tests.
"""

import base64
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.core.model import contract
from torchmuster.core.model.text import did_you_mean
from torchmuster.core.spec.problems import duration_fix, parse_size, parse_timeout
from torchmuster.errors import UsageError
from torchmuster.kubernetes.engine.answers import (
    CONTAINER,
    CONTEXT_ANNOTATION,
    INDEX_LABEL,
    MANAGED_BY,
    MANAGER,
    QUEUE_LABEL,
    RUN_ID_ANNOTATION,
    RUN_LABEL,
)
from torchmuster.kubernetes.node.order import (
    DISK_BYTES_VARIABLE,
    FINAL_CODE,
    FIRST_INDEX_VARIABLE,
    MEMORY_BYTES_VARIABLE,
)
from torchmuster.launcher.model.job import JobRequest

# What one run requests from a cluster, as values: pods, their resources, where they may run.


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A PersistentVolumeClaim and where the pods see it."""

    name: str
    path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsRequest:
    """The complete request of one run; sizes in bytes.

    Attributes:
        name: The name of all its objects.
        num_pods: How many run at the same time, including spare nodes; for a sweep the number of
            members.
        parallel: For a sweep, whose members are the pods: how many run at a time. None if all pods
            are one run.
        command: The command of each pod, in exec form: process 1 gets SIGTERM.
        files: The files it brings along, by name, e.g. the key and the plan; those of a further
            parcel as `NUMBER/NAME`.
        namespace: Where the objects are created, if known.
        shares: The run whose Secrets these pods mount; they have none themselves then.
        service: The Service that gives the pods their names, if it is not this run's own.
        first_index: The index of the first pod among the pods of all runs that share a Secret.
        gpus: The number of `gpu_resource` for each pod.
        devices: Other resources by the site's names, e.g. `rdma/ib`.
        shm_bytes: The size of /dev/shm, which counts as memory of the pod; None for half of the
            memory.
        scratch_bytes: Disk of the node, both request and limit; None for no limit.
        has_least: Request a little CPU, memory and disk by default, if no queue counts them.
        tolerations: As Kubernetes writes them; GPU nodes are always tolerated.
        pull_policy: None for Kubernetes' default: always for `:latest`, else if the node lacks the
            image.
        restricted: Fit the pods to the Pod Security level `restricted`.
        user: The uid; None for the image's, or for 1000 if the level forbids root.
        gang: The scheduler that starts all pods or none: `volcano`, `kai` or `native`; Kueue needs
            none.
        topology: A level of Kueue's topology that all pods must share.
        annotations: For the Job and its pods.
        queue: A LocalQueue of Kueue.
        queue_priority: A WorkloadPriorityClass of Kueue.
        patches: Paths in the Job's manifest with values; they override everything else.
    """

    name: str
    num_pods: int
    image: str
    command: tuple[str, ...]
    files: Mapping[str, bytes]
    namespace: str | None = None
    shares: str | None = None
    service: str | None = None
    first_index: int = 0
    parallel: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    devices: Mapping[str, int] = field(default_factory=dict)
    shm_bytes: int | None = None
    scratch_bytes: int | None = None
    has_least: bool = True
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    priority_class: str | None = None
    service_account: str | None = None
    pull_secrets: tuple[str, ...] = ()
    pull_policy: str | None = None
    host_network: bool = False
    lock_memory: bool = False
    restricted: bool = False
    user: int | None = None
    gang: str | None = None
    topology: str | None = None
    claims: tuple[Claim, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    queue: str | None = None
    queue_priority: str | None = None
    time_limit_s: int | None = None
    patches: tuple[tuple[tuple[str, ...], Any], ...] = ()


# A Job whose indexes are sweep members, each a separate run: what ends it.


_MANY = 1_000_000  # the head of the run counts failures, the Job doesn't
_MEMBER_LOSSES = 2  # pods of one member that may be lost; a third loss is its failure


def ends_of(run: PodsRequest) -> dict[str, Any]:
    """Return what ends a Job: for a run its first pod, for a sweep the end of all members."""
    replaced = {"podReplacementPolicy": "Failed"}  # the only value allowed with a podFailurePolicy
    if run.parallel is not None:
        # Without `maxFailedIndexes`, a failed member ends no other one.
        return {"backoffLimitPerIndex": _MEMBER_LOSSES, **replaced}
    success = {"rules": [{"succeededIndexes": "0"}]}
    return {"backoffLimit": _MANY, **replaced, "successPolicy": success}


PACKAGE_FOLDER = "/muster"
SCRATCH_FOLDER = "/scratch"
_MANAGER = {MANAGED_BY: MANAGER}
_DEAD_NODE_S = 30  # instead of 300 s
SECRET_BYTES = 1 << 20
MOST_PARCELS = 4
# The default requests: disk for the package, code and logs; CPU and memory at most as a LimitRange
# usually sets by default, which is a limit.
LEAST_MEMORY_BYTES = 512 << 20
_DEFAULT_REQUESTS = {
    "cpu": "500m",
    "memory": str(LEAST_MEMORY_BYTES),
    "ephemeral-storage": str(1 << 30),
}
_SHM_BYTES = 64 << 30  # without a memory limit; a smaller node gives what it has
MAX_HOST_NAME = 63
_POD_SUFFIX = "-abcde"  # the suffix that the cluster adds to a pod's name; a JobSet counts it, too
# A mesh's proxy refuses foreign connections and never ends; autoscalers must not move a run.
_ANNOTATIONS = {
    "sidecar.istio.io/inject": "false",
    "linkerd.io/inject": "disabled",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def objects_of(run: PodsRequest) -> list[dict[str, Any]]:
    """Return Secrets, Service, gang objects and Job, in the order in which they are created.

    Raises:
        UsageError: A name is too long, the files are too large for a Secret, or a patch does not
            fit.
    """
    _check(run)
    job = _patched_job(run)
    secrets = _secrets(run) if run.shares is None else []
    return [*secrets, _service(run), *_gang(run), job]


def _patched_job(run: PodsRequest) -> dict[str, Any]:
    job = _job(run)
    for path, value in run.patches:
        _put(job, path, value)
    return job


def objects_of_set(name: str, kinds: Sequence[tuple[str, PodsRequest]]) -> list[dict[str, Any]]:
    """Return the Secrets and the JobSet for pods of several kinds, in the order of creation.

    Each kind is a Job as it would be alone, which replaces its own pods. The set makes the Service,
    is one object for a queue, ends with the first kind's Job, and restarts nothing.

    Args:
        name: The name of the set.
        kinds: The pods of each kind, by its name in the set.

    Raises:
        UsageError: As for one Job.
    """
    for _, run in kinds:
        _check(run, more=_POD_SUFFIX)
    first_name, first = kinds[0]
    whole = replace(first, name=name)
    jobs: list[dict[str, Any]] = []
    for kind, run in kinds:
        has_least = run.queue is None
        job = _patched_job(replace(run, queue=None, queue_priority=None, has_least=has_least))
        del job["metadata"]["name"]
        if QUEUE_LABEL in _queue_labels(first):  # a label there would be read by Kueue itself
            job["metadata"]["annotations"][QUEUE_LABEL] = first.queue
        job["spec"].pop("ttlSecondsAfterFinished", None)
        template = {"metadata": job["metadata"], "spec": job["spec"]}
        jobs.append({"name": kind, "replicas": 1, "template": template})
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            **_metadata(whole, **_queue_labels(whole)),
            "annotations": dict(first.annotations),
        },
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": name,
            },
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [first_name]},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": _KEEP_S,
            "replicatedJobs": jobs,
        },
    }
    return [*_secrets(whole), jobset]


def _put(manifest: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value at a path; None removes it, numbers index lists, and `-` appends to a list."""
    at: Any = manifest
    for step, following in itertools.pairwise(path):
        if isinstance(at, dict):
            at = at.setdefault(step, [] if following == "-" else {})
        elif isinstance(at, list) and step.isdecimal() and int(step) < len(at):
            at = at[int(step)]
        else:
            raise _no_place(path)
    last = path[-1]
    if isinstance(at, dict):
        at.pop(last, None)
        if value is not None:
            at[last] = value
    elif isinstance(at, list) and last == "-":
        at.append(value)
    elif isinstance(at, list) and last.isdecimal() and int(last) < len(at):
        at[int(last)] = value
    else:
        raise _no_place(path)


def _no_place(path: Sequence[str]) -> UsageError:
    return UsageError(
        f"the Job's manifest has no place `{'.'.join(path)}`",
        where="directives",
        fix="muster run --dry-run shows the manifest; lists take a position, or `-` for a new entry",
    )


def _gang(run: PodsRequest) -> list[dict[str, Any]]:
    """Return the object that makes a scheduler start all pods or none, if it needs one."""
    if run.gang != "volcano":
        return []
    return [
        {
            "apiVersion": "scheduling.volcano.sh/v1beta1",
            "kind": "PodGroup",
            "metadata": _metadata(run),
            "spec": {
                "minMember": run.num_pods if run.parallel is None else 1,
                **({"queue": run.queue} if run.queue else {}),
            },
        }
    ]


def owned_by(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch that makes a Job or a JobSet own its Secrets and its Service."""
    owner = {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "name": made["metadata"]["name"],
        "uid": made["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }
    return {"metadata": {"ownerReferences": [owner]}}


def _check(run: PodsRequest, more: str = "") -> None:
    host = f"{run.name}-{run.num_pods - 1}{more}"
    if len(host) > MAX_HOST_NAME or not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", run.name):
        raise UsageError(
            f"`{run.name}` can't be the name of a Job of {run.num_pods} pods",
            why=f"`{host}` is the host name of its last pod",
            fix="small letters, digits and `-`, a letter first, at most 63 characters with the pod's number",
        )
    for parcel in _parcels(run).values():
        size_bytes = sum(map(len, parcel.values()))
        if size_bytes > SECRET_BYTES:
            raise UsageError(
                f"what the run brings along has {size_bytes:,} bytes; a Secret takes {SECRET_BYTES:,}",
                where=max(parcel, key=lambda name: len(parcel[name])),
                fix="leave large files out of the code, or put them on a volume",
            )


def secret_names(name: str, num_parcels: int = MOST_PARCELS) -> list[str]:
    """Return the names of a run's Secrets: its own, and one for each further parcel."""
    return [name, *(f"{name}.p{number}" for number in range(1, num_parcels + 1))]


def secret_of(name: str, path: str) -> str:
    """Return which Secret of a run holds a file of `JobRequest.brings`."""
    return secret_names(name)[int(path.rpartition("/")[0] or 0)]


def _parcels(run: PodsRequest) -> dict[str, dict[str, bytes]]:
    """Return the contents of each Secret, by its name."""
    name = run.shares or run.name
    found: dict[str, dict[str, bytes]] = {name: {}}
    for path, content in sorted(run.files.items()):
        found.setdefault(secret_of(name, path), {})[path.rpartition("/")[2]] = content
    return found


def _metadata(run: PodsRequest, **more: str) -> dict[str, Any]:
    return {"name": run.name, "labels": {**_MANAGER, RUN_LABEL: run.name, **more}}


def _secrets(run: PodsRequest) -> list[dict[str, Any]]:
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {**_metadata(run), "name": name},
            "immutable": True,
            "type": "Opaque",
            "data": {file: base64.b64encode(data).decode() for file, data in parcel.items()},
        }
        for name, parcel in _parcels(run).items()
    ]


def _service(run: PodsRequest) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(run),
        "spec": {
            "clusterIP": "None",
            # Pods need their names before they are ready, to find each other.
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: run.name},
        },
    }


# Up to 1.34 the published schema requires the status, though servers fill it in.
_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


def _job(run: PodsRequest) -> dict[str, Any]:
    labels = _queue_labels(run)
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": run.num_pods,
        "parallelism": run.parallel or run.num_pods,
        **ends_of(run),
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob" if run.parallel is None else "FailIndex",
                    "onExitCodes": {
                        "containerName": CONTAINER,
                        "operator": "In",
                        "values": [FINAL_CODE],
                    },
                },
                {"action": "Ignore", "onPodConditions": [_DISRUPTED]},
            ]
        },
        "ttlSecondsAfterFinished": _KEEP_S,
        "template": {
            "metadata": {
                # Istio reads a label or an annotation, depending on its version.
                "labels": {**_MANAGER, RUN_LABEL: run.name, "sidecar.istio.io/inject": "false"},
                "annotations": {**_ANNOTATIONS, **run.annotations, **_of_place(run)},
            },
            "spec": _pod(run),
        },
    }
    if run.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = run.time_limit_s
    if run.gang == "native" and run.parallel is None:
        spec["scheduling"] = {"schedulingPolicy": {"gang": {}}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**_metadata(run, **labels), "annotations": dict(run.annotations)},
        "spec": spec,
    }


def _queue_labels(run: PodsRequest) -> dict[str, str]:
    labels: dict[str, str] = {}
    if run.queue is not None and run.gang is None:
        labels[QUEUE_LABEL] = run.queue
    if run.queue is not None and run.gang == "kai":
        labels["kai.scheduler/queue"] = run.queue
    if run.queue_priority is not None:
        labels["kueue.x-k8s.io/priority-class"] = run.queue_priority
    return labels


def _of_place(run: PodsRequest) -> dict[str, str]:
    found: dict[str, str] = {}
    if run.topology is not None:
        found["kueue.x-k8s.io/podset-required-topology"] = run.topology
    if run.gang == "volcano":
        found["scheduling.k8s.io/group-name"] = run.name
    return found


_SCHEDULERS = {"volcano": "volcano", "kai": "kai-scheduler"}


def _pod(run: PodsRequest) -> dict[str, Any]:
    pod: dict[str, Any] = {
        # Required by podFailurePolicy; workers are restarted inside the pod.
        "restartPolicy": "Never",
        "subdomain": run.service or run.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_S,
        "tolerations": [*_TOLERATIONS, *map(dict, run.tolerations)],
        "containers": [_container(run)],
        "volumes": _volumes(run),
    }
    if run.namespace is not None:
        # Lets pods use a host name alone; has no effect with another cluster domain.
        search = f"{run.service or run.name}.{run.namespace}.svc.cluster.local"
        pod["dnsConfig"] = {"searches": [search]}
    if run.node_selector:
        pod["nodeSelector"] = dict(run.node_selector)
    if run.gang in _SCHEDULERS:
        pod["schedulerName"] = _SCHEDULERS[run.gang]
    if run.priority_class is not None:
        pod["priorityClassName"] = run.priority_class
    if run.service_account is not None:
        pod["serviceAccountName"] = run.service_account
    if run.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in run.pull_secrets]
    if run.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        pod["affinity"] = {"podAntiAffinity": _anti_affinity(run)}
    if security := _security_of_pod(run):
        pod["securityContext"] = security
    return pod


_TOLERATIONS = (
    {"key": "nvidia.com/gpu", "operator": "Exists"},
    *(
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _DEAD_NODE_S,
        }
        for state in ("unreachable", "not-ready")
    ),
)


def _anti_affinity(run: PodsRequest) -> dict[str, Any]:
    """Return an anti-affinity that keeps pods of a run on separate hosts, whose ports they use."""
    term = {
        "labelSelector": {"matchLabels": {RUN_LABEL: run.name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _container(run: PodsRequest) -> dict[str, Any]:
    fields = {
        "MUSTER_POD_INDEX": f"metadata.labels['{INDEX_LABEL}']",
        "MUSTER_POD_IP": "status.podIP",
        "MUSTER_POD_UID": "metadata.uid",
        contract.MACHINE_VARIABLE: "spec.nodeName",
    }
    environment: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    environment += [{"name": name, "value": value} for name, value in run.environment.items()]
    if run.first_index:
        environment.append({"name": FIRST_INDEX_VARIABLE, "value": str(run.first_index)})
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": run.image,
        "command": list(run.command),
        "terminationMessagePolicy": "File",
        "env": environment,
        "resources": _resources(run),
        "volumeMounts": [
            {"name": "package", "mountPath": PACKAGE_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": SCRATCH_FOLDER},
            *(
                {"name": f"claim-{i}", "mountPath": claim.path, "readOnly": claim.read_only}
                for i, claim in enumerate(run.claims)
            ),
        ],
    }
    if run.pull_policy is not None:
        container["imagePullPolicy"] = run.pull_policy
    if security := _security_of_container(run):
        container["securityContext"] = security
    return container


def _resources(run: PodsRequest) -> dict[str, Any]:
    """Return requests and limits: equal for memory and devices; CPUs are requested, not limited."""
    both: dict[str, Any] = {}
    if run.memory_bytes is not None:
        both["memory"] = str(run.memory_bytes)
    if run.gpus:
        both[run.gpu_resource] = str(run.gpus)
    both |= {name: str(number) for name, number in run.devices.items()}
    # Requests count for the scheduler, protect on a busy node, and make eviction less likely. A
    # Kueue queue admits no request for a resource it has no quota for: there only the user sets
    # them.
    requests = dict(_DEFAULT_REQUESTS) if run.queue is None and run.has_least else {}
    if run.cpus is not None:
        requests["cpu"] = str(run.cpus)
    if run.scratch_bytes is not None:
        requests["ephemeral-storage"] = str(run.scratch_bytes)
    return {"requests": {**requests, **both}, "limits": both}


def _shm_bytes(run: PodsRequest) -> int:
    """Return the size of /dev/shm: by default half of the memory, as Linux has it.

    Filling it then raises an error instead of getting the pod killed.
    """
    if run.shm_bytes is not None:
        return run.shm_bytes
    return run.memory_bytes // 2 if run.memory_bytes is not None else _SHM_BYTES


def _volumes(run: PodsRequest) -> list[dict[str, Any]]:
    shm = {"medium": "Memory", "sizeLimit": str(_shm_bytes(run))}
    scratch: dict[str, Any] = {}
    secrets = [{"secret": {"name": name}} for name in _parcels(run)]
    if run.scratch_bytes is not None:
        scratch["sizeLimit"] = str(run.scratch_bytes)
    return [
        # 0400 (JSON has no octal numbers); with an fsGroup the kubelet makes it 0440.
        {"name": "package", "projected": {"sources": secrets, "defaultMode": 256}},
        {"name": "shm", "emptyDir": shm},
        {"name": "scratch", "emptyDir": scratch},
        *(
            {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim.name}}
            for i, claim in enumerate(run.claims)
        ),
    ]


def _security_of_pod(run: PodsRequest) -> dict[str, Any]:
    user = run.user if run.user is not None or not run.restricted else 1000
    security: dict[str, Any] = {}
    if user is not None:
        security |= {"runAsUser": user, "fsGroup": user, "fsGroupChangePolicy": "OnRootMismatch"}
    if run.restricted:
        security |= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return security


def _security_of_container(run: PodsRequest) -> dict[str, Any]:
    if run.restricted:
        return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"capabilities": {"add": ["IPC_LOCK"]}} if run.lock_memory else {}


# A site and a job request as pods: keys of `muster.toml` become values of the manifest.


START = f"{PACKAGE_FOLDER}/start.py"
POD_PORT = 29417  # fixed for all pods of a run: a pod's name is known before the pod exists
TAKE_WITHIN_S = 900.0
_DEADLINE_NET_S = 900  # the run watches its own time; the Job's limit catches a run that fails to
_GRACE_S = 120
_KEEP_S = 86400  # how long an ended Job is kept
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_GANGS = ("volcano", "kai", "native")
_LEVELS = ("restricted", "baseline", "privileged")


def pods_of(job: JobRequest, files: Mapping[str, bytes]) -> PodsRequest:
    """Return the pods of a job; `files` is what they bring along.

    Raises:
        UsageError: A key of the site has a value that Kubernetes would not accept.
    """
    keys = dict(job.own_keys)
    node = job.chunks[0]
    home = home_of(job)
    limit_s = job.time_limit_s
    disk_bytes = node.storage_bytes or _size(keys, "scratch_size")
    memory_bytes = node.memory_bytes or _size(keys, "memory")
    return PodsRequest(
        name=job.name,
        num_pods=job.num_nodes if job.array is None else job.array.size,
        parallel=None if job.array is None else job.array.parallel or job.array.size,
        image=_image(keys),
        command=(job.python, "-I", "-S", START),
        files=files,
        namespace=keys.get("namespace"),
        shares=job.shares,
        first_index=job.first_index,
        cpus=node.cpus,
        memory_bytes=memory_bytes,
        gpus=node.gpus,
        gpu_resource=keys.get("gpu_resource", "nvidia.com/gpu"),
        devices={name: _count("devices", text) for name, text in _pairs(keys, "devices")},
        shm_bytes=_size(keys, "shm"),
        scratch_bytes=disk_bytes,
        node_selector=dict(_pairs(keys, "node_selector")),
        tolerations=tuple(map(_toleration, _lines(keys, "tolerations"))),
        priority_class=keys.get("priority_class"),
        service_account=keys.get("service_account"),
        pull_secrets=_lines(keys, "pull_secrets"),
        pull_policy=_one_of(keys, "pull_policy", _PULL_POLICIES),
        host_network=keys.get("host_network") == "yes",
        lock_memory=keys.get("lock_memory") == "yes",
        restricted=_one_of(keys, "pod_security", _LEVELS) == "restricted",
        user=int(keys["run_as"]) if "run_as" in keys else None,
        gang=_one_of(keys, "gang", _GANGS),
        topology=keys.get("topology"),
        claims=claims_of(job),
        environment={
            "MUSTER_HOME": home,
            "MUSTER_POD_DISK": SCRATCH_FOLDER,
            MEMORY_BYTES_VARIABLE: str(memory_bytes or LEAST_MEMORY_BYTES),
            **({DISK_BYTES_VARIABLE: str(disk_bytes)} if disk_bytes is not None else {}),
        },
        annotations={
            CONTEXT_ANNOTATION: keys.get("context", ""),
            **({RUN_ID_ANNOTATION: job.run_id} if job.run_id is not None else {}),
        },
        queue=job.queue,
        queue_priority=keys.get("queue_priority"),
        time_limit_s=None if limit_s is None else int(limit_s + keep_s_of(job)) + _DEADLINE_NET_S,
        patches=tuple(_patch(line) for line in job.directives),
    )


def kinds_of(job: JobRequest) -> list[JobRequest]:
    """Return a job for each kind of pods in a JobSet, with the Job names that the set gives."""
    found: list[JobRequest] = []
    first = 0
    for number, chunk in enumerate(job.chunks):
        keys = {**dict(job.own_keys), **dict(chunk.extra)}
        kind = replace(
            job,
            name=name_in_set(job.name, number),
            chunks=(replace(chunk, extra=()),),
            own_keys=tuple(keys.items()),
            shares=job.name,
            first_index=first,
        )
        found.append(kind)
        first += chunk.num_nodes
    return found


def sets_of(job: JobRequest, files: Mapping[str, bytes]) -> list[PodsRequest]:
    """Return the pods of a job with several kinds of them, one request per kind.

    Raises:
        UsageError: A key of the site has a value that Kubernetes would not accept.
    """
    kinds = (pods_of(kind, files) for kind in kinds_of(job))
    return [replace(kind, service=job.name) for kind in kinds]


def name_in_set(name: str, number: int) -> str:
    """Return the name of a kind's Job in a JobSet: NAME-KIND-REPLICA."""
    return f"{name}-{kind_name(number)}-0"


def kind_name(number: int) -> str:
    """Return a kind's name in a JobSet."""
    return chr(ord("a") + number)


def home_of(job: JobRequest) -> str:
    """Return where runs live in the pods: on a volume if the site names one, else on their disk."""
    return dict(job.own_keys).get("home", f"{SCRATCH_FOLDER}/muster")


def claims_of(job: JobRequest) -> tuple[Claim, ...]:
    """Return the volumes of a job.

    Raises:
        UsageError: An entry is not NAME:/PATH or NAME:/PATH:ro.
    """
    return tuple(map(_claim, _lines(dict(job.own_keys), "claims")))


def keeps_runs(job: JobRequest) -> bool:
    """Say whether runs live on a volume, which outlives the pods."""
    home = home_of(job)
    return any(home == c.path or home.startswith(f"{c.path}/") for c in claims_of(job))


def keep_s_of(job: JobRequest) -> float:
    """Return how long the ended first pod waits for a client to fetch its files; 0 with a volume.

    Raises:
        UsageError: `take_within` is not a duration.
    """
    text = dict(job.own_keys).get("take_within")
    kept_s = TAKE_WITHIN_S if text is None else parse_timeout(text)
    if kept_s is None:
        fix = duration_fix("take_within", str(text), '= "15m"')
        raise UsageError(f"`{text}` is not a duration", where="take_within", fix=fix)
    return 0.0 if keeps_runs(job) else kept_s


def _image(keys: Mapping[str, str]) -> str:
    image = keys.get("image")
    if image is None:
        raise UsageError(
            "no image is given for the pods",
            where="--on",
            why="a pod is made of an image: it needs Python 3.11 or later and the job's torch",
            fix='image = "pytorch/pytorch:2.13.0-cuda12.8-cudnn9-runtime" in the section of muster.toml',
        )
    return image


def _lines(keys: Mapping[str, str], key: str) -> tuple[str, ...]:
    return tuple(keys[key].split("\n")) if keys.get(key) else ()


def _pairs(keys: Mapping[str, str], key: str) -> list[tuple[str, str]]:
    parts = (line.partition("=") for line in _lines(keys, key))
    return [(name, text) for name, _, text in parts]


def _size(keys: Mapping[str, str], key: str) -> int | None:
    text = keys.get(key)
    size_bytes = parse_size(text) if text is not None else None
    if text is not None and not size_bytes:
        raise UsageError(f"`{text}` is not a valid size", where=key, fix=f'{key} = "64Gi"')
    return size_bytes


def _count(key: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text):
        raise UsageError(
            f"`{text}` is not a whole number", where=key, fix='devices = { "rdma/ib" = 1 }'
        )
    return int(text)


def _one_of(keys: Mapping[str, str], key: str, words: tuple[str, ...]) -> str | None:
    text = keys.get(key)
    if text is not None and text not in words:
        fix = did_you_mean(text, words, f"one of {', '.join(words)}")
        raise UsageError(f"there is no {key} `{text}`", where=key, fix=fix)
    return text


def _claim(text: str) -> Claim:
    name, _, path = text.partition(":")
    path, _, mode = path.partition(":")
    if (
        not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name)
        or not path.startswith("/")
        or mode not in ("", "ro")
    ):
        raise UsageError(
            f"`{text}` names no volume",
            where="claims",
            fix='claims = ["NAME:/data:ro", "NAME:/home"], the names as `kubectl get pvc` lists them',
        )
    return Claim(name=name, path=path.rstrip("/") or "/", read_only=mode == "ro")


def _toleration(text: str) -> dict[str, str]:
    """Return `KEY`, `KEY:EFFECT`, `KEY=VALUE` or `KEY=VALUE:EFFECT` as Kubernetes writes it."""
    whole, _, effect = text.partition(":")
    key, equal, value = whole.partition("=")
    if not key or (effect and effect not in _EFFECTS):
        near = did_you_mean(effect, _EFFECTS, "") if effect else ""
        raise UsageError(
            f"`{text}` is not a toleration",
            where="tolerations",
            fix=near
            or 'tolerations = ["KEY=VALUE:NoSchedule", "KEY"], as `kubectl describe node` shows taints',
        )
    found = (
        {"key": key, "operator": "Equal", "value": value}
        if equal
        else {"key": key, "operator": "Exists"}
    )
    return {**found, **({"effect": effect} if effect else {})}


def _patch(line: str) -> tuple[tuple[str, ...], Any]:
    """Return path and value of `spec.template.spec.runtimeClassName=nvidia`; quote dots with []."""
    path, equal, text = line.partition("=")
    steps = re.findall(r"\[['\"]?([^\]'\"]+)['\"]?\]|([^.\[\]]+)", path.strip())
    words = tuple(bracketed or plain for bracketed, plain in steps)
    if not equal or words[:1] not in (("spec",), ("metadata",)):
        raise UsageError(
            f"the directive `{line}` is not a place in the Job's manifest with its value",
            where="directives",
            fix='directives = ["spec.template.spec.runtimeClassName=nvidia"]; values are text or JSON',
        )
    try:
        value = json.loads(text)
    except ValueError:
        value = text.strip()
    return words, value
