"""Frees the places of pods on dead nodes, whose objects stay and keep replacements away.

A pod is removed only if both sides give it up: the cluster its node, and the head the pod, whose
lease has run out. A pod that only the cluster misses may still be training while its kubelet is
dead. No head can speak for a first pod: it is removed if it can't be reached from here either, and
ends by itself should it come back (`kubernetes/firstpod/conduct.py`).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.events import (
    AgentJoinedEvent,
    AgentLostEvent,
    GroupStartedEvent,
    NodeLostEvent,
    RunStartedEvent,
    SpareLostEvent,
    TaskStartedEvent,
)
from torchmuster.core.model.text import few_of, name_alone
from torchmuster.core.owner.record import read_events
from torchmuster.errors import MusterError
from torchmuster.kubernetes.engine.answers import Pod
from torchmuster.kubernetes.engine.dialect import job_id_of, kubectl, place_of
from torchmuster.kubernetes.node.call import call_argv
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.pods.losses import hosts_of_task, note_removed
from torchmuster.kubernetes.pods.reach import NotAllowedError, ask, find_pods, forward
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.model.job import JobRequest, JobView

_GIVEN_UP = "DeletionByTaintManager"
_ANSWER_S = 8.0


@dataclass(slots=True)
class LostPodRemover:
    """Removes those pods of a run or a workflow group that cluster and head have given up.

    Attributes:
        more: The group's other Jobs.
    """

    run_dir: RunDir
    order: PodOrder
    job_id: str
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
        asks |= is_known and len(joined) < self.order.num_pods
        asks |= any(_GIVEN_UP in (view.reason or "") for view in views if view is not None)
        if not lost and not asks:
            return
        for job_id in (self.job_id, *self.more):
            context, namespace, job = place_of(job_id)
            for pod in find_pods(job_id):
                if pod.uid in self._done or not is_given_up(pod):
                    continue
                is_first = job_id == self.job_id and pod.index == self.order.index
                name = f"{job}-{pod.index}"
                is_lost = name in lost or (is_known and not is_first and name not in joined)
                if is_lost or (is_first and asks and not self._answers(pod)):
                    self._done.add(pod.uid)
                    self._remove(pod, context, namespace)

    def _answers(self, pod: Pod) -> bool:
        """Say whether a pod can be reached from here."""
        try:
            with forward(self.job_id, pod.name, self.order.port, _ANSWER_S) as way:
                words = [*call_argv(self.run_dir.secret, way.port), "127.0.0.1", "true"]
                return proc.ask(words, b"", _ANSWER_S).status == 0
        except MusterError:
            return False

    def _lost_names(self) -> tuple[set[str], set[str]]:
        """Return the pods that the head has lost, and those it has now; a new head starts empty."""
        group, lost, joined = self.order.group, set[str](), set[str]()
        if group is not None:
            for one in read_events(self.run_dir.group(group).events):
                match one.event:
                    case AgentLostEvent(task=task):
                        lost.add(task)
                    case TaskStartedEvent(task=task):
                        joined.add(task)
                        lost.discard(task)
                    case GroupStartedEvent():
                        joined.clear()
            return self._hosts_of(lost), self._hosts_of(joined - lost)
        for one in read_events(self.run_dir.events):
            match one.event:
                case NodeLostEvent(node=node) | SpareLostEvent(node=node):
                    lost.add(name_alone(node))
                case AgentJoinedEvent(node=node):
                    joined.add(name_alone(node))
                    lost.discard(name_alone(node))
                case RunStartedEvent():
                    joined.clear()  # a node that died with the first pod's is not back
        return lost, joined - lost

    def _hosts_of(self, tasks: set[str]) -> set[str]:
        of_tasks = (hosts_of_task(self.run_dir, self.order, task) for task in tasks)
        return {host for hosts in of_tasks for host in hosts}

    def _remove(self, pod: Pod, context: str, namespace: str) -> None:
        finalizers = json.dumps({"metadata": {"finalizers": None}})
        force = ("delete", "pod", pod.name, "--force", "--grace-period=0", "--wait=false")
        try:
            ask(kubectl(context, namespace, *force))
            # A force delete alone does not remove it: the Job's finalizer waits for a dead kubelet.
            ask(
                kubectl(
                    context, namespace, "patch", "pod", pod.name, "--type=merge", "-p", finalizers
                )
            )
        except NotAllowedError as error:
            self.say(
                f"{pod.node} does not answer, and its pod {pod.name} keeps its place: you may not remove it"
                f" ({error.fix}); the run waits for the node, or for another pod with --spares"
            )
            return
        except EngineError:
            return  # e.g. it has just gone
        if self.order.group is None:
            note_removed(self.run_dir, self.order.host(pod.index), pod)
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
