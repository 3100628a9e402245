"""A Job whose indexes are members of a sweep, each a run of its own: what ends it, and how each index stands."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchmuster.engines.kubernetes.answers import RUN_LABEL, Pod, PodsOfRun, runs_of, why_gone
from torchmuster.engines.kubernetes.request import PodsRequest
from torchmuster.model.job import JobView
from torchmuster.model.states import JobState
from torchmuster.node.pod.order import FINAL_CODE

_MANY = 1_000_000  # the head of the run counts failures, not the Job
_MEMBER_LOSSES = 2  # pods of one member that may be lost; a third loss is its failure
_ENDS = {0: JobState.SUCCEEDED, FINAL_CODE: JobState.FAILED}


def ends_of(run: PodsRequest) -> dict[str, Any]:
    """Return what ends a Job: of a run its first pod, of members of a sweep the end of all of them."""
    replaced = {"podReplacementPolicy": "Failed"}  # the only value beside a podFailurePolicy
    if run.parallel is not None:
        # Without `maxFailedIndexes` a member that fails ends no other one.
        return {"backoffLimitPerIndex": _MEMBER_LOSSES, **replaced}
    success = {"rules": [{"succeededIndexes": "0"}]}
    return {"backoffLimit": _MANY, **replaced, "successPolicy": success}


def views_of_elements(objects: Sequence[Mapping[str, Any]], name: str) -> dict[int, JobView]:
    """Return where each index of a Job stands, from an answer to `get jobs.batch,pods`."""
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
            state = _state(run, pod)
        views[index] = _view(run, pod, state)
    return views


def _indexes(text: str | None) -> frozenset[int]:
    """Return the numbers of `0,2-4`."""
    found: set[int] = set()
    for word in filter(None, (text or "").split(",")):
        first, _, last = word.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _state(run: PodsOfRun, pod: Pod | None) -> JobState:
    """Return how an index stands that has not ended for the Job, by its newest pod; one that is lost is made again."""
    if pod is not None and pod.is_up:
        return JobState.RUNNING
    if not run.is_there or run.is_leaving:
        return JobState.CANCELLED
    code = pod.end.exit_code if pod is not None and pod.end is not None else None
    if code in _ENDS:
        return _ENDS[code]
    return JobState.HELD if "Suspended" in run.conditions else JobState.PENDING


def _view(run: PodsOfRun, pod: Pod | None, state: JobState) -> JobView:
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
