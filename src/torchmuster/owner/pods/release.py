"""Free the places of pods whose node is dead: their objects stay until somebody removes them, and keep replacements away.

Only what both worlds say is lost: the cluster has given up the node, and the head the pod, whose lease has run out. A pod that
only the cluster misses may train on behind a kubelet that has died.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster.engines.base import EngineError
from torchmuster.engines.kubernetes.answers import Pod
from torchmuster.engines.kubernetes.dialect import job_id_of, kubectl, place_of
from torchmuster.files.layout import RunDir
from torchmuster.model.display.text import few_of, name_alone
from torchmuster.model.job import JobRequest
from torchmuster.node.pod.order import PodOrder
from torchmuster.owner.pods.reach import NotAllowedError, ask, find_pods
from torchmuster.owner.views.record import read_events

_GIVEN_UP = "DeletionByTaintManager"


@dataclass(slots=True)
class PlaceRelease:
    """Removes the pods of one run that are lost for both worlds."""

    run_dir: RunDir
    order: PodOrder
    job_id: str
    say: Callable[[str], None]
    _done: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Remove what is lost; what the user may not remove is said once."""
        lost = self._lost_names()
        if not lost:
            return
        context, namespace, _ = place_of(self.job_id)
        for pod in find_pods(self.job_id):
            if (
                pod.uid not in self._done
                and _is_given_up(pod)
                and self.order.host(pod.index) in lost
            ):
                self._done.add(pod.uid)
                self._remove(pod, context, namespace)

    def _lost_names(self) -> set[str]:
        """Return the nodes of the run that the head has lost and not seen again."""
        lost: set[str] = set()
        for event in read_events(self.run_dir.events):
            name = name_alone(str(event.get("node")))
            if event.get("event") in ("node_lost", "spare_lost"):
                lost.add(name)
            elif event.get("event") == "agent_joined":
                lost.discard(name)
        return lost

    def _remove(self, pod: Pod, context: str, namespace: str) -> None:
        finalizers = json.dumps({"metadata": {"finalizers": None}})
        force = ("delete", "pod", pod.name, "--force", "--grace-period=0", "--wait=false")
        try:
            ask(kubectl(context, namespace, *force))
            # A force delete alone leaves it: the Job's own finalizer waits for a kubelet that is gone.
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
        self.say(
            f"{pod.node} does not answer: its pod {pod.name} was removed, so that another can come"
        )


def words_on_leavers(job: JobRequest) -> str | None:
    """Return a sentence on pods of an earlier run of this name that still end; None where there are none, or nobody can say."""
    keys = dict(job.own_keys)
    try:
        pods = find_pods(job_id_of(keys["context"], keys["namespace"], job.name))
    except EngineError:
        return None  # what is wrong is said when the objects are made
    leaving = [f"{pod.name} on {pod.node}" for pod in pods if pod.is_leaving]
    if not leaving:
        return None
    return (
        f"pods of an earlier run `{job.name}` have not ended yet: {few_of(leaving, 4)}; their names may lead to"
        " them until they have gone, so this start takes longer: another --run-id does not wait for them"
    )


def _is_given_up(pod: Pod) -> bool:
    return pod.is_leaving and pod.disruption is not None and pod.disruption.word == _GIVEN_UP
