"""Choose the network of a run: pure functions from interfaces and probes to one choice with its reasons.

A candidate is one interface per node: of one subnet, of one name, or those of the agents' own connections. So point-to-point
links and subnets that are routed into each other are candidates too; whether all nodes reach each other is for the probes
to say, never for the addresses.
"""

import ipaddress
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.model.text import few_of
from torchmuster.launcher.model.events import PairRow, Unused, significant


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """An interface of a node with its first address of one family.

    Attributes:
        prefix_bits: Prefix length of its network; 32 (128) for a point-to-point link.
        speed_mbit: Speed in Mbit/s as reported by the driver; None if it reports none.
    """

    name: str
    address: str
    prefix_bits: int
    speed_mbit: int | None = None
    is_up: bool = True


# Above 32 nodes a node calls the head, its two neighbours and 8 random ones, not all.
ALL_PAIRS_UP_TO = 32
RANDOM_PEERS = 8
# Every node of a ring sends 4 MiB for each candidate: 64 * 7 * 4 MiB is less than 2 GB.
RING_UP_TO = 64
MAX_CANDIDATES = 7


Members = tuple[Interface, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkNode:
    """The facts about one node before the probes; the head is the first node of a list.

    Attributes:
        used_address: The node's end of its agent's connection; on the head, the end that most
            others used.
        machine: An id that agents on the same machine share; empty: the node is its own machine.
    """

    name: str
    interfaces: tuple[Interface, ...]
    used_address: str | None = None
    machine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate for the run's network: one interface per node, in the order of the nodes."""

    members: tuple[Interface, ...]
    is_used: bool = False  # by the agents' own connections


def pair_row(pair: Any) -> PairRow:
    """Return the row for a measured pair: a `PairResult`, or a `Pair` of the doctor."""
    return (
        pair.source,
        pair.target,
        pair.why,
        round(pair.latency_s * 1e6) if pair.latency_s is not None else None,
        round(pair.bytes_per_s / 1e6, 1) if pair.bytes_per_s is not None else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """The result of one probe; `why` is None when the other node was reached.

    Attributes:
        candidate, source, target: Indices in the lists of candidates and nodes.
        latency_s: Half of the shortest round trip; None if not measured.
        bytes_per_s: Payload rate of one connection: a lower bound, measured in Python.
        stalled: A connection was opened, but then bytes did not arrive.
    """

    candidate: int
    source: int
    target: int
    why: str | None = None
    latency_s: float | None = None
    bytes_per_s: float | None = None
    stalled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The network of a run.

    Attributes:
        candidate: Its index in the list of candidates.
        latency_s: The largest measured latency; None if none was measured.
        bytes_per_s: The smallest measured bandwidth.
    """

    candidate: int
    members: tuple[Interface, ...]
    unused: tuple[Unused, ...]
    latency_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoNetwork:
    """No network connects all nodes: the error sentence, and what was tried."""

    what: str
    tried: tuple[str, ...]


CLEARLY = 1.5  # times as fast: less is noise


_CLEARLY_S = 0.00005  # of latency: less is how busy the nodes' cores were


_MAX_UNUSED = 16


_MAX_TRIED = 8


def network_of(interface: Interface) -> str:
    """Return the subnet of an interface as `10.10.0.0/24`."""
    text = f"{interface.address}/{interface.prefix_bits}"
    return str(ipaddress.ip_network(text, strict=False))


def find_candidates(nodes: Sequence[NetworkNode]) -> tuple[list[Candidate], list[Unused]]:
    """Return the candidates, likeliest first, and the interfaces that can't be part of one."""
    found: dict[tuple[str, ...], Candidate] = {}
    repeated: dict[str, str] = {}
    used = _used_members(nodes)
    by_name = _shared(nodes, lambda one: (one.name, ":" in one.address))  # and by family
    for members in [used, *_shared(nodes, network_of), *by_name]:
        if members is None:
            continue
        addresses = tuple(member.address for member in members)
        most = _most_repeated(nodes, addresses)
        if most > 1:
            for member in members:
                repeated.setdefault(member.name, f"same address on {most} nodes")
        else:
            is_used = members == used
            found.setdefault(addresses, Candidate(members=members, is_used=is_used))
    order = sorted(found.values(), key=_likelihood)
    kept, rest = order[:MAX_CANDIDATES], order[MAX_CANDIDATES:]
    tried = {member.name for candidate in kept for member in candidate.members}
    unused = {name: why for name, why in repeated.items() if name not in tried}
    for candidate in rest:
        for name in _names(candidate.members):
            if name not in tried:
                unused.setdefault(name, f"not tried, only {MAX_CANDIDATES} networks are")
    for name, missing in _missing(nodes).items():
        if name not in tried:
            unused.setdefault(name, f"no address on {missing}")
    return kept, [Unused(name=name, why=why) for name, why in unused.items()]


def _most_repeated(nodes: Sequence[NetworkNode], addresses: Sequence[str]) -> int:
    """Return how many machines share an address; agents on one machine count once."""
    machines: dict[str, set[str | int]] = {}
    for number, (node, address) in enumerate(zip(nodes, addresses, strict=True)):
        machines.setdefault(address, set()).add(node.machine or number)
    return max(len(mine) for mine in machines.values())


def _likelihood(candidate: Candidate) -> tuple[bool, bool, int, str]:
    is_ipv6 = ":" in candidate.members[0].address
    speed = min(member.speed_mbit or 0 for member in candidate.members)
    return (is_ipv6, not candidate.is_used, -speed, candidate.members[0].name)


def _used_members(nodes: Sequence[NetworkNode]) -> Members | None:
    members = []
    for node in nodes:
        mine = [i for i in _usable(node) if i.address == node.used_address]
        if not mine:
            return None
        members.append(mine[0])
    return tuple(members)


def _usable(node: NetworkNode) -> list[Interface]:
    return [interface for interface in node.interfaces if interface.is_up]


def _shared(
    nodes: Sequence[NetworkNode], key: Callable[[Interface], Hashable]
) -> Iterable[Members]:
    """Yield one interface per node for every key that all nodes have."""
    tables = [{key(one): one for one in reversed(_usable(node))} for node in nodes]
    for one in dict.fromkeys(map(key, _usable(nodes[0]))):
        if all(one in table for table in tables):
            yield tuple(table[one] for table in tables)


def _missing(nodes: Sequence[NetworkNode]) -> dict[str, str]:
    """Return, for every name that some node lacks, the first such node."""
    names = {i.name: None for node in nodes for i in node.interfaces}
    missing: dict[str, str] = {}
    for name in names:
        for node in nodes:
            if not any(i.name == name for i in _usable(node)):
                missing[name] = node.name
                break
    return missing


def draw_peers(num_nodes: int, seed: int) -> list[list[int]]:
    """Return each node's peers: all others, or the head, two neighbours and about 8 random nodes.

    The target connects back, so each pair is tried in both directions.
    """
    everyone = range(num_nodes)
    if num_nodes <= ALL_PAIRS_UP_TO:
        return [[other for other in everyone if other != node] for node in everyone]
    draw = random.Random(seed)
    peers: list[set[int]] = [set() for _ in everyone]
    for node in everyone:
        # Half of the random ones are drawn by this node, the other half draw it.
        for other in (0, (node + 1) % num_nodes, *draw.sample(everyone, RANDOM_PEERS // 2)):
            if other != node:
                peers[node].add(other)
                peers[other].add(node)
    return [sorted(mine) for mine in peers]


def measured_peer(node: int, num_nodes: int) -> int | None:
    """Return the node to which a node measures bandwidth, or None.

    That is the next one in a ring; with more than 64 nodes only nodes 0 and 1 measure each other.
    """
    if num_nodes <= RING_UP_TO:
        return (node + 1) % num_nodes
    return {0: 1, 1: 0}.get(node)


@dataclass(slots=True)
class NetworkFindings:
    """The results of the probes so far.

    Attributes:
        complete: (candidate, node) for each node that has finished all its calls on this candidate.
        results: By (candidate, source, target): failures and measurements; all other pairs
            connected.
    """

    complete: set[tuple[int, int]] = field(default_factory=set)
    results: dict[tuple[int, int, int], PairResult] = field(default_factory=dict)

    def add(self, results: Iterable[PairResult], complete: Iterable[tuple[int, int]]) -> None:
        """Add the results of one node."""
        self.results.update({(r.candidate, r.source, r.target): r for r in results})
        self.complete.update(complete)

    def results_of(self, candidate: int) -> list[PairResult]:
        """Return the failures and measurements on a candidate, ordered by source and target."""
        mine = [result for key, result in self.results.items() if key[0] == candidate]
        return sorted(mine, key=lambda r: (r.source, r.target))

    def failure(self, candidate: int, num_nodes: int) -> PairResult | None:
        """Return the first pair that failed or has not reported; None if all pairs connected."""
        mine = [r for key, r in self.results.items() if key[0] == candidate and r.why is not None]
        if mine:
            return min(mine, key=lambda r: (r.source, r.target))
        for node in range(num_nodes):
            if (candidate, node) not in self.complete:
                other = 0 if node else 1
                return PairResult(candidate=candidate, source=node, target=other, why="no answer")
        return None

    def bandwidth(self, candidate: int) -> float | None:
        """Return the smallest measured bandwidth in bytes/s."""
        mine = (r.bytes_per_s for key, r in self.results.items() if key[0] == candidate)
        return min((rate for rate in mine if rate is not None), default=None)

    def latency(self, candidate: int) -> float | None:
        """Return the largest measured latency in seconds."""
        mine = (r.latency_s for key, r in self.results.items() if key[0] == candidate)
        return max((latency for latency in mine if latency is not None), default=None)


def choose(
    nodes: Sequence[NetworkNode],
    candidates: Sequence[Candidate],
    findings: NetworkFindings,
    unused: Sequence[Unused] = (),
) -> Choice | NoNetwork:
    """Return the best network on which all probed pairs connected in both directions.

    Unfinished calls count as failed. IPv6 is chosen only if no IPv4 network is good.
    """
    failures = [findings.failure(number, len(nodes)) for number in range(len(candidates))]
    good = [number for number, failure in enumerate(failures) if failure is None]
    if not good:
        return _no_network(nodes, candidates, failures, unused)
    ipv4 = [n for n in good if ":" not in candidates[n].members[0].address]
    best = _best(candidates, findings, ipv4 or good)
    reasons = {u.name: u.why for u in unused}
    chosen = set(_names(candidates[best].members))
    for number, failure in enumerate(failures):
        reason = _why_slower(findings, best, number)
        if failure is not None:
            # By the later of the two: the head, where it is one, is where the reader sits.
            reason = f"not reachable from {nodes[max(failure.source, failure.target)].name}"
        for name in _names(candidates[number].members):
            reasons.setdefault(name, reason)
    left = [Unused(name=name, why=why) for name, why in reasons.items() if name not in chosen]
    return Choice(
        candidate=best,
        members=candidates[best].members,
        unused=tuple(left[:_MAX_UNUSED]),
        latency_s=findings.latency(best),
        bytes_per_s=findings.bandwidth(best),
    )


def _best(candidates: Sequence[Candidate], findings: NetworkFindings, good: Sequence[int]) -> int:
    fastest = max(findings.bandwidth(number) or 0.0 for number in good)
    good = [n for n in good if (findings.bandwidth(n) or 0.0) * CLEARLY >= fastest]
    latencies = [latency for n in good if (latency := findings.latency(n)) is not None]
    if latencies:
        limit = max(min(latencies) * CLEARLY, min(latencies) + _CLEARLY_S)
        good = [n for n in good if (findings.latency(n) or 0.0) <= limit] or good
    used = [number for number in good if candidates[number].is_used]
    return used[0] if used else good[0]


def _why_slower(findings: NetworkFindings, best: int, number: int) -> str:
    mine, its = findings.bandwidth(number), findings.bandwidth(best)
    if mine is None or its is None:
        return "not measured"
    if mine * CLEARLY < its:
        return f"slower ({gbit(mine)} Gbit/s)"
    return f"no faster ({gbit(mine)} Gbit/s)"


def gbit(bytes_per_s: float) -> str:
    """Return a bandwidth in Gbit/s with two significant digits."""
    return significant(bytes_per_s * 8 / 1e9)


def _names(members: Members) -> list[str]:
    return list(dict.fromkeys(member.name for member in members))


def describe(members: Members) -> tuple[str, str]:
    """Return a network's name (`eth0`, or `eth0, ens5`), and its subnet or number of subnets."""
    names = _names(members)
    name = few_of(names, 3)
    subnets = list(dict.fromkeys(network_of(member) for member in members))
    return name, subnets[0] if len(subnets) == 1 else f"{len(subnets)} subnets"


def _no_network(
    nodes: Sequence[NetworkNode],
    candidates: Sequence[Candidate],
    failures: Sequence[PairResult | None],
    unused: Sequence[Unused],
) -> NoNetwork:
    tried: list[str] = []
    for candidate, failure in zip(candidates, failures, strict=True):
        if failure is not None:
            target = candidate.members[failure.target]
            caller, called = nodes[failure.source].name, nodes[failure.target].name
            tried.append(
                f"{target.name}: {caller} calls {called} at {target.address}: {failure.why}"
            )
    tried += [f"{interface.name}: {interface.why}" for interface in unused]
    what = "no interface has an address of its own on every node"
    first = next((failure for failure in failures if failure is not None), None)
    if first is not None:
        pair = f"{nodes[first.source].name} and {nodes[first.target].name}"
        what = f"no network connects all nodes: {pair} don't reach each other"
    return NoNetwork(what=what, tried=tuple(tried[:_MAX_TRIED]))


def matches(variable: str, value: str, names: Sequence[str]) -> list[str]:
    """Return the interfaces that a user's value selects, in NCCL's grammar or as plain names."""
    if not variable.startswith("NCCL"):
        words = [word.strip() for word in value.split(",")]
        return [name for name in names if name in words]
    is_not, value = value.startswith("^"), value.removeprefix("^")
    is_exact, value = value.startswith("="), value.removeprefix("=")
    words = [word.strip() for word in value.split(",") if word.strip()]

    def fits(name: str) -> bool:
        return any(name == word if is_exact else name.startswith(word) for word in words)

    return [name for name in names if fits(name) != is_not]
