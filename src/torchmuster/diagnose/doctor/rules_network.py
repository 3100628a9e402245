"""Names, addresses, interfaces and clocks: problems that show only across several machines."""

import ipaddress
from collections.abc import Iterator, Sequence

from torchmuster.diagnose.doctor.checks import LONG, MACHINES, Check, Equal, NodePart, look
from torchmuster.diagnose.doctor.show import NodeView, Rule, Situation, differ, names_of
from torchmuster.diagnose.finding import Finding, Level

# torch's c10d rendezvous takes a node for dead after 15 s of its own clock: 3 times 5 s.
CLOCK_WARNING_S, CLOCK_FAILURE_S = 2.0, 10.0
_SLOW_NAME_S = 2.0


def _level(seen: NodePart) -> Level:
    """Workers of muster get addresses, so names are no warning at every start."""
    return Level.WARNING if seen.situation.is_long else Level.NOTE


def _name_level(seen: NodePart) -> Level:
    """On one machine nobody else is told its name: until it has a part in a job of several."""
    return _level(seen) if seen.situation.has_machines else Level.NOTE


def _is_told(situation: Situation) -> bool:
    return situation.is_long or situation.has_machines


def clocks(situation: Situation) -> Iterator[Finding]:
    """Clocks that differ: torchrun loses nodes, logs can't be compared, certificates are refused."""
    for node in situation.nodes:
        if node.clock_s is None or abs(node.clock_s) - node.clock_error_s < CLOCK_WARNING_S:
            continue
        is_far = abs(node.clock_s) - node.clock_error_s >= CLOCK_FAILURE_S
        side = "ahead of" if node.clock_s > 0 else "behind"
        yield Finding(
            level=Level.FAILURE if is_far else Level.WARNING,
            cause="clocks-differ",
            error=f"the clock of {node.name} is {abs(node.clock_s):.1f} s {side} the head's",
            at=node.name,
            because=(
                f"measured to {max(node.clock_error_s, 0.001):.3f} s",
                "torchrun's c10d rendezvous considers a node dead from 15 s on; time stamps in logs are misleading",
            ),
            hint="`chronyc tracking` or `timedatectl` on the node; ask its administrator to set the clock",
            weight=45,
        )


def _means_itself(seen: NodePart) -> bool:
    own = seen.facts.own_addresses
    return bool(own) and all(_is_loopback(address) for address in own)


def _outside(seen: NodePart) -> list[str]:
    """Return the addresses of a node's name, if none of its interfaces has one of them."""
    outside = [a for a in seen.facts.own_addresses if not _is_loopback(a)]
    mine = {i.address for i in seen.facts.interfaces}
    return outside if mine and not mine & set(outside) else []


def shared_addresses(situation: Situation) -> Iterator[Finding]:
    """An address that several machines have: a bridge of containers."""
    networks = look(situation, "network")
    for address, name, nodes in _shared_addresses(networks) if situation.has_machines else ():
        named = [
            s.node.name for s in networks if s.node in nodes and address in s.facts.own_addresses
        ]
        meant = f", and the name of {names_of(named)} means it"
        yield Finding(
            level=_level(networks[0]) if named else Level.NOTE,
            cause="bridge-address",
            error=f"{name} has the same address {address} on {len(nodes)} nodes"
            + (meant if named else ": it can't connect them"),
            at=names_of([n.name for n in nodes]),
            because=("a bridge of containers; a node that gets this address connects to itself",),
            hint=f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME must not name {name}; muster never chooses it",
            weight=22 if named else 0,
        )


def _shared_addresses(networks: Sequence[NodePart]) -> list[tuple[str, str, list[NodeView]]]:
    owners: dict[str, list[tuple[NodeView, str]]] = {}
    for seen in networks:
        for interface in seen.facts.interfaces:
            owners.setdefault(interface.address, []).append((seen.node, interface.name))
    found = []
    for address, rows in owners.items():
        if len({node.machine for node, _ in rows}) > 1:
            found.append((address, rows[0][1], [node for node, _ in rows]))
    return found


def other_names(situation: Situation) -> Iterator[Finding]:
    """How the nodes resolve each other's names."""
    if not situation.is_long or not situation.has_machines:
        return
    networks = look(situation, "network")
    for subject in situation.nodes:
        others = [s for s in networks if s.node.machine != subject.machine]
        deaf = {
            s.node.name: s.facts.unresolved[subject.name]
            for s in others
            if subject.name in s.facts.unresolved
        }
        if deaf:
            yield Finding(
                level=Level.WARNING,
                cause="name-not-resolved",
                error=f"{names_of(list(deaf))} can't resolve {subject.name}",
                at=names_of(list(deaf)),
                because=tuple(dict.fromkeys(deaf.values()))[:3],
                hint=f"add {subject.name} to /etc/hosts or the name server; muster itself uses addresses",
                weight=21,
            )
        yield from _views_of(subject, others)


def _views_of(subject: NodeView, others: Sequence[NodePart]) -> Iterator[Finding]:
    seen = {
        s.node.name: tuple(sorted(s.facts.names[subject.name]))
        for s in others
        if subject.name in s.facts.names
    }
    wrong = [name for name, addresses in seen.items() if all(_is_loopback(a) for a in addresses)]
    if wrong:
        yield Finding(
            level=Level.WARNING,
            cause="loopback-address",
            error=f"on {names_of(wrong)} the name {subject.name} means the node itself: {seen[wrong[0]][0]}",
            at=names_of(wrong),
            hint=f"correct the line of {subject.name} in /etc/hosts there",
            weight=26,
        )
    views = differ({k: v for k, v in seen.items() if k not in wrong}, "", ", ".join)
    if views is not None:
        yield Finding(
            level=Level.WARNING,
            cause="names-differ",
            error=f"the nodes have different addresses for {subject.name}: {views.text}",
            at=names_of(views.odd),
            hint="use one /etc/hosts or one name server for all nodes",
            weight=20,
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


RULES: Sequence[Rule] = (
    clocks,
    # Others that are told such a name call themselves.
    Check(
        of="network",
        cause="loopback-address",
        level=_name_level,
        when=_is_told,
        bad=_means_itself,
        error="the own name of {nodes} means the node itself: {facts.own_name} is {facts.own_addresses[0]} there",
        because=(
            "other nodes get a loopback address from torchrun and Gloo, and connect to themselves; muster passes real ones",
        ),
        hint="in /etc/hosts give {facts.own_name} the address of the interface between the nodes,"
        " or start with `muster run` or `muster torchrun`",
        weight=25,
    ),
    Check(
        of="network",
        cause="name-not-resolved",
        level=_name_level,
        when=_is_told,
        bad=lambda s: not s.facts.own_addresses,
        error="the own name of {nodes} has no address: {facts.own_name}",
        words=lambda s: {"why": s.facts.unresolved.get(s.facts.own_name, "no answer")},
        because=(
            "{why}",
            "Gloo looks it up before it connects, and other nodes can't find it by this name; muster passes addresses",
        ),
        hint="add {facts.own_name} to /etc/hosts of {node.name}, or set GLOO_SOCKET_IFNAME",
        weight=24,
    ),
    Check(
        of="network",
        cause="name-not-resolved",
        level=_level,
        when=MACHINES,
        bad=lambda s: bool(_outside(s)),
        each=True,
        error="the own name of {nodes} is {address}, which no interface of it has",
        words=lambda s: {
            "address": _outside(s)[0],
            "mine": ", ".join(sorted({i.address for i in s.facts.interfaces})),
        },
        because=("it has {mine}",),
        hint="correct the entry of {facts.own_name} in /etc/hosts or the name server",
        weight=23,
    ),
    shared_addresses,
    other_names,
    # A name server that does not answer delays every start.
    Check(
        of="network",
        cause="slow-names",
        level=_level,
        bad=lambda s: s.facts.name_s >= _SLOW_NAME_S,
        worst=lambda s: -s.facts.name_s,
        error="looking up a name takes {facts.name_s:.1f} s on {nodes}",
        because=(
            "a name server in /etc/resolv.conf does not answer; every process that looks up a name waits",
        ),
        hint="remove the dead server, or export RES_OPTIONS='timeout:1 attempts:1'",
    ),
    Equal(
        of="network",
        cause="mtu-differs",
        level=Level.WARNING,
        when=MACHINES,
        value=lambda s: s.facts.mtu.get(s.node.interface),
        what="an MTU of",
        error="the interfaces between the nodes have different MTUs: {text}",
        because=(
            "large packets of the one may not reach the other: small messages pass, gradients hang",
        ),
        hint="ip link set IFACE mtu N, the same on all nodes and on the switch",
        weight=35,
    ),
    Check(
        of="network",
        cause="no-way-out",
        level=Level.NOTE,
        when=LONG,
        bad=lambda s: s.facts.outside is None,
        error="{nodes} {has} no route to the outside",
        because=("downloads of weights and data will fail inside of the job",),
        hint="download them before, on the login node; HF_HUB_OFFLINE=1 makes libraries fail at once",
    ),
)
