"""Names, addresses, interfaces and clocks: what is wrong with them only across several machines."""

import ipaddress
from collections.abc import Iterator, Sequence

from torchmuster.diagnose.doctor.situation import (
    NodeView,
    Rule,
    Situation,
    differ,
    names_of,
)
from torchmuster.diagnose.facts.network import InterfaceFacts
from torchmuster.diagnose.finding import Finding, Level

# torch's c10d rendezvous takes a node for dead after 15 s of its own clock: 3 times 5 s.
CLOCK_WARNING_S, CLOCK_FAILURE_S = 2.0, 10.0
_SLOW_NAME_S = 2.0


def _networks(situation: Situation) -> list[tuple[NodeView, InterfaceFacts]]:
    found = [(n, n.facts.network) for n in situation.known if n.facts is not None]
    return [(node, network) for node, network in found if network is not None]


def _level(situation: Situation) -> Level:
    """Workers of muster are told addresses, so names are not worth a line at every start."""
    return Level.WARNING if situation.is_long else Level.NOTE


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
                "torchrun's c10d rendezvous takes a node for dead from 15 s on; time stamps of logs mislead",
            ),
            hint="`chronyc tracking` or `timedatectl` on the node; ask who runs it to set the clock",
            weight=45,
        )


def own_names(situation: Situation) -> Iterator[Finding]:
    """A name that means the node itself: others who are told it call themselves."""
    if not situation.has_machines:
        return
    networks = _networks(situation)
    loopback = [
        n
        for n, net in networks
        if net.own_addresses and all(_is_loopback(a) for a in net.own_addresses)
    ]
    if loopback:
        first = next(net for n, net in networks if n is loopback[0])
        yield Finding(
            level=_level(situation),
            cause="loopback-address",
            error=f"the own name of {names_of([n.name for n in loopback])} means the node itself:"
            f" {first.own_name} is {first.own_addresses[0]} there",
            at=names_of([n.name for n in loopback]),
            because=(
                "torchrun and Gloo tell it to the other nodes, which then call themselves; muster tells addresses",
            ),
            hint=f"in /etc/hosts give {first.own_name} the address of the interface between the nodes,"
            " or start with `muster run` or `muster torchrun`",
            weight=25,
        )
    nameless = [(n, net) for n, net in networks if not net.own_addresses]
    if nameless:
        node, net = nameless[0]
        yield Finding(
            level=_level(situation),
            cause="name-not-resolved",
            error=f"the own name of {names_of([n.name for n, _ in nameless])} has no address: {net.own_name}",
            at=names_of([n.name for n, _ in nameless]),
            because=(net.unresolved.get(net.own_name, "no answer"),),
            hint=f"a line for {net.own_name} in /etc/hosts of {node.name}, or set GLOO_SOCKET_IFNAME",
            weight=24,
        )


def foreign_addresses(situation: Situation) -> Iterator[Finding]:
    """A name whose address no interface of the node has, or which two nodes have."""
    if not situation.has_machines:
        return
    networks = _networks(situation)
    for node, net in networks:
        mine = {i.address for i in net.interfaces}
        outside = [a for a in net.own_addresses if not _is_loopback(a)]
        if outside and mine and not mine & set(outside):
            yield Finding(
                level=_level(situation),
                cause="name-not-resolved",
                error=f"the own name of {node.name} is {outside[0]}, which no interface of it has",
                at=node.name,
                because=(f"it has {', '.join(sorted(mine))}",),
                hint=f"mend the entry of {net.own_name} in /etc/hosts or the name server",
                weight=23,
            )
    shared = _shared_addresses(networks)
    for address, name, nodes in shared:
        named = [n.name for n, net in networks if n in nodes and address in net.own_addresses]
        yield Finding(
            level=_level(situation) if named else Level.NOTE,
            cause="bridge-address",
            error=f"{name} has the same address {address} on {len(nodes)} nodes"
            + (
                f", and the name of {names_of(named)} means it"
                if named
                else ": it can't connect them"
            ),
            at=names_of([n.name for n in nodes]),
            because=("a bridge of containers; who is told that address calls itself",),
            hint=f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME must not name {name}; muster never chooses it",
            weight=22 if named else 0,
        )


def _shared_addresses(
    networks: Sequence[tuple[NodeView, InterfaceFacts]],
) -> list[tuple[str, str, list[NodeView]]]:
    owners: dict[str, list[tuple[NodeView, str]]] = {}
    for node, net in networks:
        for interface in net.interfaces:
            owners.setdefault(interface.address, []).append((node, interface.name))
    found = []
    for address, rows in owners.items():
        if len({node.machine for node, _ in rows}) > 1:
            found.append((address, rows[0][1], [node for node, _ in rows]))
    return found


def other_names(situation: Situation) -> Iterator[Finding]:
    """What the nodes think of each other's names."""
    if not situation.is_long or not situation.has_machines:
        return
    networks = _networks(situation)
    for subject in situation.nodes:
        others = [(n, net) for n, net in networks if n.machine != subject.machine]
        deaf = {
            n.name: net.unresolved[subject.name]
            for n, net in others
            if subject.name in net.unresolved
        }
        if deaf:
            yield Finding(
                level=Level.WARNING,
                cause="name-not-resolved",
                error=f"{names_of(list(deaf))} can't find the address of {subject.name}",
                at=names_of(list(deaf)),
                because=tuple(dict.fromkeys(deaf.values()))[:3],
                hint=f"a line for {subject.name} in /etc/hosts or the name server; muster itself uses addresses",
                weight=21,
            )
        yield from _views_of(subject, others)


def _views_of(
    subject: NodeView, others: Sequence[tuple[NodeView, InterfaceFacts]]
) -> Iterator[Finding]:
    seen = {
        n.name: tuple(sorted(net.names[subject.name]))
        for n, net in others
        if subject.name in net.names
    }
    wrong = [name for name, addresses in seen.items() if all(_is_loopback(a) for a in addresses)]
    if wrong:
        yield Finding(
            level=Level.WARNING,
            cause="loopback-address",
            error=f"on {names_of(wrong)} the name {subject.name} means the node itself: {seen[wrong[0]][0]}",
            at=names_of(wrong),
            hint=f"mend the line of {subject.name} in /etc/hosts there",
            weight=26,
        )
    views = differ({k: v for k, v in seen.items() if k not in wrong}, "", ", ".join)
    if views is not None:
        yield Finding(
            level=Level.WARNING,
            cause="names-differ",
            error=f"the nodes have different addresses for {subject.name}: {views.text}",
            at=names_of(views.odd),
            hint="one /etc/hosts or one name server for all nodes",
            weight=20,
        )


def slow_names(situation: Situation) -> Iterator[Finding]:
    """A name server that does not answer delays every start."""
    slow = {n.name: net.name_s for n, net in _networks(situation) if net.name_s >= _SLOW_NAME_S}
    if slow:
        worst = max(slow.values())
        yield Finding(
            level=_level(situation),
            cause="slow-names",
            error=f"looking up a name takes {worst:.1f} s on {names_of(list(slow))}",
            at=names_of(list(slow)),
            because=(
                "a name server in /etc/resolv.conf does not answer; every process that looks up a name waits",
            ),
            hint="remove the dead server, or export RES_OPTIONS='timeout:1 attempts:1'",
        )


def mtus(situation: Situation) -> Iterator[Finding]:
    """Different MTU on one network: large packets of one node may be lost on the way to another."""
    values = {
        n.name: net.mtu[n.interface]
        for n, net in _networks(situation)
        if n.interface is not None and n.interface in net.mtu
    }
    found = differ(values, "an MTU of")
    if found is not None and situation.has_machines:
        yield Finding(
            level=Level.WARNING,
            cause="mtu-differs",
            error=f"the interfaces between the nodes have different MTUs: {found.text}",
            at=names_of(found.odd),
            because=(
                "large packets of the one may not reach the other: small messages pass, gradients hang",
            ),
            hint="ip link set IFACE mtu N, the same on all nodes and on the switch",
            weight=35,
        )


def way_out(situation: Situation) -> Iterator[Finding]:
    """No default route: nothing can be downloaded from inside the job."""
    if not situation.is_long:
        return
    cut = [n.name for n, net in _networks(situation) if net.outside is None]
    if cut:
        yield Finding(
            level=Level.NOTE,
            cause="no-way-out",
            error=f"{names_of(cut)} {'has' if len(cut) == 1 else 'have'} no route to the outside",
            at=names_of(cut),
            because=("downloads of weights and data will fail inside of the job",),
            hint="fetch them before, on the login node; HF_HUB_OFFLINE=1 makes libraries fail at once",
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


RULES: Sequence[Rule] = (
    clocks,
    own_names,
    foreign_addresses,
    other_names,
    slow_names,
    mtus,
    way_out,
)
