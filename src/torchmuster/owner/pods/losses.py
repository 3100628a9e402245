"""Why a run has lost a pod: what only the cluster knows, joined with what the ranks know into one verdict.

A container that is killed as a whole, as for its memory, leaves nothing that could tell. The head sees a connection that ends,
the cluster has the reason, and neither asks the other: this is done by the client when a run's result has come.
"""

from collections.abc import Iterable
from dataclasses import replace

from torchmuster.engines.kubernetes.answers import Pod, PodEnd
from torchmuster.engines.kubernetes.reasons import REASONS
from torchmuster.errors import MusterError
from torchmuster.files.layout import RunDir
from torchmuster.model.display.text import name_alone, name_on, show_size
from torchmuster.model.event import moment_of
from torchmuster.model.failure import EndKind, WorkerEnd
from torchmuster.model.verdict import MORE_MEMORY, Report, Result, describe_loss
from torchmuster.node.pod.order import PodOrder
from torchmuster.owner.pods.reach import find_pods
from torchmuster.owner.views.record import read_events

_OUT_OF_MEMORY = "OOMKilled"
_CLOCKS_S = 5.0  # by which those of two nodes may differ; a pod is made again after 10 s
_MORE = f"{MORE_MEMORY} (`--mem`, or `memory` of the site; what is in /dev/shm counts)"


def explain_loss(result: Result, run_dir: RunDir, order: PodOrder, job_id: str) -> Result:
    """Return the result with the cluster's reason, where the run has failed by the loss of a pod that the cluster knows of."""
    cause, report = result.cause, result.report
    if cause is None or report is None:
        return result
    if cause.memory_evidence is not None:
        hint = (report.hint or "").replace(MORE_MEMORY, _MORE, 1)
        return replace(result, report=replace(report, hint=hint))
    if cause.kind is not EndKind.NODE_LOST:
        return result
    try:
        pods = find_pods(job_id)
    except MusterError:
        return result
    start = _start_of(run_dir, cause.attempt)
    pod = _lost_pod(pods, order, cause, start)
    if pod is None:
        return result
    if pod.end is not None and pod.end.reason.word == _OUT_OF_MEMORY:
        return _out_of_memory(result, report, cause, pod, pod.end, start)
    return replace(result, report=_with_reason(report, pod))


def _out_of_memory(
    result: Result,
    report: Report,
    cause: WorkerEnd,
    pod: Pod,
    end: PodEnd,
    start: dict[str, object],
) -> Result:
    limit = f"its limit of {_size(pod.memory_limit)}"
    if pod.memory_limit is None:
        limit = "its node had: it has no limit of its own"
    evidence = (
        f"kubernetes says: {end.reason} (exit code {end.exit_code}) of pod {pod.name} on {pod.node}:"
        f" all its processes together used more than {limit}"
    )
    node = name_on(name_alone(cause.node), pod.node or "")
    detail = "its container was killed as a whole"
    cause = replace(cause, memory_evidence=evidence, node=node, detail=detail)
    told = Report(
        error=describe_loss(cause),
        at=f"{_ranks_on(cause, start)}{node}, attempt {cause.attempt}",
        because=(evidence, *report.because),
        hint=report.hint,
    )
    return replace(result, cause=cause, report=_with_hint(told, _MORE))


def _size(words: str | None) -> str:
    return show_size(int(words)) if words is not None and words.isdecimal() else str(words)


def _with_reason(report: Report, pod: Pod) -> Report:
    reason = pod.disruption or (pod.end.reason if pod.end is not None else None)
    if reason is None or reason.word in ("", "Error"):
        return report
    meaning = REASONS.meaning(str(reason))
    sentence = f"{meaning.sentence} ({reason})" if meaning is not None else str(reason)
    said = f"kubernetes says of pod {pod.name} on {pod.node}: {sentence}"
    report = replace(report, because=(said, *report.because))
    return _with_hint(report, meaning.hint if meaning is not None else "")


def _with_hint(report: Report, hint: str) -> Report:
    return replace(report, hint="; ".join(text for text in (hint, report.hint) if text) or None)


def _lost_pod(
    pods: Iterable[Pod], order: PodOrder, cause: WorkerEnd, start: dict[str, object]
) -> Pod | None:
    """Return the pod that was lost; one of its name may be there by now, and others may have ended in earlier attempts."""
    begun = moment_of(start.get("time"))
    found = None
    for pod in pods:  # in the order of their creation
        ended_at = pod.end.ended_at if pod.end is not None else None
        is_earlier = begun is not None and ended_at is not None and ended_at + _CLOCKS_S < begun
        is_gone = pod.end is not None or pod.disruption is not None
        if order.host(pod.index) == name_alone(cause.node) and is_gone and not is_earlier:
            found = pod
    return found


def _start_of(run_dir: RunDir, attempt: int) -> dict[str, object]:
    """Return the event on the start of an attempt; empty where the record has not come."""
    events = read_events(run_dir.events)
    starts = (one for one in events if one.get("event") == "attempt_started")
    return next((one for one in starts if one.get("attempt") == attempt), {})


def _ranks_on(cause: WorkerEnd, start: dict[str, object]) -> str:
    """Return `ranks 4-7 of 8 on `, as far as the record tells."""
    nodes = start.get("nodes")
    for node in nodes if isinstance(nodes, list) else ():
        if name_alone(str(node.get("node"))) == name_alone(cause.node):
            ranks = str(node.get("ranks"))
            word = "rank" if ranks.isdecimal() else "ranks"
            return f"{word} {ranks} of {start.get('world_size')} on "
    return ""
