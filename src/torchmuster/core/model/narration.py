"""Turn events of a record into sentences for the user."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchmuster.core.model import events
from torchmuster.core.model.events import RecordEvent
from torchmuster.core.model.network import significant
from torchmuster.core.model.text import few_of, span

if TYPE_CHECKING:
    from torchmuster.core.model.repeats import ShownOutput


def narrate(event: RecordEvent, shown: "ShownOutput | None" = None) -> str | None:
    """Return the sentence for an event; None for one that is only recorded.

    Args:
        event: The event.
        shown: What the terminal already shows and need not repeat.
    """
    match event:
        case events.AttemptFailedEvent():
            return _attempt_failed(event, shown)
        case events.AttemptStartedEvent(attempt=attempt):
            return _attempt_started(event) if attempt else None
        case events.WaitingEvent():
            return _waiting(event)
        case events.NoticeEvent(text=text):
            return text or None
        case (
            events.StoppingEvent(text=text)
            | events.HangEvent(text=text)
            | events.StartWaitEvent(text=text)
            | events.StragglerEvent(text=text)
            | events.WaitingForEndEvent(text=text)
        ):
            return text
        case events.AgentRefusedEvent(host=host, why=why):
            return f"refused an agent from {host}: {why}; the run continues"
        case events.NodeLostEvent(node=node, why=why):
            return f"{node} was lost: {why}"
        case events.NodeLeftOutEvent(node=node, rank=rank):
            why = f"its rank {rank} has computed something else than the others"
            return f"{node} gets no ranks again: {why}"
        case events.NewcomerEvent(node=node):
            return f"{node} has joined; it takes part from the next attempt on"
        case events.SpareJoinedEvent(node=node):
            return f"{node} has joined as a spare node"
        case events.SpareLostEvent(node=node, why=why):
            return f"the spare {node} was lost: {why}"
        case events.SpareTakenEvent(node=node, before=before):
            return f"the spare {node} takes the place of {before}"
        case events.HeadReplacedEvent(node=node, before=before, attempt=attempt):
            what = f"the head on {before} was lost"
            return f"{what}: {node} takes its place with attempt {attempt}"
        case events.ShrunkEvent(num_nodes=num_nodes, wanted=wanted):
            return f"the world shrinks to {num_nodes} of {wanted} nodes"
        case events.EarlyEndEvent():
            return _early_end(event)
        case events.LeftRunningEvent(node=node, processes=processes):
            names = few_of([f"{one.name} (pid {one.pid})" for one in processes], 8)
            return f"left running on {node}, in sessions of their own: {names}"
        case events.DebuggerWaitsEvent(node=node, rank=rank, tool=tool):
            return f"rank {rank} on {node} waits for {tool.partition(':')[0]}"
        case events.NetworkEvent():
            return _network(event)
        case events.PreflightEvent():
            return _preflight(event)
    return None


def wait_in(event: RecordEvent, age_s: float) -> str | None:
    """Return a sentence about what a run waits for, with the remaining time.

    Args:
        event: The newest event about waiting.
        age_s: Seconds since it was recorded.
    """
    if isinstance(event, events.WaitingEvent):
        return _waiting(event, max(0.0, event.left_s - max(0.0, age_s)))
    return narrate(event)


def _waiting(event: events.WaitingEvent, left_s: float | None = None) -> str:
    missing, num, left = (
        event.missing,
        event.num_missing,
        event.left_s if left_s is None else left_s,
    )
    if event.hint:
        names = few_of([one.node for one in missing], 8, num)
        return f"waiting for {names}: {missing[0].why if missing else ''}; {event.hint}; {span(left, whole=True)} left"
    what = few_of([f"{one.node} ({one.why})" for one in missing], 8, num)
    return f"waiting for {num} of {event.wanted} nodes: {what}; {span(left, whole=True)} left"


def _attempt_started(event: events.AttemptStartedEvent) -> str:
    nodes = "node" if event.num_nodes == 1 else "nodes"
    workers = "worker" if event.world_size == 1 else "workers"
    where = f"{event.world_size} {workers} on {event.num_nodes} {nodes}"
    return f"attempt {event.attempt}: {where} ({event.why})"


def _attempt_failed(event: events.AttemptFailedEvent, shown: "ShownOutput | None") -> str:
    left, cause = event.restarts_left, event.cause
    what = f"attempt {event.attempt} ended: {event.what}"
    if left is None:
        return what  # the verdict follows
    output = ""
    if cause is not None:
        traceback = cause.error.traceback if cause.error is not None else ""
        ranks = shown.ranks if shown is not None else {0}
        is_new = cause.rank not in ranks and not (shown is not None and shown.has(traceback))
        lines = cause.tail if is_new else ()
        if shown is not None and 0 < len(traceback.splitlines()) <= len(lines):
            shown.note(traceback)
        output = "".join(f"\n  [rank {cause.rank}] {line}" for line in lines)
    return f"{what}; {left} restart{'s' if left != 1 else ''} left{output}"


def _early_end(event: events.EarlyEndEvent) -> str:
    ranks = f"rank{'' if event.ranks.isdecimal() else 's'} {event.ranks}"
    others = f"{event.num_running} other{'s run' if event.num_running > 1 else ' runs'}"
    return f"{ranks} ended with exit code 0 while {others}"


def _network(event: events.NetworkEvent) -> str:
    parts = [f"{event.interface} ({event.subnet})", f"{event.num_nodes} nodes"]
    if event.gbit_per_s is not None:
        parts.append(f"{event.gbit_per_s} Gbit/s")
    if event.latency_s is not None:
        parts.append(f"{significant(event.latency_s * 1000)} ms")
    unused = [f"{one.name} ({one.why})" for one in event.unused[:8]]
    if len(event.unused) > 8:
        unused.append(f"{len(event.unused) - 8} more")
    return f"network: {', '.join(parts)}" + (f"; not used: {', '.join(unused)}" if unused else "")


def _preflight(event: events.PreflightEvent) -> str | None:
    """Return the sentence for failures and warnings; `muster doctor` shows all findings itself."""
    if event.form == "long":
        return None
    lines = [_finding(finding) for finding in event.findings if finding.get("level") != "note"]
    return "\n".join(lines) or None


def _finding(finding: Mapping[str, Any]) -> str:
    reasons = finding.get("because")
    because = "; ".join(map(str, reasons[:2] if isinstance(reasons, list) else ()))
    hint = finding.get("hint")
    text = f"preflight {finding.get('level')}: {finding.get('error')}"
    text += f" ({because})" if because else ""
    return text + (f"; {hint}" if hint else "")
