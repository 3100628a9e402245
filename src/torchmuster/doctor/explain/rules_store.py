"""The store: callers did not get through to it. Nobody listens, a firewall, no route, another service."""

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchmuster.doctor.explain.case import Case, short
from torchmuster.doctor.explain.events import Confidence, Event, Finding
from torchmuster.doctor.explain.rules_network import LOOPBACK
from torchmuster.doctor.explain.weigh import HIGH, LOW, MEDIUM, Weight, at

_UNREACHABLE = (str(errno.ENETUNREACH), str(errno.EHOSTUNREACH))
_NO_HANDSHAKE = re.compile(r"recv|likely closed|unexpected|magic|[Pp]rotocol")
_SECOND_CURE = (
    "torchrun opens a second, random port under the head's own name: open all TCP ports between the nodes,"
    " and give `--local-addr ADDRESS` on each"
)
_OPEN_ALL = "open all TCP ports between the nodes (a site's staff can); another interface may be open already"


# Cause: sentence, cure.
_SAID = {
    "no-route": (
        "there is no route to {target} from {callers}",
        "give an address on a network that all nodes share",
    ),
    "other-service-on-port": (
        "something else than torch's store answers on {target}",
        "choose another port, or let it be chosen",
    ),
    "second-store-unreachable": (
        "the workers' store at {target} could not be reached, after the rendezvous had worked",
        _SECOND_CURE,
    ),
    "store-refused": (
        "nothing listens on {target}: the head has not started, has ended, or rejects the call",
        "look at the head's own first lines; start it first, on the same port",
    ),
    "nobody-hosts-the-store": (
        "nobody hosts the store: also the owner of {target} called it and got no answer",
        "the head does not recognise the endpoint as its own: add `--rdzv-conf is_host=1` there, or use its name",
    ),
    "firewall": (
        "the head waits, and others get no answer from {target}: a firewall drops their calls",
        _OPEN_ALL,
    ),
    "store-unreachable": ("the store at {target} could not be reached", _OPEN_ALL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """What is known of the calls.

    Attributes:
        target: `host:port` of the first.
        refused: An answer came: nothing listens there, or a firewall rejects.
        shook_hands: Somebody took the call and did not speak as torch's store does.
        second: It is another port than that of the rendezvous.
        by_owner: The owner of the address called it too.
    """

    target: str
    callers: tuple[str, ...]
    unreachable: bool
    refused: bool
    shook_hands: bool
    second: bool
    by_owner: bool
    head_waits: bool
    began_to_train: bool


def cannot_reach_store(case: Case) -> Iterator[Finding]:
    """Callers did not get through to the store."""
    calls = [
        e
        for e in case.of("store_connect", "store_validate")
        if e.get("host") and e.get("port") and not LOOPBACK.match(e.get("host"))
    ]
    if not calls or case.of("port_taken"):
        return
    known = _known(case, calls)
    if known.began_to_train:
        return  # the store was there, and went with its node: that is an echo
    event = case.earliest(calls)
    basis = Finding(
        cause="store-unreachable",
        sentence=f"the store at {known.target} could not be reached",
        confidence=LOW,
        weight=Weight.NETWORK,
        evidence=tuple(e.line for e in calls[:4]),
        at=at(event),
        ruled_out=("training code: no collective had begun",),
        cure=_OPEN_ALL,
        confirm=f"nc -vz {event.get('host')} {event.get('port')}   from every other node, while the head runs",
        began=event.line,
    )
    cause, sentence, cure, confidence = _decide(known)
    yield replace(basis, cause=cause, sentence=sentence, cure=cure, confidence=confidence)


def _known(case: Case, calls: list[Event]) -> _Calls:
    event = case.earliest(calls)
    port = event.get("port")
    callers = {short(e.who.host) for e in calls if e.who.host}
    endpoints = [e.get("value") for e in case.config("rdzv_endpoint")]
    told = {value.rpartition(":")[2] for value in endpoints if ":" in value}
    codes = {e.get("errno") for e in calls}
    joined = case.of("rdzv_complete") or any(
        "default_pg" in e.get("keys") for e in case.of("store_wait")
    )
    handshake = [e for e in case.of("store_validate") if _NO_HANDSHAKE.search(e.get("rest"))]
    return _Calls(
        target=f"{event.get('host')}:{port}",
        callers=tuple(sorted(callers)),
        unreachable=bool(codes & set(_UNREACHABLE)),
        refused=str(errno.ECONNREFUSED) in codes or any("refused" in e.line.text for e in calls),
        shook_hands=bool(handshake),
        second=bool(joined) or (bool(told) and port not in told),
        by_owner=short(event.get("host")) in callers,
        head_waits=bool(case.of("rdzv_timeout")),
        began_to_train=_before_calls(case, calls),
    )


def _before_calls(case: Case, calls: list[Event]) -> bool:
    """Say whether training had begun before the first call that failed."""
    first = case.earliest(calls).line
    steps = [e.line for log in case.record.logs for e in log.last_progress.values()]
    return any(line.path == first.path and line.order < first.order for line in steps)


def _decide(known: _Calls) -> tuple[str, str, str, Confidence]:
    """Return the word for what happened, a sentence, the cure, and how sure that is."""
    cause, confidence = _cause(known)
    sentence, cure = _SAID[cause]
    callers = ", ".join(known.callers) or "a node"
    return cause, sentence.format(target=known.target, callers=callers), cure, confidence


def _cause(known: _Calls) -> tuple[str, Confidence]:
    if known.unreachable:
        return "no-route", HIGH
    if known.shook_hands:
        return "other-service-on-port", MEDIUM
    if known.second:
        return "second-store-unreachable", MEDIUM
    if known.refused and not known.by_owner:
        return "store-refused", MEDIUM
    if known.by_owner or (not known.head_waits and len(known.callers) > 1):
        return "nobody-hosts-the-store", MEDIUM
    if known.head_waits:
        return "firewall", HIGH
    return "store-unreachable", LOW
