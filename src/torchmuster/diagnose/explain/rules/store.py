"""Failed connections to the store: nobody listens, a firewall, no route, another service."""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchmuster.diagnose.explain.case import Case, short
from torchmuster.diagnose.explain.catalogue.entry import Row
from torchmuster.diagnose.explain.catalogue.index import RULE_ROWS
from torchmuster.diagnose.explain.events import LogEvent, LogFinding
from torchmuster.diagnose.explain.rules.network import LOOPBACK
from torchmuster.diagnose.explain.rules.rows import MEDIUM, found_by, words_of

_NO_WAY = (str(errno.ENETUNREACH), str(errno.EHOSTUNREACH))
_NO_HANDSHAKE = re.compile(
    r"recv|likely closed|unexpected|magic|[Pp]rotocol|Ping failed|invalid value|[Bb]roken pipe|reset by"
)
_WAITED = re.compile(r"timed out after (?P<ms>\d+)ms")
_JOIN_LIMIT = re.compile(r"'join_timeout': '?(?P<s>\d+)")
_USUAL_JOIN_LIMIT_S = 600.0


_HEAD_HAD_ENDED = RULE_ROWS["store.head-had-ended"]
_FIREWALL = RULE_ROWS["store.firewall"]


# torch's socket.cpp, 1.11 to 2.9; the address is next to it or in the line that follows.
_REASON = re.compile(r"errno: (?P<number>101|111|113) - (?P<words>[A-Z][\w ]+)")
_PAIR = re.compile(r"\(?(?P<host>[\w.-]*[\w]), (?P<port>\d{2,5})\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """What is known about the failed connections.

    Attributes:
        target: `host:port` of the first.
        refused: An answer came: nothing listens there, or a firewall rejects.
        is_other_service: Something accepted the connection and did not speak the store's protocol.
        second: The port is not that of the rendezvous.
        by_owner: The owner of the address called it too.
        head_had_ended: The head had given up before the first call; None when the times don't tell.
    """

    target: str
    callers: tuple[str, ...]
    unreachable: bool
    refused: bool
    is_other_service: bool
    second: bool
    by_owner: bool
    head_waits: bool
    began_to_train: bool
    head_had_ended: bool | None


def cannot_reach_store(case: Case) -> Iterator[LogFinding]:
    """Report callers that could not connect to the store."""
    calls = [
        e
        for e in case.of("store_connect", "store_validate")
        if e.get("host") and e.get("port") and not LOOPBACK.match(e.get("host"))
    ]
    if not calls or case.of("port_taken"):
        return
    known = _known(case, calls)
    if known.began_to_train:
        return  # the store was there, and ended with its node: that is an echo
    names = {"target": known.target, "callers": ", ".join(known.callers) or "a node"}
    yield found_by(case, _row_of(known), calls, names)


def named_reason(case: Case) -> Iterator[LogFinding]:
    """Report the kernel's reason for a failed connection that a line names without an address."""
    if case.of("store_connect", "store_validate") and any(
        e.get("errno") for e in case.of("store_connect")
    ):
        return
    found = [
        e
        for e in case.of("store_connect", "exception", "rdzv_connection", "error_line")
        if _REASON.search(words_of(e))
    ]
    if not found:
        return
    reason = _REASON.search(words_of(found[0]))
    address = next((a for e in found if (a := _PAIR.search(words_of(e))) is not None), None)
    if reason is not None and address is not None:
        row = (
            RULE_ROWS["store.unreachable"]
            if reason["number"] in ("101", "113")
            else RULE_ROWS["store.nobody-there"]
        )
        names = {"target": f"{address['host']}:{address['port']}", "reason": reason["words"]}
        yield found_by(case, row, found, names)


def _known(case: Case, calls: list[LogEvent]) -> _Calls:
    event = case.earliest(calls)
    port = event.get("port")
    callers = {host for e in calls if (host := _caller(e, event.get("host")))}
    endpoints = [e.get("value") for e in case.config("rdzv_endpoint")]
    ports = {value.rpartition(":")[2] for value in endpoints if ":" in value}
    codes = {e.get("errno") for e in calls}
    joined = case.of("rdzv_complete") or any(
        "default_pg" in e.get("keys") for e in case.of("store_wait")
    )
    joined = joined or _workers_were_callers(case, calls)
    handshake = [e for e in case.of("store_validate") if _NO_HANDSHAKE.search(e.get("rest"))]
    return _Calls(
        target=f"{event.get('host')}:{port}",
        callers=tuple(sorted(callers)),
        unreachable=bool(codes & set(_NO_WAY)),
        refused=str(errno.ECONNREFUSED) in codes or any("refused" in e.line.text for e in calls),
        is_other_service=bool(handshake),
        second=bool(joined) or (bool(ports) and port not in ports),
        by_owner=short(event.get("host")) in callers,
        head_waits=bool(case.of("rdzv_timeout")),
        began_to_train=_before_calls(case, calls),
        head_had_ended=_head_had_ended(case, calls),
    )


def _caller(event: LogEvent, called: str) -> str:
    """Return the caller's host, or the called host where the log has its name (`worker-0.log`)."""
    if event.who.host:
        return short(event.who.host)
    stem = os.path.basename(event.line.path).partition(".")[0].lower()
    return short(called) if stem.endswith(short(called)) else ""


def _workers_were_callers(case: Case, calls: list[LogEvent]) -> bool:
    """Return whether a launcher reports the end of ranks that called: then the nodes had met."""
    failed = {e.line.path for e in case.of("child_failed")}
    return any(e.get("own") and e.line.path in failed for e in calls)


def _head_had_ended(case: Case, calls: list[LogEvent]) -> bool | None:
    """Return whether the head gave up before the first call began; None when times don't tell."""
    ends = [_end_of_wait(case, event) for event in case.of("rdzv_timeout")]
    known = [end for end in ends if end is not None]
    began = [e.line.when - _waited_s(e) for e in calls if e.line.when is not None]
    return min(began) > max(known) + 1.0 if known and began else None


def _waited_s(event: LogEvent) -> float:
    match = _WAITED.search(event.line.text)
    return int(match["ms"]) / 1e3 if match is not None else 0.0


def _end_of_wait(case: Case, event: LogEvent) -> float | None:
    """Return when a node gave up, by its own clock: the line's time, or start plus limit."""
    if event.line.when is not None:
        return event.line.when
    path = event.line.path
    header = [line for log in case.record.logs if log.path == path for line in log.header]
    before = [line.when for line in header if line.order < event.line.order and line.when]
    configs = [e.get("value") for e in case.config("rdzv_configs") if e.line.path == path]
    match = _JOIN_LIMIT.search(configs[-1]) if configs else None
    limit_s = float(match["s"]) if match is not None else _USUAL_JOIN_LIMIT_S
    return max(before) + limit_s if before else None


def _before_calls(case: Case, calls: list[LogEvent]) -> bool:
    """Return whether training had begun before the first failed call."""
    first = case.earliest(calls).line
    steps = [e.line for log in case.record.logs for e in log.last_progress.values()]
    return any(line.path == first.path and line.order < first.order for line in steps)


def _row_of(known: _Calls) -> Row:
    """Return the first row that explains the calls."""
    if known.unreachable:
        return RULE_ROWS["store.no-route"]
    if known.is_other_service:
        return RULE_ROWS["store.other-service"]
    if known.second:
        return RULE_ROWS["store.second-store"]
    if known.refused and not known.by_owner:
        return _HEAD_HAD_ENDED if known.head_had_ended else RULE_ROWS["store.refused"]
    if known.by_owner:
        return RULE_ROWS["store.owner-called"]
    if not known.head_waits and len(known.callers) > 1:
        return RULE_ROWS["store.all-called"]
    if known.head_had_ended:
        return _HEAD_HAD_ENDED
    if known.head_waits:
        # Without comparable times it is unknown whether the head still waited.
        unsure = known.head_had_ended is None
        return replace(_FIREWALL, confidence=MEDIUM) if unsure else _FIREWALL
    return RULE_ROWS["store.unreached"]
