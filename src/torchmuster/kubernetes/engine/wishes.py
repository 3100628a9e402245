"""Turns a site and a job request into pods: keys of `muster.toml` become values of the manifest."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchmuster.core.model.text import did_you_mean
from torchmuster.core.spec.problems import duration_fix, parse_size, parse_timeout
from torchmuster.errors import UsageError
from torchmuster.kubernetes.engine.answers import CONTEXT_ANNOTATION, RUN_ID_ANNOTATION
from torchmuster.kubernetes.engine.manifest import (
    LEAST_MEMORY_BYTES,
    PACKAGE_FOLDER,
    SCRATCH_FOLDER,
    Claim,
    PodResources,
    PodScheduling,
    PodsRequest,
)
from torchmuster.kubernetes.node.order import DISK_BYTES_VARIABLE, MEMORY_BYTES_VARIABLE
from torchmuster.launcher.model.job import JobRequest

START = f"{PACKAGE_FOLDER}/start.py"
POD_PORT = 29417  # fixed for all pods of a run: a pod's name is known before the pod exists
TAKE_WITHIN_S = 900.0
_DEADLINE_NET_S = 900  # the run watches its own time; the Job's limit catches a run that fails to
_GRACE_S = 120
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
        resources=PodResources(
            cpus=node.cpus,
            memory_bytes=memory_bytes,
            gpus=node.gpus,
            gpu_resource=keys.get("gpu_resource", "nvidia.com/gpu"),
            devices={name: _count("devices", text) for name, text in _pairs(keys, "devices")},
            shm_bytes=_size(keys, "shm"),
            scratch_bytes=disk_bytes,
        ),
        place=PodScheduling(
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
        ),
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
        grace_s=_GRACE_S,
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
