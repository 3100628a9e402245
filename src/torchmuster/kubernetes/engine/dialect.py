"""The dialect of Kubernetes: a job is an Indexed Job, its script a manifest, kubectl its client.

The id of a job is CONTEXT/NAMESPACE/NAME, so that each command finds its cluster. Source: answers
of a real control plane (recorded in the tests), and the reference of kubectl 1.31 to 1.37.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.core.model.links import ResubmitMethod
from torchmuster.core.model.verdict import Report
from torchmuster.kubernetes.engine import manifest
from torchmuster.kubernetes.engine.answers import (
    BEING_CREATED,
    CONTEXT_ANNOTATION,
    RUN_LABEL,
    PodsOfRun,
    queue_reasons,
    read_objects,
    runs_of,
    view_of,
    views_of_elements,
    warnings_of,
)
from torchmuster.launcher.engines import base
from torchmuster.launcher.engines.base import EngineError, NodeStart
from torchmuster.launcher.engines.wait_reasons import read_scheduler_texts
from torchmuster.launcher.model.job import Allocation, JobRequest, JobView

# Kubernetes' reasons in sentences: why pods wait, what can't heal, why kubectl refuses a command.
#
# Source: kubernetes pkg/kubelet/images/types.go, pkg/kubelet/container/sync_result.go,
# pkg/apis/core/types.go (1.31 to 1.36), Kueue 0.19; those marked "recorded" come from a real
# control plane.


REASONS, REFUSALS = read_scheduler_texts(
    os.path.join(os.path.dirname(__file__), "kubernetes.txt"),
    "{}(?![A-Za-z])",
    capacity_argv=lambda job_id: [],
    shortage=lambda answers: None,
    parts_wait=True,
)

_FORBIDDEN = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<kind>[\w./-]+)" in API group "(?P<group>[\w.-]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?'
)


def missing_rule(report: Report, stderr: str) -> Report:
    """Add to the report on a refusal the lines that the user's Role lacks, if they are named."""
    found = list(_FORBIDDEN.finditer(stderr))
    rules = [
        f'{{apiGroups: ["{one["group"]}"], resources: ["{one["kind"]}"], verbs: ["{one["verb"]}"]}}'
        for one in found
    ]
    if not rules:
        return report
    words = " and ".join(dict.fromkeys(rules))
    names = {one["namespace"] for one in found if one["namespace"]}
    # A namespace that does not exist is also reported as forbidden.
    where = f" {names.pop()}, if that is its name," if len(names) == 1 else ""
    return replace(
        report,
        hint=f"the Role of the namespace{where} lacks {words}; docs/kubernetes.md has it whole",
    )


JOBSETS = "jobsets.jobset.x-k8s.io"
_JOBS = ("Job", "JobSet")
_TIMEOUT = "--request-timeout=20s"
# Kueue may not offer this, or not to every user: then the position in the queue is unknown.
_WHO_WAITS = "/apis/visibility.kueue.x-k8s.io/v1beta1/namespaces/{namespace}/localqueues/{queue}/pendingworkloads"
_OF_OBJECT = re.compile(r"error when creating \"[^\"]*\": |error validating \"[^\"]*\": ")
_ADVICE = re.compile(r"; if you choose to ignore these errors, turn validation off with \S+")


def kubectl(context: str, namespace: str, *words: str) -> list[str]:
    """Return a kubectl command with explicit context and namespace: the current ones may change."""
    place = [f"--context={context}"] if context else []
    return ["kubectl", *place, f"--namespace={namespace}", _TIMEOUT, *words]


def job_id_of(context: str, namespace: str, name: str) -> str:
    """Return the id of a job; only a context may contain slashes and colons."""
    return f"{context}/{namespace}/{name}"


def place_of(job_id: str) -> tuple[str, str, str]:
    """Return context, namespace and name from a job id.

    Raises:
        EngineError: It is not a job id.
    """
    parts = job_id.rsplit("/", 2)
    if len(parts) != 3 or not parts[2]:
        raise EngineError(f"`{job_id}` is not CONTEXT/NAMESPACE/NAME of a Job")
    return parts[0], parts[1], parts[2]


def kubectl_for(job_id: str, *words: str) -> list[str]:
    """Return a kubectl command in the context and namespace of a job."""
    return kubectl(*place_of(job_id)[:2], *words)


def name_of(run: str, num_pods: int, more: str = "") -> str:
    """Return a name for a run's objects, with `more`, that fits into each pod's host name."""
    room = manifest.MAX_HOST_NAME - len(f"{more}-{num_pods - 1}")
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".rstrip("-")
    # The end of the name distinguishes runs of one script.
    return (
        plain if len(plain) <= room else f"{plain[: room - 8].rstrip('-')}-{plain[-7:].lstrip('-')}"
    )


class KubernetesDialect:
    """Kubernetes' manifests, kubectl command lines and answers."""

    name = "kubernetes"
    resubmit_methods: tuple[
        ResubmitMethod, ...
    ] = ()  # the Job itself replaces pods that are taken away
    wait_reasons = REASONS
    array_variable = "JOB_COMPLETION_INDEX"

    def script(self, job: JobRequest) -> str:
        """Return the manifest with empty Secrets."""
        return self.with_files(job, {name: b"" for name, _ in job.brings})

    def with_files(self, job: JobRequest, files: Mapping[str, bytes]) -> str:
        """Return the manifest with the contents of the Secrets, which include the run's key."""
        if len(job.chunks) > 1:
            kinds = manifest.sets_of(job, files)
            named = [(manifest.kind_name(number), kind) for number, kind in enumerate(kinds)]
            objects = manifest.objects_of_set(job.name, named)
        else:
            objects = manifest.objects_of(manifest.pods_of(job, files))
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1) + "\n"

    def submit_argv(self, job: JobRequest, script_path: str) -> list[str]:
        """Return the command that creates the objects."""
        operand = base.as_operand(script_path)
        return kubectl(*self._place(job), "create", "-f", operand, "-o", "json")

    def job_id(self, stdout: str) -> str:
        """Return the id of the created Job; for a JobSet that of its first Job."""
        job = _job_among(stdout)
        metadata = job["metadata"]
        context = metadata.get("annotations", {}).get(CONTEXT_ANNOTATION, "")
        name = metadata["name"]
        if job["kind"] == "JobSet":
            name = manifest.name_in_set(name, 0)
        return job_id_of(context, metadata.get("namespace", "default"), name)

    def settle_argv(self, job: JobRequest, stdout: str | None) -> list[list[str]]:
        """Return the commands after a submission.

        After a success the Job comes to own the other objects; after a failure all objects are
        removed.
        """
        context, namespace = self._place(job)
        if stdout is None:
            whole = job_id_of(context, namespace, job.name)
            is_set = len(job.chunks) > 1
            return [self.remove_set_argv(whole) if is_set else self.cancel_argv(whole)]
        made = _job_among(stdout)
        patch = json.dumps(manifest.owned_by(made))
        names = [
            f"{one['kind'].lower()}/{one['metadata']['name']}"
            for one in read_objects(stdout)
            if one.get("kind") not in (*_JOBS, None)
        ]
        words = ("patch", *names, "--type=merge", "-p", patch)
        return [kubectl(context, namespace, *words)]

    def apart(self, job_id: str) -> str:
        """Return what jobs must share to be queried together: context and namespace."""
        return "/".join(place_of(job_id)[:2])

    def status_argv(self, job_ids: Sequence[str]) -> list[list[str]]:
        """Return the one command that queries all these jobs, which share a namespace."""
        if not job_ids:
            return []
        names = ",".join(sorted({place_of(job_id)[2] for job_id in job_ids}))
        words = ("get", "jobs.batch,pods", "-l", f"{RUN_LABEL} in ({names})", "-o", "json")
        return [kubectl_for(job_ids[0], *words)]

    def more_argv(self, argv: Sequence[str], stdout: str) -> list[list[str]]:
        """Return the further queries that a status answer calls for, e.g. why pods are missing."""
        runs = list(runs_of(read_objects(stdout)).values())
        begin = list(argv[: list(argv).index("get")])
        asks: list[list[str]] = []
        if any(run.is_there and _says_no_more(run) for run in runs):
            asks.append([*begin, "get", "events", "--field-selector=type=Warning", "-o", "json"])
        held = [run.uid for run in runs if "Suspended" in run.conditions]
        if held:
            selector = f"kueue.x-k8s.io/job-uid in ({','.join(held)})"
            kind = "workloads.kueue.x-k8s.io"
            asks.append([*begin, "get", kind, "-l", selector, "-o", "json"])
        asks += [
            [*begin, "get", "--raw", _WHO_WAITS.format(namespace=namespace, queue=queue)]
            for namespace, queue in _queues_of(runs)
        ]
        return asks

    def views(self, stdout: str) -> dict[str, JobView]:
        """Return the states of the jobs from all answers, concatenated."""
        objects = read_objects(stdout)
        queues = queue_reasons(objects)
        found: dict[str, JobView] = {}
        for run in runs_of(objects).values():
            warnings = warnings_of(objects, [run.run, *(pod.name for pod in run.pods)])
            job_id = job_id_of(run.context, run.namespace, run.run)
            found[job_id] = view_of(run, warnings, queues.get(run.uid), job_id)
        return found

    def element_id(self, job_id: str, position: int) -> str:
        """Return a name for one index; to cancel it, its owner is asked to end (see below).

        See `kubernetes/pods/members.py`.
        """
        return f"{job_id}[{position}]"

    def array_key(self, job_id: str) -> str:
        """Return the id: each Job is queried in its own context and namespace."""
        return job_id

    def array_limit_argv(self) -> list[str]:
        """Raise: the number of a Job's indexes is not limited."""
        raise EngineError("a Job's number of indexes is not limited")

    def array_limit(self, stdout: str) -> int | None:
        """Return None, see `array_limit_argv`."""
        return None

    def array_status_argv(self, job_ids: Sequence[str]) -> list[list[str]]:
        """Return the command that queries the Jobs and their pods."""
        return self.status_argv(job_ids)

    def array_views(self, stdout: str) -> dict[tuple[str, int], JobView]:
        """Return the state of each index of the Jobs."""
        found: dict[tuple[str, int], JobView] = {}
        objects = read_objects(stdout)
        for run in runs_of(objects).values():
            job_id = job_id_of(run.context, run.namespace, run.run)
            views = views_of_elements(objects, run.run)
            found |= {(job_id, index): view for index, view in views.items()}
        return found

    def cancel_argv(self, job_id: str) -> list[str]:
        """Return the command that removes all objects of a run; pods get SIGTERM and a grace."""
        name = place_of(job_id)[2]
        return _delete(job_id, f"jobs.batch/{name}", f"services/{name}")

    def remove_set_argv(self, set_id: str) -> list[str]:
        """Return the command that removes a JobSet with all its objects."""
        return _delete(set_id, f"{JOBSETS}/{place_of(set_id)[2]}")

    def requeue_argv(self, job_id: str) -> list[str]:
        """Raise: a Job replaces its pods by itself."""
        raise EngineError("a Job of Kubernetes is not started again")

    def end_argv(self, job_id: str) -> list[list[str]]:
        """Return nothing: the run watches its own time."""
        return []

    def job_end(self, stdout: str, now: float) -> float | None:
        """Return None, see `end_argv`."""
        return None

    def node_argv(self, start: NodeStart) -> list[str]:
        """Raise: agents are started through the pods' pod servers (`kubernetes/node`)."""
        raise EngineError("a pod is not a node of an allocation")

    def allocation(
        self, environment: Mapping[str, str], read: Callable[[str], str]
    ) -> Allocation | None:
        """Return None: a user's own pod is no allocation; `muster torchrun` works there."""
        return None

    def unmapped(self, job: JobRequest) -> list[str]:
        """Return the settings that pods can't express."""
        found = []
        if job.account is not None:
            found.append("account: Kubernetes has none: a namespace or a queue stands for it")
        if any(key != "image" for chunk in job.chunks for key, _ in chunk.extra):
            found.append("chunk: pods take `devices`, `node_selector` and `directives` instead")
        return found

    def explain_refusal(self, stderr: str) -> Report:
        """Return a report on what kubectl or the cluster refused."""
        # Up to five lines about a discovery cache may precede the one that matters.
        telling = "\n".join(line for line in stderr.splitlines() if "memcache.go" not in line)
        # Several objects may have the same problem; drop kubectl's advice to turn validation off.
        telling = _ADVICE.sub("", _OF_OBJECT.sub("", telling))
        report = base.explain(telling or stderr, "kubectl", REFUSALS)
        return missing_rule(report, telling)

    @staticmethod
    def _place(job: JobRequest) -> tuple[str, str]:
        keys = dict(job.own_keys)
        return keys.get("context", ""), keys.get("namespace", "default")


def _delete(job_id: str, *objects: str) -> list[str]:
    """Return the command that removes these objects and the Secrets of a run."""
    # By name: a label selector would need permission to list them.
    secrets = (f"secrets/{secret}" for secret in manifest.secret_names(place_of(job_id)[2]))
    return kubectl_for(job_id, "delete", *objects, *secrets, "--wait=false", "--ignore-not-found")


def _says_no_more(run: PodsOfRun) -> bool:
    """Say whether pods are missing and only events can say why."""
    reason = view_of(run).reason
    return run.lacks_pods if reason is None else reason.startswith(BEING_CREATED)


def _queues_of(runs: Sequence[PodsOfRun]) -> list[tuple[str, str]]:
    """Return the queues in which some of these runs wait, with their namespaces."""
    queues = ((run.namespace, run.queue) for run in runs if "Suspended" in run.conditions)
    return [(namespace, queue) for namespace, queue in dict.fromkeys(queues) if queue is not None]


def _job_among(stdout: str) -> dict[str, Any]:
    found = next((one for one in read_objects(stdout) if one.get("kind") in _JOBS), None)
    if found is None:
        raise EngineError("kubectl gave no job id: it made no Job", where="kubectl create -o json")
    return found


DIALECT = KubernetesDialect()
