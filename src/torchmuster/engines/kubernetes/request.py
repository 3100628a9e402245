"""What is asked of a cluster for one run, as values: the pods, what they need, where they may be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A PersistentVolumeClaim and where the pods see it."""

    name: str
    path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    """What each pod asks for; sizes in bytes.

    Attributes:
        gpus: How many of `gpu_resource`.
        devices: Other resources by the site's own names: `rdma/ib`.
        shm_bytes: Of /dev/shm; it counts as memory of the pod. None for half of the memory.
        scratch_bytes: Of the node's disk, request and limit; None for no limit.
        has_least: It asks for a little processor, memory and disk by default, where no queue counts them.
    """

    cpus: int | None = None
    memory_bytes: int | None = None
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    devices: Mapping[str, int] = field(default_factory=dict)
    shm_bytes: int | None = None
    scratch_bytes: int | None = None
    has_least: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlace:
    """Where pods may run, and as whom.

    Attributes:
        tolerations: As Kubernetes writes them; GPU nodes are tolerated anyhow.
        pull_policy: None for Kubernetes' own: always for `:latest`, else if the node lacks it.
        restricted: Fit the pods to the Pod Security level `restricted`.
        user: The uid; None for that of the image, 1000 where the level forbids root.
        gang: Whose way of starting all pods or none: `volcano`, `kai` or `native`; Kueue needs none.
        topology: A level of Kueue's topology that all pods are to share.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsRequest:
    """One run, complete.

    Attributes:
        name: Of all its objects.
        num_pods: How many run at the same time, spare ones among them; of members of a sweep how many there are.
        parallel: Each pod is a member of a sweep, and so many run at a time; None: all are one run.
        command: Of each pod, in exec form: process 1 gets SIGTERM.
        files: What it brings along, by file name: the key and the plan; those of a further parcel by `NUMBER/NAME`.
        namespace: Where they are made, as far as it is known.
        shares: The run whose Secrets these pods see; they have none of their own then.
        service: By whose names pods are known, where that is not a Service of this run alone.
        first_index: The number of the first pod among those of all runs that share a Secret.
        annotations: Of the Job and its pods.
        queue: A LocalQueue of Kueue.
        queue_priority: A WorkloadPriorityClass of Kueue.
        keep_s: How long the ended Job stays.
        patches: Places in the Job's manifest with their values; the site has the last word.
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
    resources: PodResources = PodResources()
    place: PodPlace = PodPlace()
    claims: tuple[Claim, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    queue: str | None = None
    queue_priority: str | None = None
    grace_s: int = 120
    time_limit_s: int | None = None
    keep_s: int = 86400
    patches: tuple[tuple[tuple[str, ...], Any], ...] = ()
