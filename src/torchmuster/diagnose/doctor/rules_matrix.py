"""Connections between nodes: a bad row means a node's outgoing connections, a bad column its incoming ones."""

import statistics
from collections.abc import Iterator, Sequence

from torchmuster.diagnose.doctor.show import Pair, Rule, Situation, names_of
from torchmuster.diagnose.finding import Finding, Level

_SLOW = 0.5
_MIN_BULK_BYTES = 1 << 20
_MANY = 4


def no_network(situation: Situation) -> Iterator[Finding]:
    """The survey before the start has found no network that connects all nodes."""
    if situation.no_network and not any(pair.why for pair in situation.pairs):
        what, *tried = situation.no_network
        yield Finding(
            level=Level.FAILURE,
            cause="network-unreachable",
            error=what,
            because=tuple(tried[:8]),
            hint="open all TCP ports between the nodes, or choose nodes of one network",
            is_certain=True,
            weight=100,
        )


def unreachable(situation: Situation) -> Iterator[Finding]:
    """Connections that were refused, or not answered."""
    bad = [pair for pair in _between(situation) if pair.why is not None and not pair.stalled]
    for group, words in _groups(situation, bad):
        whys = list(dict.fromkeys(pair.why for pair in group if pair.why))
        yield Finding(
            level=Level.FAILURE,
            cause=cause_of_call(whys),
            error=f"{words} fail on a random port: {whys[0]}",
            at=_where(situation, group),
            because=(_mechanism(whys[0]), *whys[1:4]),
            hint="open all TCP ports between the nodes (torch picks random ones): `nft list ruleset` or `iptables -S`"
            " on both, the cloud's security group, or choose another network",
            is_certain=True,
            weight=100,
        )


def black_holes(situation: Situation) -> Iterator[Finding]:
    """Connections on which small packets pass and large ones don't."""
    bad = [pair for pair in _between(situation) if pair.stalled]
    for group, words in _groups(situation, bad):
        yield Finding(
            level=Level.FAILURE,
            cause="mtu-black-hole",
            error=f"{words} are established, but large packets do not arrive",
            at=_where(situation, group),
            because=(
                group[0].why or "the transfer stalled",
                "a hop on the path drops packets as large as the nodes send them (MTU), without an error",
                *_mtus(situation, group),
            ),
            hint="set one MTU along the whole path: `ip link set IFACE mtu 1500` on the nodes,"
            " or jumbo frames on every switch port",
            is_certain=True,
            weight=99,
        )


def busy(situation: Situation) -> Iterator[Finding]:
    """Simulated nodes share one machine: missing answers are due to a lack of processors."""
    beyond = _between(situation)
    late = [pair for pair in situation.pairs if pair.why is not None and pair not in beyond]
    if late:
        yield Finding(
            level=Level.NOTE,
            cause="machine-busy",
            error=f"{len(late)} of {len(situation.pairs)} connections between nodes of one machine were not answered in time",
            because=tuple(dict.fromkeys(pair.why for pair in late if pair.why))[:3],
            hint="the machine is overloaded: use fewer simulated nodes",
        )


def _between(situation: Situation) -> list[Pair]:
    """Return the pairs of different machines."""
    nodes = situation.nodes
    return [p for p in situation.pairs if nodes[p.source].machine != nodes[p.target].machine]


def slow_pairs(situation: Situation) -> Iterator[Finding]:
    """A slow pair slows down every step."""
    if situation.bulk_bytes < _MIN_BULK_BYTES or not situation.has_machines:
        return
    rates = [pair.bytes_per_s for pair in situation.pairs if pair.bytes_per_s]
    if len(rates) < _MANY:
        return
    median = statistics.median(rates)
    slow = [p for p in situation.pairs if p.bytes_per_s and p.bytes_per_s < _SLOW * median]
    for group, words in _groups(situation, slow):
        worst = min(pair.bytes_per_s or 0.0 for pair in group)
        yield Finding(
            level=Level.WARNING,
            cause="slow-path",
            error=f"{words} are slow: {worst / 1e6:.0f} MB/s, the median of all pairs is {median / 1e6:.0f} MB/s",
            at=_where(situation, group),
            because=("a collective is as slow as its slowest pair",),
            hint="look for a link that fell back to a lower speed (`ethtool IFACE`), errors (`ip -s link`), other jobs",
            weight=30,
        )


def _groups(situation: Situation, bad: Sequence[Pair]) -> Iterator[tuple[list[Pair], str]]:
    """Return groups of pairs with a common end, and a name for each: the subject of a sentence."""
    names = [node.name for node in situation.nodes]
    left = list(bad)
    num_others = len(names) - 1
    if len(left) == len(names) * num_others and len(names) > 2:
        yield left, f"connections between all {len(names)} nodes"
        return
    if len(names) > 2:
        for node, name in enumerate(names):
            into = [p for p in left if p.target == node]
            if len(into) == num_others:
                yield (
                    into,
                    f"connections to {name} from all other nodes",
                )
                left = [p for p in left if p not in into]
            out = [p for p in left if p.source == node]
            if len(out) >= num_others - 1 and len(out) > 1:
                targets = names_of([names[p.target] for p in out])
                yield out, f"connections from {name} to {targets}"
                left = [p for p in left if p not in out]
    both = [p for p in left if any(q.source == p.target and q.target == p.source for q in left)]
    if both and len(both) == len(left) and len(both) == 2:
        yield both, f"connections between {names[both[0].source]} and {names[both[0].target]}"
        return
    if len(left) > _MANY:
        yield left, f"connections of {len(left)} of {len(names) * num_others} pairs of nodes"
        return
    for pair in left:
        yield [pair], f"connections from {names[pair.source]} to {names[pair.target]}"


def _where(situation: Situation, group: Sequence[Pair]) -> str:
    names = [node.name for node in situation.nodes]
    shown = [f"{names[pair.source]} to {names[pair.target]}" for pair in group[:6]]
    interfaces = {node.interface for node in situation.nodes if node.interface}
    over = f", on {min(interfaces)}" if len(interfaces) == 1 else ""
    more = f" and {len(group) - 6} more" if len(group) > 6 else ""
    return f"{', '.join(shown)}{more}{over}"


def cause_of_call(whys: Sequence[str]) -> str:
    """Return the cause of connections that failed for these reasons."""
    return (
        "port-blocked"
        if any("answer" in w or "refused" in w for w in whys)
        else "network-unreachable"
    )


def _mechanism(why: str) -> str:
    if "answer" in why:
        return "no answer at all: a firewall drops the packets, or no host has that address"
    if "refused" in why:
        return "the port was open: a firewall rejects the packets"
    if "no route" in why or "unreachable" in why:
        return "there is no route: another network, or a link that is down"
    return "the connection ended during the handshake"


def _mtus(situation: Situation, group: Sequence[Pair]) -> list[str]:
    ends = sorted({end for pair in group for end in (pair.source, pair.target)})
    found = []
    for node in (situation.nodes[end] for end in ends):
        network = node.facts.network if node.facts else None
        if network is not None and node.interface in network.mtu:
            found.append(
                f"{node.name}: {node.interface} has MTU {network.mtu[node.interface or '']}"
            )
    return found[:4]


RULES: Sequence[Rule] = (no_network, unreachable, black_holes, busy, slow_pairs)
