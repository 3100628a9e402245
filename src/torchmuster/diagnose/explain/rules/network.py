"""Addresses, names and ports: what was published, and what another process holds."""

import re
from collections.abc import Iterator

from torchmuster.diagnose.explain.case import Case, short
from torchmuster.diagnose.explain.catalogue.index import RULE_ROWS
from torchmuster.diagnose.explain.events import LogEvent, LogFinding
from torchmuster.diagnose.explain.rules.rows import HIGH, MEDIUM, found_by

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
