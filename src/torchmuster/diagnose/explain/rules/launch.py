"""Launch and rendezvous: which launchers were started, with which numbers and names."""

import re
from collections.abc import Iterator
from dataclasses import replace

from torchmuster.diagnose.explain.case import Case, short
from torchmuster.diagnose.explain.catalogue.index import RULE_ROWS
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.explain.rules.rows import HIGH, LOW, MEDIUM, at, found_by
from torchmuster.diagnose.finding import Confidence

_ROLE_KEY = re.compile(r"torchelastic/(?P<what>role_info|assigned_ranks)/(?P<index>\d+)")
_STATIC_RANK = re.compile(r"'rank': (?P<rank>\d+)")
_GROUP_KEY = re.compile(r"default_pg/\S*?/(?P<rank>\d+)\s*$")


_WRONG_RANK = RULE_ROWS["launch.wrong-rank"]


# Settings that must be equal for all launchers.
_MUST_BE_EQUAL = ("run_id", "min_nodes", "rdzv_endpoint")


def launcher_on_too_few_nodes(case: Case) -> Iterator[LogFinding]:
    """Report a rendezvous that waited for nodes on which no launcher was started."""
    timeouts = case.of("rdzv_timeout")
    # A script that made the store itself waited for ranks, not for launchers.
    clients = [e for e in case.of("store_clients") if not e.get("own")]
    waits = timeouts or clients or _role_waits(case) or _settings_of_only_launcher(case)
    if not waits:
        return
    # A node that waited with the head loses the connection when the head gives up first.
    lost = [] if timeouts else case.of("rdzv_connection")
    if lost or case.of("store_connect", "store_validate"):
        return  # somebody connected, but not fully: a network rule handles that
    wanted = case.num_nodes if (case.num_nodes or 0) > 1 else None
    speakers = {short(event.who.host) for event in waits if event.who.host} | set(case.spoke)
    silent = [host for host in case.allocated if host not in speakers] if speakers else case.silent
    if wanted is not None and len(speakers) >= wanted and not silent:
        return
    begin = case.earliest(waits)
    less = wanted is not None and len(speakers) < wanted
    names = {
        "spoke": ", ".join(sorted(speakers)) or "one node",
        "of": f"of {wanted} nodes" if wanted else "not on all nodes",
    }
    yield found_by(
        case,
        RULE_ROWS["launch.too-few-nodes"],
        [begin],
        names,
        confidence=_how_sure(case, silent=bool(silent), wanted=wanted, less=less),
        evidence=(begin.line, *(case.allocated[h] for h in silent[:3] if h in case.allocated)),
        at=", ".join(silent[:8]) or None,
        because=tuple(f"{host} was allocated, and there is no line of it" for host in silent[:8]),
    )


def _how_sure(case: Case, *, silent: bool, wanted: int | None, less: bool) -> Confidence:
    """Return HIGH if an allocated node wrote nothing, unless its log may just be missing."""
    if silent and wanted and not case.may_lack_logs:
        return HIGH
    return MEDIUM if silent or less else LOW


def _role_waits(case: Case) -> list[LogEvent]:
    """Return the waits of a static launcher for a node whose launcher never came."""
    found = [e for e in case.of("store_wait") if _ROLE_KEY.search(e.get("keys"))]
    return found if len({e.line.path for e in found}) <= 1 else []


def _settings_of_only_launcher(case: Case) -> list[LogEvent]:
    """Return the settings of the only launcher that wrote, if it ended before any rendezvous."""
    asked = [e for e in case.config("min_nodes") if e.get("value").isdigit()]
    writers = {(e.line.path, e.who.host, e.who.task) for e in asked}
    ended = case.of("signal_received", "final")
    met = case.of("rdzv_complete", "world") or any(log.last_progress for log in case.record.logs)
    failed = case.of("child_failed", "rdzv_connection", "rdzv_closed", "exception", "errno")
    if len(writers) != 1 or not ended or met or any(e.kind != "exception" for e in failed):
        return []
    if any(e.role is LineRole.CAUSE for e in failed):
        return []
    return [e for e in asked if int(e.get("value")) > 1]


def rendezvous_differs(case: Case) -> Iterator[LogFinding]:
    """Report nodes that waited for each other under different names or sizes."""
    for key in _MUST_BE_EQUAL:
        events = case.config(key)
        values = list(dict.fromkeys(event.get("value").strip() for event in events))
        # A node that waits for fewer may continue alone, so one completed rendezvous does not clear
        # the counts.
        went_on = case.of("progress") or (key != "min_nodes" and case.of("rdzv_complete"))
        if len(values) < 2 or went_on or _only_a_port(key, values):
            continue
        yield found_by(
            case,
            RULE_ROWS[f"launch.{key.replace('_', '-')}"],
            events,
            {"values": ", ".join(values[:4])},
            confidence=MEDIUM if case.of("rdzv_complete") else HIGH,
            at=None,
            began=events[0].line,
        )


def _only_a_port(key: str, values: list[str]) -> bool:
    """Return whether a second value is only the launcher's own choice for `:0`."""
    return key == "rdzv_endpoint" and any(value.endswith(":0") for value in values)


def node_ranks(case: Case) -> Iterator[LogFinding]:
    """Report two nodes with the same rank, or a rank beyond the number of nodes."""
    given = [e for e in case.config("node_rank") if e.get("value").isdigit()]
    given += _static_ranks(case)
    lines = {(e.line.path, e.who.host, e.who.task): e for e in given}
    numbers = [e.get("value") for e in lines.values()]
    waits = [e for e in case.of("store_wait") if _ROLE_KEY.search(e.get("keys"))]
    same = len(numbers) > len(set(numbers)) and (case.num_nodes or 0) > 1
    high = [e for e in given if case.num_nodes and int(e.get("value")) >= case.num_nodes]
    if same or high:
        event = high[0] if high else given[0]
        wrong = (
            f"node rank {event.get('value')} is beyond the {case.num_nodes} nodes"
            if high
            else f"several nodes have the node rank {max(dict.fromkeys(numbers), key=numbers.count)}"
        )
        shown = tuple(e.line for e in given[:4])
        yield found_by(case, _WRONG_RANK, [event], {"wrong": wrong}, evidence=shown)
    elif len({(e.line.path, e.who.host) for e in waits}) > 1:
        wrong = "more than one node waits as the head: they have the same node rank"
        shown = tuple(e.line for e in waits[:4])
        yield found_by(
            case, _WRONG_RANK, waits[:1], {"wrong": wrong}, evidence=shown, confidence=MEDIUM
        )


def _static_ranks(case: Case) -> list[LogEvent]:
    """Return the node ranks of static launchers, which torchrun prints in rendezvous settings."""
    found = []
    for event in case.config("rdzv_configs"):
        match = _STATIC_RANK.search(event.get("value"))
        if match is not None:
            found.append(replace(event, fields={"key": "node_rank", "value": match["rank"]}))
    return found


def never_joined(case: Case) -> Iterator[LogFinding]:
    """Report ranks that never joined the group's store, when nothing tells why."""
    clients = [e for e in case.of("store_clients") if e.get("own")]
    if clients:
        last = clients[-1]
        shown = tuple(e.line for e in clients[:3])
        where = last.get("where") or at(last)
        yield found_by(case, RULE_ROWS["launch.too-few-ranks"], [last], evidence=shown, at=where)
        return
    waits = [e for e in case.of("store_wait") if _GROUP_KEY.search(e.get("keys"))]
    ranks = sorted({int(m["rank"]) for e in waits if (m := _GROUP_KEY.search(e.get("keys")))})
    if waits:
        names = {"ranks": ", ".join(map(str, ranks[:8]))}
        yield found_by(case, RULE_ROWS["launch.never-joined"], waits, names)
