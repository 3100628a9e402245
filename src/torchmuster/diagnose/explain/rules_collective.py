"""Collectives that never ended, and connections lost because of somebody else."""

import re
from collections.abc import Iterator

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent, LogFinding, LogLine
from torchmuster.diagnose.explain.scan import Log
from torchmuster.diagnose.explain.weigh import HIGH, LOW, MEDIUM, Weight, at

_DEFAULTS_MS = {
    600_000: "NCCL's default of 10 minutes",
    1_800_000: "the default of 30 minutes",
    300_000: "the default of 5 minutes",
}


def stuck_collective(case: Case) -> Iterator[LogFinding]:
    """Ranks waited in a collective: who did not come is the one to look at."""
    waits = case.of("watchdog", "gloo_timeout")
    waits += [e for e in case.of("store_get") if "imeout" in e.get("why") + e.get("other")]
    if not waits:
        return
    calls = {
        e.who.rank: (e.get("seq"), e.get("op"))
        for e in waits
        if e.get("seq") and e.who.rank is not None
    }
    event = case.earliest(waits)
    if len(set(calls.values())) > 1:
        yield _differ(calls, waits, event)
        return
    places = _places(case, waits)
    if len(set(places.values())) > 1:
        yield _wait_elsewhere(places, waits, event)
        return
    if len(places) == case.told_size:
        yield _all_waited(len(places), waits, event)
        return
    yield _missing(case, waits, event)


def _places(case: Case, waits: list[LogEvent]) -> dict[str, str]:
    """Return the user's own line in which each rank waited, if all ranks of the job waited."""
    found = {
        str(e.who) or e.line.path: e.get("where") for e in waits if e.get("own") and e.get("where")
    }
    return found if len(found) >= max(2, case.world_size or 2) else {}


def _wait_elsewhere(places: dict[str, str], waits: list[LogEvent], event: LogEvent) -> LogFinding:
    words = ", ".join(f"{who} at {place}" for who, place in list(places.items())[:4])
    return LogFinding(
        cause="collectives-differ",
        error=f"all ranks waited until the timeout, but not in the same call: {words}",
        confidence=MEDIUM,
        weight=Weight.COLLECTIVE + 2,
        evidence=tuple(e.line for e in waits[:4]),
        at=at(event),
        ruled_out=("a rank that hangs or is gone: each of them came to a collective",),
        hint="make the call that only some ranks reach on all of them; see the branch around each line",
        confirm="TORCH_DISTRIBUTED_DEBUG=DETAIL for 20 steps names both calls",
        began=event.line,
    )


def _all_waited(size: int, waits: list[LogEvent], event: LogEvent) -> LogFinding:
    return LogFinding(
        cause="peer-lost",
        error=f"all {size} ranks waited in the same call until the timeout: what they sent did not arrive",
        confidence=LOW,
        weight=Weight.COLLECTIVE,
        evidence=tuple(e.line for e in waits[:4]),
        at=at(event),
        ruled_out=("a rank that hangs or is gone: each of them came to the collective",),
        hint="look at the network between the nodes: a link that went down, a firewall that dropped what had begun",
        confirm="ip -s link   on every node: errors and drops; then `muster doctor`",
        began=event.line,
    )


def _differ(
    calls: dict[int, tuple[str, str]], waits: list[LogEvent], event: LogEvent
) -> LogFinding:
    shown = sorted((rank, op, seq) for rank, (seq, op) in calls.items())
    words = ", ".join(f"rank {rank}: {op} number {seq}" for rank, op, seq in shown[:4])
    return LogFinding(
        cause="collectives-differ",
        error=f"the ranks wait in different collectives: {words}",
        # Groups count for themselves: the same call at another number may be another group's.
        confidence=HIGH if len({op for _, op in calls.values()}) > 1 else MEDIUM,
        weight=Weight.COLLECTIVE + 2,
        evidence=tuple(e.line for e in waits[:4]),
        at=at(event),
        ruled_out=("a slow network: then all would wait in the same one",),
        hint="a branch that depends on the rank (saving, evaluation, logging) makes or skips a collective:"
        " make it on all ranks",
        confirm="TORCH_DISTRIBUTED_DEBUG=DETAIL for 20 steps names both calls",
        began=event.line,
    )


def _missing(case: Case, waits: list[LogEvent], event: LogEvent) -> LogFinding:
    waiting = {e.who.rank for e in waits if e.who.rank is not None}
    size = case.world_size
    missing = sorted(set(range(size)) - waiting) if size and len(waiting) < size and waiting else []
    named = ", ".join(map(str, missing[:8])) or _behind(case)
    limit = event.get("ms")
    default = _DEFAULTS_MS.get(int(limit)) if limit.isdigit() else None
    return LogFinding(
        cause="rank-missing-in-collective",
        error=f"a collective waited for {f'rank {named}' if named else 'a rank'} until its timeout",
        confidence=MEDIUM if named else LOW,
        weight=Weight.COLLECTIVE,
        evidence=tuple(e.line for e in waits[:3]),
        at=at(event),
        because=(
            "the ranks that print the timeout are those that did come",
            *((f"what expired is {default}",) if default else ()),
        ),
        hint="see what the missing rank did: data, saving, another branch, a dead node;"
        " a longer timeout only waits longer",
        confirm="muster stacks RUN, or py-spy dump --pid PID of the missing rank, while it hangs",
        began=event.line,
    )


def _behind(case: Case) -> str:
    """Return the one writer that got less far than all others."""
    progress = case.progress
    if len(progress) < 2:
        return ""
    least = min(progress.values())
    slow = [who for who, number in progress.items() if number == least]
    return str(slow[0]) if len(slow) == 1 and least < max(progress.values()) else ""


def watchdog_stuck(case: Case) -> Iterator[LogFinding]:
    """A call into CUDA or NCCL never came back."""
    event = case.first("watchdog_stuck")
    if event is None:
        return
    yield LogFinding(
        cause="watchdog-stuck",
        error=f"a call into CUDA or NCCL has not come back for {event.get('s')} s on {event.who or 'a rank'}",
        confidence=MEDIUM,
        weight=Weight.COLLECTIVE + 1,
        evidence=(event.line,),
        at=at(event),
        because=(
            "often at the end: saving or evaluation after the last collective, with the GIL held",
        ),
        hint="call destroy_process_group before heavy work at the end; see what that rank did",
        confirm="py-spy dump --native --pid PID   of that rank, while it hangs",
        began=event.line,
    )


def ended_early(case: Case) -> Iterator[LogFinding]:
    """A rank left without an error while others still needed it."""
    lost = case.of("peer_lost", "gloo_timeout")
    failed = case.of("child_failed")
    if not lost or len(failed) != 1 or failed[0].get("code") != "1":
        return
    raisers = {(e.line.path, e.who.rank) for e in lost if e.get("type")}
    others = [log for log in case.record.logs if log.path != failed[0].line.path]
    # A launcher comes to its last barrier when its own ranks have ended well.
    ended = {e.line.path for e in case.of("exit_barrier")}
    quiet = [
        log
        for log in others
        if log.path in ended or not any(e.line.path == log.path for e in case.of("peer_lost"))
    ]
    # A launcher that tells its steps would tell its end; a reset is a kernel's word for a process that was killed.
    tell = {e.line.path for e in case.config("min_nodes")}
    if any("reset" in e.get("how") for e in lost):
        tell |= {log.path for log in quiet}
    quiet = [log for log in quiet if log.path in ended or log.path not in tell]
    # Without a word of an end it may as well have been killed.
    said = {e.line.path for e in case.of("success")}
    quiet = [log for log in quiet if log.path in ended or log.path in said]
    if not raisers or not quiet or case.of("rdzv_timeout", "signal_received"):
        return
    quiet.sort(key=lambda log: log.path not in ended)
    event = case.earliest([e for e in lost if e.line.path == failed[0].line.path] or lost)
    yield LogFinding(
        cause="rank-ended-early",
        error=f"the ranks of {quiet[0].who.host or quiet[0].path} ended without an error while others needed them",
        confidence=MEDIUM if quiet[0].path in ended else LOW,
        weight=Weight.ENVELOPE + 3,
        evidence=(event.line, *_last_words(case, quiet[0])),
        at=at(event),
        because=("the connection was closed, not reset: its process ended by itself",),
        hint="let every rank make the same number of steps, or train inside `with model.join():`",
        began=event.line,
    )


def ended_beside(case: Case) -> Iterator[LogFinding]:
    """A rank that its launcher neither calls failed nor had to end, while another one beside it lost its peer."""
    for failed in case.of("child_failed"):
        lost = [e for e in case.of("peer_lost") if e.line.path == failed.line.path]
        quiet = _ended_well_beside(case, failed) if failed.get("code") == "1" and lost else []
        if not quiet:
            continue
        event = case.earliest(lost)
        yield LogFinding(
            cause="rank-ended-early",
            error=f"rank {', '.join(map(str, quiet))} ended without an error while others needed it",
            confidence=MEDIUM,
            weight=Weight.ENVELOPE + 4,
            evidence=(event.line, failed.line),
            at=at(event),
            because=("its launcher neither calls it failed nor had to end it",),
            hint="let every rank make the same number of steps, or train inside `with model.join():`",
            began=event.line,
        )


def _ended_well_beside(case: Case, failed: LogEvent) -> list[int]:
    """Return the ranks of a launcher that spoke and had ended by themselves when another one of it failed."""
    same = (failed.line.path, failed.who.host, failed.who.task)
    all_of_it = [e for e in case.events if (e.line.path, e.who.host, e.who.task) == same]

    def of_launcher(*kinds: str) -> list[LogEvent]:
        return [e for e in all_of_it if e.kind in kinds]

    tables = of_launcher("root_cause_table")
    if len(tables) != 1 or len(of_launcher("child_failed")) != 1:
        return []
    rows = [e for e in of_launcher("table_row") if e.get("key") == "rank"]
    told = {int(m[0]) for e in rows if (m := re.match(r"\d+", e.get("value"))) is not None}
    ended = sum("Sending process" in e.line.text for e in of_launcher("teardown"))
    spoke = {int(e.get("rank")) for e in of_launcher("world") if e.get("rank")}
    spoke |= {e.who.rank for e in all_of_it if e.who.rank is not None}
    raised = {e.who.rank for e in of_launcher("peer_lost", "exception")}
    quiet = sorted(spoke - told - raised)
    return quiet if len(quiet) > ended else []


def _last_words(case: Case, log: Log) -> tuple[LogLine, ...]:
    """Return what shows that the ranks of a log had ended."""
    came = [e.line for e in case.of("exit_barrier") if e.line.path == log.path]
    return tuple(came[:1] or log.last[-1:])


def only_echoes(case: Case) -> Iterator[LogFinding]:
    """Connections were lost, and who went first did not leave a word."""
    lost = case.of("peer_lost", "nccl_remote", "store_get")
    lost += (
        []
        if case.of("store_connect", "store_validate", "rdzv_timeout")
        else case.of("rdzv_connection")
    )
    lost += case.of("gloo_connect") if not lost else []
    if not lost:
        return
    event = case.earliest(lost)
    named = [e.get("host") for e in lost if e.get("host")]
    peer = max(dict.fromkeys(named), key=named.count) if named else ""
    yield LogFinding(
        cause="peer-lost",
        error=f"ranks lost the connection to {peer or 'another one'}; why it went is not in these logs",
        confidence=LOW,
        weight=Weight.ENVELOPE,
        evidence=tuple(e.line for e in lost[:3]),
        at=at(event),
        hint=f"read the last lines of the ranks on {peer or 'the node that went'}: the cause stands there",
        began=event.line,
    )
