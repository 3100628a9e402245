"""Why a run lost a pod, and what frees the place of a pod on a dead node.

A container that is killed as a whole, e.g. out of memory, can report nothing. The head sees a lost
connection, the cluster has the reason, and neither asks the other. So the client joins them, when
the record reports a loss and when a result has come.

Pod objects on dead nodes stay and keep replacements away. Such a pod is removed only if both sides
give it up: the cluster its node, and the head the pod, whose lease has run out. A pod that only the
cluster misses may still be training while its kubelet is dead. No head can speak for a first pod:
it is removed if it can't be reached from here either, and ends by itself should it come back
(`kubernetes/firstpod/conduct.py`).
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import events, verdict
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.text import few_of, name_alone, name_on, show_size
from torchmuster.core.owner.record import read_events, read_losses
from torchmuster.errors import MusterError
from torchmuster.kubernetes.engine.answers import Pod, PodEnd
from torchmuster.kubernetes.engine.dialect import REASONS, job_id_of, kubectl_for, place_of
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.pods.bring_group import pod_kinds
from torchmuster.kubernetes.pods.reach import NotAllowedError, RunInPods, ask, find_pods, forward
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.model.job import JobRequest, JobView
from torchmuster.launcher.model.run import AttemptRecord, record_of
from torchmuster.workflow import record
from torchmuster.workflow.owner.view import read_workflow

_OUT_OF_MEMORY = "OOMKilled"
_TWICE = 2
_HAS_LEFT = "has left"  # in the event of the next attempt
LOSS_KNOWN_S = 120.0  # from a loss to the cluster's reason: 46 s for a dead node
_CLOCKS_S = 5.0  # by which the clocks of two nodes may differ; a replacement pod takes 10 s
_MORE = f"{verdict.MORE_MEMORY} (`--mem`, or `memory` of the site; what is in /dev/shm counts)"


def explain_loss(result: verdict.Result, run: RunInPods) -> verdict.Result:
    """Add the cluster's reason to the result of a run that failed by the loss of a known pod."""
    cause, report = result.cause, result.report
    if report is not None and verdict.MORE_MEMORY in (report.hint or ""):
        hint = (report.hint or "").replace(verdict.MORE_MEMORY, _MORE, 1)
        return replace(result, report=replace(report, hint=hint))
    if cause is None or report is None or cause.memory_evidence is not None:
        return result
    if cause.kind is not EndKind.NODE_LOST:
        return result
    try:
        pods = find_pods(run.job_id)
    except MusterError:
        return result
    start = _start_of(run.run_dir, cause.attempt)
    pod = _lost_pod(pods, run.order, name_alone(cause.node), start)
    if pod is None:
        return result
    if pod.end is not None and pod.end.reason.word == _OUT_OF_MEMORY:
        return _out_of_memory(result, report, cause, pod, pod.end, start)
    said, hint = _said_of(pod)
    if not said:
        return result
    with_reason = replace(report, because=(said, *report.because))
    return replace(result, report=_with_hint(with_reason, hint))


def explain_group_loss(outcome: record.GroupOutcome, run: RunInPods) -> record.GroupOutcome:
    """Add the cluster's reason to the outcome if the failed task lost a pod the cluster knows."""
    report = outcome.report
    if report is None or not outcome.state.is_failed:
        return outcome
    failed = (one for one in outcome.tasks if one.state.is_failed)
    task = next(
        (one for one in failed if report.error.startswith(f"task {one.task} failed: ")), None
    )
    if task is None:
        return outcome
    begun = _last_start(run, task.task)
    try:
        pod = _last_gone(_pods_of_task(run, task.task), begun)
    except MusterError:
        return outcome
    said, hint = _said_of(pod) if pod is not None else ("", "")
    if pod is None or not said:
        return outcome
    error = report.error
    if pod.end is not None and pod.end.reason.word == _OUT_OF_MEMORY:
        error = f"task {task.task} failed: memory ran out in pod {pod.name} on {pod.node}"
    with_reason = replace(report, error=error, because=(said, *report.because))
    return replace(outcome, report=_with_hint(with_reason, hint))


def explain_task_loss(run: RunInPods, task: str, begun: float | None) -> str:
    """Return the cluster's reason for a task's lost pod; empty if it has none.

    Args:
        run: The group.
        task: The task's name.
        begun: The start of the task's attempt, in seconds since 1970; None if unknown.

    Raises:
        EngineError: The cluster can't be queried.
    """
    pod = _last_gone(_pods_of_task(run, task), begun)
    return _said_of(pod)[0] if pod is not None else ""


def _last_start(run: RunInPods, task: str) -> float | None:
    """Return when a task last started, in seconds since 1970; None if unknown."""
    begun = None
    for one in read_events(run.run_dir.group(run.order.group or "").events):
        if isinstance(one.event, record.TaskStartedEvent) and one.event.task == task:
            begun = one.at
    return begun


def _pods_of_task(run: RunInPods, task: str) -> Iterator[Pod]:
    """Yield the present and past pods of a task, in order of creation; all are of one Job."""
    places = [name.rpartition("-") for name in _hosts_of_task(run, task)]
    context, namespace, _ = place_of(run.job_id)
    for job in dict.fromkeys(job for job, _, _ in places):
        numbers = {int(number) for name, _, number in places if name == job}
        for pod in find_pods(job_id_of(context, namespace, job)):
            if pod.index in numbers:
                yield pod


def _hosts_of_task(run: RunInPods, task: str) -> list[str]:
    """Return the host names of a task's pods, without their Service."""
    plan = read_workflow(run.run_dir)
    kinds = pod_kinds(plan.group(run.order.group or "")) if plan is not None else []
    named = (name for kind in kinds for name in kind.tasks)
    hosts = (host for name, host in zip(named, run.order.hosts, strict=False) if name == task)
    return [host.partition(".")[0] for host in hosts]


def _out_of_memory(
    result: verdict.Result,
    report: verdict.Report,
    cause: WorkerEnd,
    pod: Pod,
    end: PodEnd,
    start: AttemptRecord | None,
) -> verdict.Result:
    evidence = _memory_evidence(pod, end)
    node = name_on(name_alone(cause.node), pod.node or "")
    detail = "its container was killed as a whole"
    cause = replace(cause, memory_evidence=evidence, node=node, detail=detail)
    with_reason = verdict.Report(
        error=verdict.describe_loss(cause),
        at=f"{_ranks_on(cause, start)}{node}, attempt {cause.attempt}",
        because=(evidence, *report.because),
        hint=report.hint,
        more=report.more,
    )
    return replace(result, cause=cause, report=_with_hint(with_reason, _MORE))


def early_out_of_memory(pods: Sequence[Pod]) -> verdict.Report | None:
    """Report that two pods were killed for their memory before training began.

    Nobody else reports this.
    """
    dead = [(pod, pod.end) for pod in pods if pod.end is not None]
    killed = [(pod, end) for pod, end in dead if end.reason.word == _OUT_OF_MEMORY]
    if len(killed) < _TWICE:
        return None
    pod, end = killed[-1]
    at = f"pod {pod.name} on {pod.node}"
    error = "memory ran out before the training began"
    return verdict.Report(error=error, at=at, because=(_memory_evidence(pod, end),), hint=_MORE)


def _memory_evidence(pod: Pod, end: PodEnd) -> str:
    limit = f"its limit of {_size(pod.memory_limit)}"
    if pod.memory_limit is None:
        limit = "its node had: it has no limit of its own"
    return (
        f"kubernetes says: {end.reason} (exit code {end.exit_code}) of pod {pod.name} on {pod.node}:"
        f" all its processes together used more than {limit}"
    )


def _size(words: str | None) -> str:
    return show_size(int(words)) if words is not None and words.isdecimal() else str(words)


def _said_of(pod: Pod) -> tuple[str, str]:
    """Return the cluster's reason for a pod's end, and a hint; empty without a reason."""
    if pod.end is not None and pod.end.reason.word == _OUT_OF_MEMORY:
        return _memory_evidence(pod, pod.end), _MORE
    reason = pod.disruption or (pod.end.reason if pod.end is not None else None)
    if reason is None or reason.word in ("", "Error", "Completed"):
        return "", ""
    meaning = REASONS.meaning(str(reason))
    sentence = f"{meaning.sentence} ({reason})" if meaning is not None else str(reason)
    said = f"kubernetes says of pod {pod.name} on {pod.node}: {sentence}"
    return said, meaning.hint if meaning is not None else ""


def note_removed(run_dir: RunDir, node: str, pod: Pod) -> None:
    """Save the cluster's reason for a lost pod that is being removed.

    The record mentions the loss of a first pod only when its replacement has begun.
    """
    kept = {**_removed(run_dir), node: [time.time(), _said_of(pod)[0]]}
    with contextlib.suppress(OSError):
        atomic.write_json(_removed_file(run_dir), kept)


def _removed(run_dir: RunDir) -> dict[str, list[Any]]:
    kept = atomic.read_json(_removed_file(run_dir))
    return kept if isinstance(kept, dict) else {}


def _removed_file(run_dir: RunDir) -> str:
    return os.path.join(run_dir.path, "pods", "removed.json")


def _with_hint(report: verdict.Report, hint: str) -> verdict.Report:
    return replace(report, hint="; ".join(text for text in (hint, report.hint) if text) or None)


def _lost_pod(
    pods: Iterable[Pod], order: PodOrder, node: str, start: AttemptRecord | None
) -> Pod | None:
    """Return the pod that was lost in an attempt: neither its replacement nor an earlier one.

    With an empty `node`, return the last lost pod.
    """
    of_node = (pod for pod in pods if not node or order.host(pod.index) == node)
    return _last_gone(of_node, start.began if start is not None else None)


def _last_gone(pods: Iterable[Pod], begun: float | None) -> Pod | None:
    """Return the last of these pods that has ended, or is being taken away, since a moment."""
    found = None
    for pod in pods:  # in order of creation
        ended_at = pod.end.ended_at if pod.end is not None else None
        is_earlier = begun is not None and ended_at is not None and ended_at + _CLOCKS_S < begun
        if (pod.end is not None or pod.disruption is not None) and not is_earlier:
            found = pod
    return found


def _start_of(run_dir: RunDir, attempt: int) -> AttemptRecord | None:
    """Return the record of an attempt; None if it has not come."""
    attempts = record_of(run_dir).attempts
    return next((one for one in attempts if one.number == attempt), None)


def _ranks_on(cause: WorkerEnd, attempt: AttemptRecord | None) -> str:
    """Return `ranks 4-7 of 8 on `, or an empty string if the record lacks them."""
    for node in attempt.start.nodes if attempt is not None else ():
        if attempt is not None and name_alone(node.node) == name_alone(cause.node):
            word = "rank" if node.ranks.isdecimal() else "ranks"
            return f"{word} {node.ranks} of {attempt.num_workers} on "
    return ""


@dataclass(slots=True)
class LossNotes:
    """Notes why attempts lost a pod while the cluster knows it: a running run has no verdict.

    The record belongs to the pods, so these notes are a separate file; views join both.

    Attributes:
        say: Gets a message for each note.
    """

    run: RunInPods
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _read_bytes: int = 0
    _seen: set[int] = field(default_factory=set)
    _open: dict[int, tuple[str, float]] = field(default_factory=dict)
    _reason: str | None = None

    def look(self, view: JobView | None = None) -> None:
        """Query the cluster for new losses and for those it did not know the last time.

        Args:
            view: The Job; a new reason may be that of a leaving pod, which is soon forgotten.

        Raises:
            EngineError: The cluster can't be queried.
        """
        if view is not None and view.reason != self._reason:
            self._reason = view.reason
            for leaver in find_pods(self.run.job_id) if view.reason else ():
                if leaver.is_leaving and leaver.disruption is not None:
                    note_removed(self.run.run_dir, self.run.order.host(leaver.index), leaver)
        noted = read_losses(self.run.run_dir)
        self._read(noted)
        pods = find_pods(self.run.job_id) if self._open else ()
        for attempt, (node, until) in list(self._open.items()):
            start = _start_of(self.run.run_dir, attempt)
            pod = _lost_pod(pods, self.run.order, node, start)
            said = self._said_of_removed(node, start)
            said = said or (_said_of(pod)[0] if pod is not None else "")
            if said:
                noted[str(attempt)] = said
                atomic.write_json(self.run.run_dir.losses, noted)
                self.say(f"attempt {attempt}: {said}")
            if said or self.clock() > until:
                del self._open[attempt]

    def _said_of_removed(self, node: str, start: AttemptRecord | None) -> str:
        """Return the reason that `note_removed` saved, if any, unless for an earlier attempt."""
        kept = _removed(self.run.run_dir).get(node)
        begun = start.began if start is not None else 0.0
        return str(kept[1]) if kept is not None and float(kept[0]) + _CLOCKS_S > begun else ""

    def _read(self, noted: dict[str, str]) -> None:
        """Read new losses from the record."""
        try:
            size = os.path.getsize(self.run.run_dir.events)
        except OSError:
            return
        if size < self._read_bytes:  # the record of a first pod that started from scratch
            self._seen.clear()
        if size == self._read_bytes:
            return
        self._read_bytes = size
        for attempt, node in self._losses():
            if attempt not in self._seen and str(attempt) not in noted:
                self._open[attempt] = node, self.clock() + LOSS_KNOWN_S
            self._seen.add(attempt)

    def _losses(self) -> Iterator[tuple[int, str]]:
        """Yield attempts that lost a pod, with its name; the name is empty for a drained pod.

        A drained pod is no failure. If a first pod was drained, its successor's record says so.
        """
        goes_on: int | None = None
        for attempt in record_of(self.run.run_dir).attempts:
            why, before = attempt.start.why, goes_on
            if before is not None and (not why or why.endswith(_HAS_LEFT)):
                yield before, ""
            elif before is not None and why == f"after attempt {before}":
                yield before, name_alone(self.run.order.host(self.run.order.index))
            goes_on = attempt.number if attempt.failure is None else None
            end = attempt.cause
            if end is not None and end.kind is EndKind.NODE_LOST and end.memory_evidence is None:
                yield end.attempt, name_alone(end.node)


# Pods on dead nodes, whose objects stay and keep replacements away.


_GIVEN_UP = "DeletionByTaintManager"
_ANSWER_S = 8.0


@dataclass(slots=True)
class LostPodRemover:
    """Removes those pods of a run or a workflow group that cluster and head have given up.

    Attributes:
        more: The group's other Jobs.
    """

    run: RunInPods
    say: Callable[[str], None]
    more: tuple[str, ...] = ()
    _done: set[str] = field(default_factory=set)

    def look(self, *views: JobView | None, asks: bool = False, is_known: bool = False) -> None:
        """Remove lost pods; say once what the user may not remove.

        Args:
            views: The Jobs; one that mentions a dead node may mean the first pod's.
            asks: Query the cluster in any case.
            is_known: The record here is up to date: a pod that has not joined by it does not train.
        """
        lost, joined = self._lost_names()
        asks |= is_known and len(joined) < self.run.order.num_pods
        asks |= any(_GIVEN_UP in (view.reason or "") for view in views if view is not None)
        if not lost and not asks:
            return
        for job_id in (self.run.job_id, *self.more):
            job = place_of(job_id)[2]
            for pod in find_pods(job_id):
                if pod.uid in self._done or not is_given_up(pod):
                    continue
                is_first = job_id == self.run.job_id and pod.index == self.run.order.index
                name = f"{job}-{pod.index}"
                is_lost = name in lost or (is_known and not is_first and name not in joined)
                if is_lost or (is_first and asks and not self._answers(pod)):
                    self._done.add(pod.uid)
                    self._remove(pod, job_id)

    def _answers(self, pod: Pod) -> bool:
        """Say whether a pod can be reached from here."""
        try:
            with forward(self.run.job_id, pod.name, self.run.order.port, _ANSWER_S) as way:
                return proc.ask(self.run.argv(way.port, "true"), b"", _ANSWER_S).status == 0
        except MusterError:
            return False

    def _lost_names(self) -> tuple[set[str], set[str]]:
        """Return the pods that the head has lost, and those it has now; a new head starts empty."""
        group, lost, joined = self.run.order.group, set[str](), set[str]()
        if group is not None:
            for one in read_events(self.run.run_dir.group(group).events):
                match one.event:
                    case record.AgentLostEvent(task=task):
                        lost.add(task)
                    case record.TaskStartedEvent(task=task):
                        joined.add(task)
                        lost.discard(task)
                    case record.GroupStartedEvent():
                        joined.clear()
            return self._hosts_of(lost), self._hosts_of(joined - lost)
        for one in read_events(self.run.run_dir.events):
            match one.event:
                case events.NodeLostEvent(node=node) | events.SpareLostEvent(node=node):
                    lost.add(name_alone(node))
                case events.AgentJoinedEvent(node=node):
                    joined.add(name_alone(node))
                    lost.discard(name_alone(node))
                case events.RunStartedEvent():
                    joined.clear()  # a node that died with the first pod's is not back
        return lost, joined - lost

    def _hosts_of(self, tasks: set[str]) -> set[str]:
        return {host for task in tasks for host in _hosts_of_task(self.run, task)}

    def _remove(self, pod: Pod, job_id: str) -> None:
        finalizers = json.dumps({"metadata": {"finalizers": None}})
        force = ("delete", "pod", pod.name, "--force", "--grace-period=0", "--wait=false")
        try:
            ask(kubectl_for(job_id, *force))
            # A force delete alone does not remove it: the Job's finalizer waits for a dead kubelet.
            ask(kubectl_for(job_id, "patch", "pod", pod.name, "--type=merge", "-p", finalizers))
        except NotAllowedError as error:
            self.say(
                f"{pod.node} does not answer, and its pod {pod.name} keeps its place: you may not remove it"
                f" ({error.fix}); the run waits for the node, or for another pod with --spares"
            )
            return
        except EngineError:
            return  # e.g. it has just gone
        if self.run.order.group is None:
            note_removed(self.run.run_dir, self.run.order.host(pod.index), pod)
        self.say(
            f"{pod.node} does not answer: its pod {pod.name} was removed, so that another can come"
        )


def warn_of_leaving_pods(job: JobRequest) -> str | None:
    """Warn about pods of an earlier run of this name that are still ending; None if unknown."""
    keys = dict(job.own_keys)
    try:
        pods = find_pods(job_id_of(keys["context"], keys["namespace"], job.name))
    except EngineError:
        return None  # the error will appear when the objects are created
    leaving = [f"{pod.name} on {pod.node}" for pod in pods if pod.is_leaving]
    if not leaving:
        return None
    return (
        f"pods of an earlier run `{job.name}` have not ended yet: {few_of(leaving, 4)}; their names may lead to"
        " them until they have gone, so this start takes longer: another --run-id does not wait for them"
    )


def is_given_up(pod: Pod) -> bool:
    """Say whether the cluster has given up the node of a pod."""
    return pod.is_leaving and pod.disruption is not None and pod.disruption.word == _GIVEN_UP
