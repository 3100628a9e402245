"""How nodes find each other: launchers and their numbers, addresses, names and ports, and connections to the store."""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchmuster.diagnose.explain.case import Case, short
from torchmuster.diagnose.explain.catalogue.index import RULE_ROWS, Row
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.explain.rules.rows import HIGH, LOW, MEDIUM, at, found_by, words_of
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


LOOPBACK = re.compile(r"^(?:127\.|localhost$|::1$)")
_PRIVATE_BRIDGE = re.compile(r"^172\.(?:1[7-9]|2\d|3[01])\.0\.1$")
_LINK_LOCAL = re.compile(r"^(?:fe80:|169\.254\.)", re.IGNORECASE)
_QUOTED_NAME = re.compile(r"[\(\[ '](?P<host>[A-Za-z][\w-]*[\w.-]*)[,\]:' ]")


_NO_NAMES = ("", "host", "hostname", "name", "address")
# A service on the internet, not on a node of the job.
_PUBLIC_NAME = re.compile(
    r"(?:^|\.)(?:huggingface|hf|github|githubusercontent|pytorch|amazonaws|googleapis|wandb|swanlab|openai|modelscope|pypi)\b"
    r"|\.(?:com|org|ai|co|io|cn|dev)$"
)


def port_taken(case: Case) -> Iterator[LogFinding]:
    """Report a port that the job needs and another process holds."""
    found = case.of("port_taken")
    if not found:
        return
    port = next((e.get("port") for e in found if e.get("port")), "")
    names = {
        "taken": port or "of the store",
        "taken_port": f"port {port}" if port else "it",
        "filter": f" 'sport = :{port}'" if port else "",
    }
    several = len({(e.who.host, e.who.rank, e.who.task) for e in found}) > 1
    tried = ("several processes tried it: more than one may think that it is rank 0",)
    waited = bool(case.of("store_clients"))  # a store runs there for ranks that don't come
    yield found_by(
        case,
        RULE_ROWS["network.port-taken"],
        found,
        names,
        because=tried if several or waited else (),
        rivals=("duplicate-rank",) if several or waited else (),
    )


def loopback_endpoint(case: Case) -> Iterator[LogFinding]:
    """Report a published address that means, on each node, the node itself."""
    found = [
        e
        for e in case.of("store_connect", "store_validate", "gloo_connect", "peer_lost")
        if LOOPBACK.match(e.get("host"))
    ]
    configured = [
        e
        for e in (*case.config("rdzv_endpoint"), *case.config("master_addr"))
        if LOOPBACK.match(e.get("value").partition(":")[0])
    ]
    several = (case.num_nodes or 1) > 1 or len(case.spoke) > 1
    meshed = [e for e in found if e.kind == "gloo_connect"]
    called = [e for e in found if e.kind.startswith("store")]
    if case.of("progress") and not case.of("rdzv_timeout", "store_clients") and not meshed:
        return
    chosen = meshed or called or (configured if several else [])
    if chosen and (several or meshed or called):
        row = (
            RULE_ROWS["network.loopback-of-gloo"]
            if meshed
            else RULE_ROWS["network.loopback-endpoint"]
        )
        yield found_by(case, row, chosen, confidence=HIGH if several or meshed else MEDIUM)


def bridge_address(case: Case) -> Iterator[LogFinding]:
    """Report a published address of a container bridge, which is the same on every node."""
    kinds = ("gloo_connect", "store_connect", "peer_lost")
    found = [e for e in case.of(*kinds) if _PRIVATE_BRIDGE.match(e.get("host"))]
    if found:
        by_gloo = case.earliest(found).kind == "gloo_connect"
        yield found_by(
            case, RULE_ROWS["network.bridge"], found, confidence=HIGH if by_gloo else MEDIUM
        )


def link_local(case: Case) -> Iterator[LogFinding]:
    """Report an address that is valid on one link only, and only with the interface's name."""
    calls = case.of("store_connect", "gloo_connect")
    found = [e for e in calls if _LINK_LOCAL.match(e.get("host"))]
    if found:
        yield found_by(case, RULE_ROWS["network.link-local-address"], found)


def _unresolved_names(case: Case) -> list[LogEvent]:
    """Return torch's usually harmless messages about IPv6, for names that were called in vain."""
    called = {
        e.get("host") for e in case.of("store_connect", "store_validate") if not e.get("errno")
    }
    answered = {e.get("host") for e in case.of("store_connect", "store_validate") if e.get("errno")}
    return [
        e
        for e in case.of("no_ipv6")
        if e.get("host") in called - answered and any(c.isalpha() for c in e.get("host"))
    ]


def _misspelled(case: Case) -> tuple[LogEvent, str] | None:
    """Return a failed call to a name spelled almost like a known host's, and that host."""
    known = {**case.allocated, **case.spoke}
    for event in case.of("store_connect", "store_validate"):
        called = short(event.get("host"))
        if called in known or event.get("errno") or not called[:1].isalpha():
            continue
        like = next((host for host in known if is_misspelled(called, host)), "")
        if like:
            return event, like
    return None


def is_misspelled(name: str, known: str) -> bool:
    """Return whether names differ as those of one cluster don't: a letter less, a zero more."""
    letters, others = (re.sub(r"\d+", "0", word) for word in (name, known))
    if letters == others:
        pairs = zip(re.findall(r"\d+", name), re.findall(r"\d+", known), strict=True)
        return any("0" in (a[0], b[0]) and len(a) != len(b) for a, b in pairs)
    if sorted(letters) == sorted(others):
        return True  # two letters in the wrong order
    short_one, long_one = sorted((letters, others), key=len)
    one_more = len(long_one) == len(short_one) + 1
    return one_more and any(
        long_one[:n] + long_one[n + 1 :] == short_one for n in range(len(long_one))
    )


def misspelled_name(case: Case) -> Iterator[LogFinding]:
    """Report a call to a name that looks like a misspelled host's."""
    found = _misspelled(case) if not case.of("no_name", "rdzv_complete") else None
    if found is not None:
        event, like = found
        yield found_by(case, RULE_ROWS["network.misspelled"], [event], {"like": like})


def unknown_name(case: Case) -> Iterator[LogFinding]:
    """Report a name that a node can't resolve."""
    found = [*case.of("no_name"), *_unresolved_names(case)]
    if not found:
        return
    host = next((e.get("host") for e in found if e.get("host") not in _NO_NAMES), "")
    if not host:
        quoted = (_QUOTED_NAME.search(e.line.text) for e in found)
        host = next((match["host"] for match in quoted if match is not None), "")
        host = "" if host in _NO_NAMES else host
    names = {"name": host or "of the head", "asked": host or "NAME"}
    is_public = _PUBLIC_NAME.search(host) is not None
    yield found_by(
        case,
        RULE_ROWS["network.no-way-out"] if is_public else RULE_ROWS["network.unknown-name"],
        found,
        names,
    )


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
