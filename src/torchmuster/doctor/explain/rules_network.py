"""Addresses, names and ports: who called whom, and did not get through."""

import errno
import re
from collections.abc import Iterator

from torchmuster.doctor.explain.case import Case, short
from torchmuster.doctor.explain.events import Finding
from torchmuster.doctor.explain.weigh import HIGH, MEDIUM, Weight, at

def port_taken(case: Case) -> Iterator[Finding]:
    """A port that the job needs belongs to somebody else."""
    found = [event for event in case.of("port_taken")]
    if not found:
        return
    event = case.earliest(found)
    port = next((e.get("port") for e in found if e.get("port")), "")
    several = len({(e.who.host, e.who.rank, e.who.task) for e in found}) > 1
    yield Finding(
        cause="port-taken",
        sentence=f"the port {port or 'of the store'} is taken by another process",
        confidence=HIGH,
        weight=Weight.SPECIFIC,
        evidence=tuple(e.line for e in found[:3]),
        at=at(event),
        because=("several processes tried it: more than one thinks that it is rank 0",)
        if several
        else (),
        cure="let the port be chosen (`--rdzv-endpoint=HOST:0`, `muster run`), or end what holds it",
        confirm=f"ss -ltnp 'sport = :{port}'" if port else "ss -ltnp",
        began=event.line,
    )


_LOOPBACK = re.compile(r"^(?:127\.|localhost$|::1$)")


_PRIVATE_BRIDGE = re.compile(r"^172\.(?:1[7-9]|2\d|3[01])\.0\.1$")


def loopback_endpoint(case: Case) -> Iterator[Finding]:
    """Other nodes were told an address that means the node itself."""
    found = [
        e
        for e in case.of("store_connect", "store_validate", "gloo_connect")
        if _LOOPBACK.match(e.get("host"))
    ]
    configured = [
        e
        for e in case.config("rdzv_endpoint") + case.config("master_addr")
        if _LOOPBACK.match(e.get("value").partition(":")[0])
    ]
    several = (case.num_nodes or 1) > 1 or len(case.spoke) > 1
    if not found and not (configured and several):
        return
    event = case.earliest(found or configured)
    gloo = event.kind == "gloo_connect"
    what = (
        "Gloo published 127.0.0.1 as a node's address"
        if gloo
        else "the endpoint is this machine's own loopback address"
    )
    yield Finding(
        cause="loopback-address",
        sentence=f"{what}: another node that calls it calls itself",
        confidence=HIGH if found and (several or gloo) else MEDIUM,
        weight=Weight.LAUNCH,
        evidence=tuple(e.line for e in (found or configured)[:3]),
        at=at(event),
        cure=(
            "the node's name resolves to 127.0.1.1 in /etc/hosts: set GLOO_SOCKET_IFNAME to the interface between the nodes"
            if gloo
            else "give the head's address as other nodes see it (`--rdzv-endpoint=HEAD:PORT`, --master-addr)"
        ),
        confirm="getent hosts $(hostname)   on every node",
        began=event.line,
    )


def bridge_address(case: Case) -> Iterator[Finding]:
    """The address of a container bridge, the same on every node, was published."""
    found = [
        e
        for e in case.of("gloo_connect", "store_connect", "peer_lost")
        if _PRIVATE_BRIDGE.match(e.get("host"))
    ]
    if not found:
        return
    event = case.earliest(found)
    yield Finding(
        cause="bridge-address",
        sentence=f"a node published {event.get('host')}, the address of a container bridge that every node has",
        confidence=HIGH,
        weight=Weight.LAUNCH,
        evidence=tuple(e.line for e in found[:3]),
        at=at(event),
        cure="name the real interface: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (`muster run` measures and sets them)",
        confirm="ip -br addr   on every node",
        began=event.line,
    )


def cannot_reach_store(case: Case) -> Iterator[Finding]:
    """Callers did not get through to the store: nobody listens, a firewall, no route, another service."""
    calls = [
        e
        for e in case.of("store_connect", "store_validate")
        if e.get("host") and not _LOOPBACK.match(e.get("host"))
    ]
    if not calls or case.of("port_taken"):
        return
    event = case.earliest(calls)
    target = f"{event.get('host')}:{event.get('port')}"
    callers = {short(e.who.host) for e in calls if e.who.host}
    completed = bool(case.of("rdzv_complete"))
    endpoint = {e.get("value") for e in case.config("rdzv_endpoint")}
    other_port = bool(endpoint) and not any(
        value.endswith(f":{event.get('port')}") for value in endpoint
    )
    refused = any(
        e.get("errno") == str(errno.ECONNREFUSED) or "refused" in e.line.text for e in calls
    )
    unreachable = any(
        e.get("errno") in (str(errno.ENETUNREACH), str(errno.EHOSTUNREACH)) for e in calls
    )
    validate = bool(case.of("store_validate")) and not any(e.kind == "store_connect" for e in calls)
    head_waits = bool(case.of("rdzv_timeout"))
    owner = short(event.get("host"))
    self_call = owner in callers
    cause, sentence, cure, confidence = (
        "store-unreachable",
        f"the store at {target} could not be reached",
        "open all TCP ports between the nodes",
        MEDIUM,
    )
    if unreachable:
        cause, sentence, confidence = (
            "no-route",
            f"there is no route to {target} from {', '.join(sorted(callers)) or 'a node'}",
            HIGH,
        )
        cure = "give an address on a network that all nodes share"
    elif validate:
        cause, sentence = (
            "other-service-on-port",
            f"something else than torch's store answers on {target}",
        )
        cure = "choose another port"
    elif completed or other_port:
        cause = "second-store-unreachable"
        sentence = (
            f"the workers' store at {target} could not be reached, after rendezvous had worked"
        )
        cure = "torchrun opens a second, random port under the head's own name: open all TCP ports between the nodes, and give `--local-addr ADDRESS` on each"
    elif self_call or (not head_waits and not refused and len(callers) > 1):
        cause = "nobody-hosts-the-store"
        sentence = f"nobody hosts the store: also the owner of {target} called it and got no answer"
        cure = "the head does not recognise the endpoint as its own: add `--rdzv-conf is_host=1` there, or use its name"
    elif refused:
        cause, sentence = (
            "store-refused",
            f"nothing listens on {target}: the head has not started, has ended, or rejects the call",
        )
        cure = "look at the head's own first lines; start it first, on the same port"
    elif head_waits:
        cause, sentence, confidence = (
            "firewall",
            f"the head waits and others get no answer from {target}: a firewall drops their calls",
            HIGH,
        )
        cure = "open all TCP ports between the nodes (a site's staff can); another interface may be open already"
    yield Finding(
        cause=cause, sentence=sentence, confidence=confidence, weight=Weight.NETWORK, evidence=tuple(e.line for e in calls[:4]),
        at=at(event), cure=cure, began=event.line,
        ruled_out=("training code: no collective had begun",),
        confirm=f"nc -vz {event.get('host')} {event.get('port')}   from every other node, while the head runs",
    )  # fmt: skip


def names(case: Case) -> Iterator[Finding]:
    """A name that a node can't resolve."""
    found = [e for e in case.of("no_name") if "IPv6" not in e.line.text]
    if not found:
        return
    event = case.earliest(found)
    host = event.get("host") or next(
        iter(re.findall(r"[\(\[ ]([A-Za-z][\w.-]+)[,\]: ]", event.line.text)), ""
    )
    yield Finding(
        cause="name-not-resolved",
        sentence=f"the name {host or 'of the head'} can't be resolved on {event.who.host or 'a node'}",
        confidence=MEDIUM,
        weight=Weight.NETWORK,
        evidence=tuple(e.line for e in found[:3]),
        at=at(event),
        cure="use the head's address instead of its name, or a name that all nodes know",
        confirm=f"getent hosts {host or 'NAME'}   on every node",
        began=event.line,
    )
