"""The objects of a run: Secrets with what it brings along, a headless Service for names, an Indexed Job of pods.

The Job is made last and owns the others, so that one delete removes all. Where pods differ in kind, a JobSet of such Jobs takes
its place. Source: Kubernetes 1.31 to 1.37, batch/v1 and v1, JobSet 0.11 and 0.12; what was accepted by a real control plane is marked "recorded" in the tests.
"""

import base64
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.engines.kubernetes.answers import (
    CONTAINER,
    INDEX_LABEL,
    MANAGED_BY,
    MANAGER,
    QUEUE_LABEL,
    RUN_LABEL,
)
from torchmuster.engines.kubernetes.elements import ends_of
from torchmuster.engines.kubernetes.request import PodPlace, PodResources, PodsRequest
from torchmuster.errors import UsageError
from torchmuster.model import contract
from torchmuster.node.pod.order import FINAL_CODE, FIRST_INDEX_VARIABLE

PACKAGE_FOLDER = "/muster"
SCRATCH_FOLDER = "/scratch"
_MANAGER = {MANAGED_BY: MANAGER}
_DEAD_NODE_S = 30  # instead of 300 s
SECRET_BYTES = 1 << 20
MOST_PARCELS = 4
# Of a pod that says nothing: of the disk for the package, code and logs, of the others no more than a LimitRange's usual default,
# which is a limit.
LEAST_MEMORY_BYTES = 512 << 20
_LEAST = {"cpu": "500m", "memory": str(LEAST_MEMORY_BYTES), "ephemeral-storage": str(1 << 30)}
_SHM_BYTES = 64 << 30  # without a limit of memory; a node with less gives what it has
MAX_HOST_NAME = 63
_OF_POD = "-abcde"  # what the cluster adds for a pod's own name: a JobSet counts it too
# A mesh's proxy refuses connections that are not its own, and would never end; autoscalers must not move a run.
_ANNOTATIONS = {
    "sidecar.istio.io/inject": "false",
    "linkerd.io/inject": "disabled",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def objects_of(run: PodsRequest) -> list[dict[str, Any]]:
    """Return Secrets, Service and Job, and what a gang needs, in the order in which they are made.

    Raises:
        UsageError: A name is too long, the files are too large for a Secret, or a patch does not fit.
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
    """Return Secrets and JobSet of pods of several kinds, in the order in which they are made.

    Each kind is a Job as it would be alone, and pods are made again by it; the set makes the Service, is one object for a queue,
    ends with the first kind's Job, and does not start anything again.

    Args:
        name: Of the set.
        kinds: The pods of each kind, by its name in the set.

    Raises:
        UsageError: As for one Job.
    """
    for _, run in kinds:
        _check(run, more=_OF_POD)
    first_name, first = kinds[0]
    whole = replace(first, name=name)
    jobs: list[dict[str, Any]] = []
    for kind, run in kinds:
        inside = replace(run.resources, has_least=run.queue is None)
        job = _patched_job(replace(run, queue=None, queue_priority=None, resources=inside))
        del job["metadata"]["name"]
        if QUEUE_LABEL in _queue_labels(first):  # a label there would be for Kueue itself
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
            "ttlSecondsAfterFinished": first.keep_s,
            "replicatedJobs": jobs,
        },
    }
    return [*_secrets(whole), jobset]


def _put(manifest: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value at a place; None removes what is there, numbers are positions in lists, and `-` is behind the last."""
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
    """Return what makes a scheduler start all pods or none, where it is an object of its own."""
    if run.place.gang != "volcano":
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
    """Return the patch that lets a Job or a JobSet own its Secrets and its Service."""
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
    """Return the names of a run's Secrets: its own, and one for each parcel of what is too large for that."""
    return [name, *(f"{name}-p{number}" for number in range(1, num_parcels + 1))]


def _parcels(run: PodsRequest) -> dict[str, dict[str, bytes]]:
    """Return the contents of each Secret, by its name."""
    numbers = {path: int(path.rpartition("/")[0] or 0) for path in run.files}
    names = secret_names(run.shares or run.name, max(numbers.values(), default=0))
    found: dict[str, dict[str, bytes]] = {name: {} for name in names}
    for path, content in run.files.items():
        found[names[numbers[path]]][path.rpartition("/")[2]] = content
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
            # Pods need their names before they are ready: by them they find each other.
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: run.name},
        },
    }


# Up to 1.34 the published schema asks for the status, though servers fill it in.
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
        "ttlSecondsAfterFinished": run.keep_s,
        "template": {
            "metadata": {
                # Istio reads a label or an annotation, by its version.
                "labels": {**_MANAGER, RUN_LABEL: run.name, "sidecar.istio.io/inject": "false"},
                "annotations": {**_ANNOTATIONS, **run.annotations, **_of_place(run)},
            },
            "spec": _pod(run),
        },
    }
    if run.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = run.time_limit_s
    if run.place.gang == "native" and run.parallel is None:
        spec["scheduling"] = {"schedulingPolicy": {"gang": {}}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**_metadata(run, **labels), "annotations": dict(run.annotations)},
        "spec": spec,
    }


def _queue_labels(run: PodsRequest) -> dict[str, str]:
    labels: dict[str, str] = {}
    if run.queue is not None and run.place.gang is None:
        labels[QUEUE_LABEL] = run.queue
    if run.queue is not None and run.place.gang == "kai":
        labels["kai.scheduler/queue"] = run.queue
    if run.queue_priority is not None:
        labels["kueue.x-k8s.io/priority-class"] = run.queue_priority
    return labels


def _of_place(run: PodsRequest) -> dict[str, str]:
    found: dict[str, str] = {}
    if run.place.topology is not None:
        found["kueue.x-k8s.io/podset-required-topology"] = run.place.topology
    if run.place.gang == "volcano":
        found["scheduling.k8s.io/group-name"] = run.name
    return found


_SCHEDULERS = {"volcano": "volcano", "kai": "kai-scheduler"}


def _pod(run: PodsRequest) -> dict[str, Any]:
    place = run.place
    pod: dict[str, Any] = {
        # What podFailurePolicy needs; workers are started again inside of the pod.
        "restartPolicy": "Never",
        "subdomain": run.service or run.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": run.grace_s,
        "tolerations": [*_TOLERATIONS, *map(dict, place.tolerations)],
        "containers": [_container(run)],
        "volumes": _volumes(run),
    }
    if run.namespace is not None:
        # So that a pod's host name alone means something to the others; with another cluster domain it does not.
        search = f"{run.service or run.name}.{run.namespace}.svc.cluster.local"
        pod["dnsConfig"] = {"searches": [search]}
    if place.node_selector:
        pod["nodeSelector"] = dict(place.node_selector)
    if place.gang in _SCHEDULERS:
        pod["schedulerName"] = _SCHEDULERS[place.gang]
    if place.priority_class is not None:
        pod["priorityClassName"] = place.priority_class
    if place.service_account is not None:
        pod["serviceAccountName"] = place.service_account
    if place.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in place.pull_secrets]
    if place.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        pod["affinity"] = {"podAntiAffinity": _apart(run)}
    if security := _security_of_pod(place):
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


def _apart(run: PodsRequest) -> dict[str, Any]:
    """Return that no two pods of a run share a host, whose ports they would share too."""
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
        "resources": _resources(run.resources, has_least=run.queue is None),
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
    if run.place.pull_policy is not None:
        container["imagePullPolicy"] = run.place.pull_policy
    if security := _security_of_container(run.place):
        container["securityContext"] = security
    return container


def _resources(wanted: PodResources, *, has_least: bool) -> dict[str, Any]:
    """Return requests and limits: memory and devices are equal in both, and a CPU is asked for but not limited."""
    both: dict[str, Any] = {}
    if wanted.memory_bytes is not None:
        both["memory"] = str(wanted.memory_bytes)
    if wanted.gpus:
        both[wanted.gpu_resource] = str(wanted.gpus)
    both |= {name: str(number) for name, number in wanted.devices.items()}
    # What the scheduler counts, a busy node respects, and a pod is evicted for last. A queue of Kueue admits nothing that asks for
    # a resource which it has no quota of: there it is asked for by the user only.
    requests = dict(_LEAST) if has_least and wanted.has_least else {}
    if wanted.cpus is not None:
        requests["cpu"] = str(wanted.cpus)
    if wanted.scratch_bytes is not None:
        requests["ephemeral-storage"] = str(wanted.scratch_bytes)
    return {"requests": {**requests, **both}, "limits": both}


def _shm_bytes(wanted: PodResources) -> int:
    """Return the size of /dev/shm: by default half of the memory, as Linux has it, so that a full one is an error and no kill."""
    if wanted.shm_bytes is not None:
        return wanted.shm_bytes
    return wanted.memory_bytes // 2 if wanted.memory_bytes is not None else _SHM_BYTES


def _volumes(run: PodsRequest) -> list[dict[str, Any]]:
    shm = {"medium": "Memory", "sizeLimit": str(_shm_bytes(run.resources))}
    scratch: dict[str, Any] = {}
    secrets = [{"secret": {"name": name}} for name in _parcels(run)]
    if run.resources.scratch_bytes is not None:
        scratch["sizeLimit"] = str(run.resources.scratch_bytes)
    return [
        # 0400; with an fsGroup the kubelet makes it 0440 by itself. JSON has no octal numbers.
        {"name": "package", "projected": {"sources": secrets, "defaultMode": 256}},
        {"name": "shm", "emptyDir": shm},
        {"name": "scratch", "emptyDir": scratch},
        *(
            {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim.name}}
            for i, claim in enumerate(run.claims)
        ),
    ]


def _security_of_pod(place: PodPlace) -> dict[str, Any]:
    user = place.user if place.user is not None or not place.restricted else 1000
    security: dict[str, Any] = {}
    if user is not None:
        security |= {"runAsUser": user, "fsGroup": user, "fsGroupChangePolicy": "OnRootMismatch"}
    if place.restricted:
        security |= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return security


def _security_of_container(place: PodPlace) -> dict[str, Any]:
    if place.restricted:
        return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"capabilities": {"add": ["IPC_LOCK"]}} if place.lock_memory else {}
