"""What kubectl reports about a run's Job, pods, events and position in a queue, as values.

Observed with Kubernetes 1.36 and Kueue 0.13 and 0.19; a test holds each recorded answer. Trust
deletionTimestamp, not the phase: a pod on a dead node stays Running for ever. A Job's `active`
includes waiting pods, so pods are counted here.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.model.codec import moment_of
from torchmuster.core.model.ranks import compress_ranks
from torchmuster.kubernetes.node.order import FINAL_CODE
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.model.job import JobState, JobView

CONTAINER = "node"  # our container in each pod; a mesh may add others
RUN_LABEL = "torchmuster.dev/run"
MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "torchmuster"  # on all objects
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
CONTEXT_ANNOTATION = "torchmuster.dev/context"
RUN_ID_ANNOTATION = "torchmuster.dev/run-id"
_POD_OF_EVENT = re.compile(r'pods "[^"]*" ')
# Events that say more than a pod's own status while its container is being created.
BEING_CREATED = "ContainerCreating"
_OF_PREPARED = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
_ENDS = {0: JobState.SUCCEEDED, FINAL_CODE: JobState.FAILED}
_HEAD = 0  # the index of the pod whose success is the run's


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReason:
    """A reason of Kubernetes (one word) with its message."""

    word: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.message}" if self.message else self.word


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnd:
    """How a pod's container ended.

    Attributes:
        reason: `Error`, `OOMKilled`, `StartError`; or for the whole pod `Evicted`,
            `DeadlineExceeded`, with the message.
        last_message: The owner's last report on the run, from the first pod: JSON, at most 4,096
            bytes.
        ended_at: In seconds since 1970, by the node's clock; None if the end was not observed.
    """

    exit_code: int | None
    reason: ClusterReason
    last_message: str = ""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod of a run.

    Attributes:
        index: Its place; a replacement pod has the same index and another uid.
        node: The host it is on; None before it has one.
        is_leaving: It has been deleted; on a dead host it stays in this state for ever.
        waits: Why it does not run yet.
        disruption: Why the cluster takes it away, e.g. `EvictionByEvictionAPI`; None if it doesn't,
            or if a user deleted the pod.
        memory_limit: As in its manifest, e.g. `400Gi`; None if there is none.
        others: The containers that the cluster added, e.g. a mesh's proxy.
        made_at: In seconds since 1970, by the cluster's clock; None if it can't be read.
    """

    name: str
    uid: str
    index: int
    node: str | None = None
    is_running: bool = False
    is_leaving: bool = False
    waits: ClusterReason | None = None
    disruption: ClusterReason | None = None
    end: PodEnd | None = None
    memory_limit: str | None = None
    others: tuple[str, ...] = ()
    made_at: float | None = None

    @property
    def is_up(self) -> bool:
        """Say whether its container is running and the pod is not being deleted."""
        return self.is_running and not self.is_leaving

    @property
    def has_succeeded(self) -> bool:
        """Say whether its container exited with code 0."""
        return self.end is not None and self.end.exit_code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsOfRun:
    """A run's Job and pods, as of one answer.

    Attributes:
        uid: The uid by which a queue knows it: the Job's, or that of the JobSet it belongs to.
        num_pods: The number of pods there should be.
        context: The client's name for the cluster, from the objects' annotations.
        queue: The LocalQueue of Kueue that is named by the Job, or by its JobSet.
        conditions: The true conditions of the Job: the reason by the condition's type.
        is_there: The Job exists; pods may outlive it by their grace period.
    """

    run: str
    uid: str = ""
    context: str = ""
    namespace: str = "default"
    num_pods: int = 0
    queue: str | None = None
    is_there: bool = False
    is_leaving: bool = False
    conditions: Mapping[str, ClusterReason] = field(default_factory=dict)
    pods: tuple[Pod, ...] = ()

    @property
    def lacks_pods(self) -> bool:
        """Say whether some of its pods have not been created."""
        return len(self.newest()) < self.num_pods

    def newest(self) -> dict[int, Pod]:
        """Return the current pod of each place: prefer one that is neither leaving nor ended."""
        found: dict[int, Pod] = {}
        for pod in self.pods:  # in order of creation
            known = found.get(pod.index)
            if known is None or known.is_leaving or known.end is not None or not pod.is_leaving:
                found[pod.index] = pod
        return found


def read_objects(stdout: str) -> list[dict[str, Any]]:
    """Return the objects of an answer: one object, a List, or the several documents of `create`.

    Raises:
        EngineError: The answer is not JSON.
    """
    decoder, found, position = json.JSONDecoder(), [], 0
    text = stdout.strip()
    try:
        while position < len(text):
            value, position = decoder.raw_decode(text, position)
            found += value.get("items", [value])
            while position < len(text) and text[position].isspace():
                position += 1
    except (ValueError, AttributeError, RecursionError) as error:
        raise EngineError(
            "the answer of kubectl can't be read", where="kubectl -o json", why=str(error)
        ) from error
    return [one for one in found if isinstance(one, dict)]


def runs_of(objects: Iterable[Mapping[str, Any]]) -> dict[str, PodsOfRun]:
    """Return what an answer to `get jobs.batch,pods` reports on each run, by the run's name."""
    jobs: dict[str, Mapping[str, Any]] = {}
    pods: dict[str, list[tuple[str, Pod]]] = {}
    some: dict[str, Mapping[str, Any]] = {}
    for one in objects:
        metadata = one.get("metadata", {})
        run = metadata.get("labels", {}).get(RUN_LABEL)
        if run is None:
            continue
        some[run] = metadata
        if one.get("kind") == "Job":
            jobs[run] = one
        elif one.get("kind") == "Pod":
            pods.setdefault(run, []).append((str(metadata.get("creationTimestamp")), _pod(one)))
    return {run: _run(run, jobs.get(run), pods.get(run, ()), some[run]) for run in {**jobs, **pods}}


def _run(
    run: str,
    job: Mapping[str, Any] | None,
    pods: Sequence[tuple[str, Pod]],
    metadata: Mapping[str, Any],
) -> PodsOfRun:
    in_order = tuple(pod for _, pod in sorted(pods, key=lambda one: one[0]))
    context = metadata.get("annotations", {}).get(CONTEXT_ANNOTATION, "")
    namespace = metadata.get("namespace", "default")
    if job is None:
        return PodsOfRun(run=run, pods=in_order, context=context, namespace=namespace)
    named = {**job["metadata"].get("annotations", {}), **job["metadata"].get("labels", {})}
    return PodsOfRun(
        run=run,
        context=context,
        namespace=namespace,
        uid=_uid_for_queues(job["metadata"]),
        num_pods=job["spec"].get("completions", 0),
        queue=named.get(QUEUE_LABEL),
        is_there=True,
        is_leaving="deletionTimestamp" in job["metadata"],
        conditions={name: why for name, (is_true, why) in _conditions(job).items() if is_true},
        pods=in_order,
    )


def _uid_for_queues(metadata: Mapping[str, Any]) -> str:
    owners = (one for one in metadata.get("ownerReferences", ()) if one.get("kind") == "JobSet")
    return str(next(owners, metadata).get("uid", ""))


def _pod(one: Mapping[str, Any]) -> Pod:
    metadata, status = one["metadata"], one.get("status", {})
    statuses = status.get("containerStatuses", ())
    ours = (container for container in statuses if container.get("name", CONTAINER) == CONTAINER)
    mine: Mapping[str, Any] = next(ours, {})
    state = mine.get("state", {})
    conditions = _conditions(one)
    waits = _pull_cause(_reason(state["waiting"])) if "waiting" in state else None
    if waits is None and conditions.get("PodScheduled", (True, None))[0] is False:
        waits = conditions["PodScheduled"][1]
    disrupted, why = conditions.get("DisruptionTarget", (False, None))
    return Pod(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        index=int(metadata.get("labels", {}).get(INDEX_LABEL, 0)),
        node=one.get("spec", {}).get("nodeName"),
        is_running="running" in state,
        is_leaving="deletionTimestamp" in metadata,
        waits=waits,
        disruption=why if disrupted else None,
        end=_end(state.get("terminated"), status),
        memory_limit=_memory_limit(one.get("spec", {})),
        others=_others(one.get("spec", {})),
        made_at=moment_of(metadata.get("creationTimestamp")),
    )


def _others(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the containers next to ours; since 1.28 sidecars may be among the init containers."""
    stay = (one for one in spec.get("initContainers", ()) if one.get("restartPolicy") == "Always")
    names = (str(one.get("name", CONTAINER)) for one in (*spec.get("containers", ()), *stay))
    return tuple(name for name in names if name != CONTAINER)


def _memory_limit(spec: Mapping[str, Any]) -> str | None:
    of_spec = (one for one in spec.get("containers", ()) if one.get("name", CONTAINER) == CONTAINER)
    ours: Mapping[str, Any] = next(of_spec, {})
    limit = ours.get("resources", {}).get("limits", {}).get("memory")
    return str(limit) if limit is not None else None


def _pull_cause(reason: ClusterReason) -> ClusterReason:
    """Return the cause of a pull that is being retried.

    The reason alternates between two words; the message of `ImagePullBackOff` repeats the cause.
    """
    _, found, cause = reason.message.partition(": ErrImagePull: ")
    if reason.word == "ImagePullBackOff" and found:
        return ClusterReason(word="ErrImagePull", message=cause)
    return reason


def _end(ended: Mapping[str, Any] | None, status: Mapping[str, Any]) -> PodEnd | None:
    of_pod = _reason(status) if status.get("reason") else None
    if ended is None:
        # The pod was evicted before its container started.
        return (
            PodEnd(exit_code=None, reason=of_pod)
            if of_pod and status.get("phase") == "Failed"
            else None
        )
    own, left = _reason(ended), ended.get("message", "")
    if left.startswith("{"):
        own = ClusterReason(word=own.word)
    else:
        left = ""
    return PodEnd(
        exit_code=ended.get("exitCode"),
        reason=of_pod or own,
        last_message=left,
        ended_at=moment_of(ended.get("finishedAt")),
    )


def _conditions(one: Mapping[str, Any]) -> dict[str, tuple[bool, ClusterReason]]:
    """Return the conditions of an object by type: whether each is true, and its reason."""
    found = one.get("status", {}).get("conditions", ())
    return {each["type"]: (each.get("status") == "True", _reason(each)) for each in found}


def _reason(plain: Mapping[str, Any]) -> ClusterReason:
    return ClusterReason(
        word=plain.get("reason", ""), message=" ".join(plain.get("message", "").split())
    )


def warnings_of(
    objects: Iterable[Mapping[str, Any]], names: Iterable[str]
) -> tuple[ClusterReason, ...]:
    """Return the warnings in events about the objects with these names, once each, newest last.

    Only these say that a quota or a policy keeps pods from being created.
    """
    about = set(names)
    found: dict[ClusterReason, None] = {}
    for one in sorted(objects, key=lambda one: str(one.get("lastTimestamp") or "")):
        if one.get("type") == "Warning" and one.get("involvedObject", {}).get("name") in about:
            reason = _reason(one)
            # A retried pod has another name each time.
            plain = _POD_OF_EVENT.sub("pods ", reason.message)
            reason = ClusterReason(word=reason.word, message=plain)
            found.pop(reason, None)
            found[reason] = None
    return tuple(found)


def queue_reasons(objects: Sequence[Mapping[str, Any]]) -> dict[str, ClusterReason]:
    """Return why Kueue does not admit Jobs, by the Job's uid: from Workloads and pending workloads.

    For an evicted Job, the reason and message of the eviction come first.
    """
    before = dict(_places_in_queues(objects))
    found: dict[str, ClusterReason] = {}
    for one in objects:
        uid = one.get("metadata", {}).get("labels", {}).get(JOB_UID_LABEL)
        if uid is None:
            continue
        known = _conditions(one)
        has_quota, reason = known.get("QuotaReserved", (True, ClusterReason(word="")))
        is_evicted, evicted = known.get("Evicted", (False, reason))
        if has_quota and not is_evicted:
            continue
        said = [reason.message] if not has_quota else []
        if is_evicted:
            said = [evicted.message, *said]
        if uid in before:
            said.append(before[uid])
        word = evicted.word if is_evicted else reason.word
        found[uid] = ClusterReason(word=word, message="; ".join(dict.fromkeys(said)))
    return found


def _places_in_queues(objects: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the uid of each Job that Kueue lists as waiting, and how many Jobs are ahead of it."""
    for one in objects:
        before = one.get("positionInClusterQueue")
        owners = one.get("metadata", {}).get("ownerReferences", ()) if before is not None else ()
        for owner in owners:
            yield owner["uid"], f"{before} before it in the queue" if before else "it is the next"


def view_of(
    run: PodsOfRun,
    warnings: Sequence[ClusterReason] = (),
    queue: ClusterReason | None = None,
    job_id: str | None = None,
) -> JobView:
    """Return the state of a run's Job, with Kubernetes' own message where it waits or has failed.

    Args:
        run: The Job and its pods.
        warnings: From events about the Job, the newest last.
        queue: Why Kueue does not admit it.
        job_id: The id of the job; None for its name.
    """
    newest = run.newest()
    state, reason = _state(run, newest, warnings, queue)
    head = newest.get(_HEAD)
    code = head.end.exit_code if head is not None and head.end is not None else None
    hosts = (newest[index].node for index in sorted(newest))
    return JobView(
        job_id=run.run if job_id is None else job_id,
        state=state,
        reason=str(reason) if reason is not None else None,
        exit_code=code if state.is_final else None,
        nodes=tuple(dict.fromkeys(host for host in hosts if host)),
    )


def _state(
    run: PodsOfRun,
    newest: Mapping[int, Pod],
    warnings: Sequence[ClusterReason],
    queue: ClusterReason | None,
) -> tuple[JobState, ClusterReason | None]:
    ended = run.conditions.get("Failed") or run.conditions.get("FailureTarget")
    if "Complete" in run.conditions or "SuccessCriteriaMet" in run.conditions:
        return JobState.SUCCEEDED, None
    if ended is not None:
        is_late = ended.word == "DeadlineExceeded"
        return JobState.TIMED_OUT if is_late else JobState.FAILED, _why_failed(run) or ended
    if not run.is_there or run.is_leaving:
        return (JobState.ENDING if newest else JobState.CANCELLED), None
    if "Suspended" in run.conditions:
        return JobState.HELD, queue or run.conditions["Suspended"]
    head = newest.get(_HEAD)
    if (sidecar_state := _ended_next_to_sidecar(head)) is not None:
        return sidecar_state, None
    if head is not None and head.end is not None and head.end.exit_code in (0, FINAL_CODE):
        # The Job reports its end in a moment; pods that never came may be the reason.
        has_failed = head.end.exit_code == FINAL_CODE
        return JobState.ENDING, _why_missing(run, newest, warnings) if has_failed else None
    up = [index for index, pod in newest.items() if pod.is_up]
    if len(up) == run.num_pods:
        return JobState.RUNNING, None
    done = [index for index, pod in newest.items() if pod.has_succeeded]
    if _HEAD in up and len(up) + len(done) == run.num_pods:
        ends = [pod.end.ended_at or 0.0 for pod in newest.values() if pod.end is not None]
        is_new = (newest[_HEAD].made_at or 0.0) > max(ends) + _CLOCKS_S
        return JobState.RUNNING, ClusterReason(word=LOST_AT_END if is_new else WAITS_FOR_CLIENT)
    state = JobState.RUNNING if _HEAD in up else JobState.PENDING
    return state, _why_missing(run, newest, warnings)


_CLOCKS_S = 5.0  # by which the clocks of two nodes may differ
LOST_AT_END = "the run had ended when its first pod was lost, which is made again in vain"
WAITS_FOR_CLIENT = (
    "the run has ended, and its first pod waits for a client that takes what it has made"
)


def _ended_next_to_sidecar(head: Pod | None) -> JobState | None:
    """Return how a run ended whose first pod keeps running because of another container."""
    if head is None or not head.others or head.end is None:
        return None
    return _ENDS.get(head.end.exit_code) if head.end.exit_code is not None else None


def _why_failed(run: PodsOfRun) -> ClusterReason | None:
    """Return the end of the pod that ended the Job, if it says more than an exit code."""
    ends = [pod.end.reason for pod in run.pods if pod.end is not None]
    return next((reason for reason in ends if reason.word not in ("Error", "Completed")), None)


def _why_missing(
    run: PodsOfRun, newest: Mapping[int, Pod], warnings: Sequence[ClusterReason]
) -> ClusterReason | None:
    """Return why pods are missing: what one waits for, what ended it, or why none is made."""
    missing = [newest.get(index) for index in range(run.num_pods)]
    there = [pod for pod in missing if pod is not None and not pod.is_up]
    waiting = [(pod.index, pod.waits) for pod in there if pod.waits is not None]
    if waiting:
        reason = waiting[0][1]
        of_node = [one for one in warnings if one.word in _OF_PREPARED]
        if reason.word == BEING_CREATED and of_node:
            reason = of_node[-1]
        return _with_count([index for index, _ in waiting], reason, run.num_pods)
    if len(there) < missing.count(None) and warnings:
        return warnings[-1]
    gone = [(pod.index, why) for pod in there if (why := why_gone(pod)) is not None]
    if gone:
        return _with_count([index for index, _ in gone], gone[0][1], run.num_pods)
    return warnings[-1] if warnings and None in missing else None


def why_gone(pod: Pod) -> ClusterReason | None:
    """Return what took a pod away; else how it ended, unless it left a run's last message."""
    if pod.disruption is not None or pod.end is None:
        return pod.disruption
    if pod.end.last_message:
        return None
    if pod.end.reason != ClusterReason(word="Error"):
        return pod.end.reason
    return ClusterReason(word=pod.end.reason.word, message=f"exit code {pod.end.exit_code}")


def _with_count(indices: Sequence[int], reason: ClusterReason, num_pods: int) -> ClusterReason:
    if len(set(indices)) == num_pods:
        return reason
    which = f"(pod {compress_ranks(sorted(set(indices)))})"
    if not reason.message:
        return ClusterReason(word=f"{reason.word} {which}")
    return ClusterReason(word=reason.word, message=f"{reason.message} {which}")


# A Job whose indexes are sweep members, each a separate run: the state of each.


def views_of_elements(objects: Sequence[Mapping[str, Any]], name: str) -> dict[int, JobView]:
    """Return the state of each index of a Job, from an answer to `get jobs.batch,pods`."""
    run = runs_of(objects).get(name)
    if run is None:
        return {}
    status: dict[str, Any] = {}
    for one in objects:
        if one.get("kind") == "Job" and one["metadata"]["labels"].get(RUN_LABEL) == name:
            status = one.get("status", {})
    done, failed = _indexes(status.get("completedIndexes")), _indexes(status.get("failedIndexes"))
    newest = run.newest()
    views: dict[int, JobView] = {}
    for index in range(run.num_pods) if run.is_there else newest:
        pod = newest.get(index)
        state = JobState.SUCCEEDED if index in done else JobState.FAILED
        if index not in done | failed:
            state = _state_of_member(run, pod)
        views[index] = _view_of_member(run, pod, state)
    return views


def _indexes(text: str | None) -> frozenset[int]:
    """Return the numbers of `0,2-4`."""
    found: set[int] = set()
    for word in filter(None, (text or "").split(",")):
        first, _, last = word.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _state_of_member(run: PodsOfRun, pod: Pod | None) -> JobState:
    """Return the state of an unfinished index by its newest pod, which is replaced if lost."""
    if pod is not None and pod.is_up:
        return JobState.RUNNING
    if not run.is_there or run.is_leaving:
        return JobState.CANCELLED
    code = pod.end.exit_code if pod is not None and pod.end is not None else None
    if code in _ENDS:
        return _ENDS[code]
    return JobState.HELD if "Suspended" in run.conditions else JobState.PENDING


def _view_of_member(run: PodsOfRun, pod: Pod | None, state: JobState) -> JobView:
    reason = None
    if state is JobState.HELD:
        reason = run.conditions["Suspended"]
    elif state in (JobState.PENDING, JobState.FAILED) and pod is not None:
        reason = pod.waits or why_gone(pod)
    return JobView(
        job_id=run.run,
        state=state,
        reason=str(reason) if reason is not None else None,
        exit_code=pod.end.exit_code if pod is not None and pod.end is not None else None,
        nodes=(pod.node,) if pod is not None and pod.node is not None else (),
    )


# Which NetworkPolicies select a pod: what an answer of the API proves, and no more.
#
# Whether a policy's rules allow a connection is up to the cluster's network, which may even ignore
# them. Source: networking.k8s.io/v1, and the label selectors of meta/v1.


def policies_on(
    policies: Iterable[Mapping[str, Any]], labels: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the policies that select a pod with these labels, as `NAME (Ingress, Egress)`."""
    found = []
    for one in policies:
        spec = one.get("spec", {})
        if _selects(spec.get("podSelector", {}), labels):
            default = ["Ingress", *(["Egress"] if spec.get("egress") else [])]
            types = ", ".join(spec.get("policyTypes") or default)
            found.append(f"{one['metadata']['name']} ({types})")
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
