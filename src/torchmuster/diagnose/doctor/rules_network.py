"""Checks of names, addresses, clocks and fabrics: many problems show only across machines."""

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Any

from torchmuster.diagnose.doctor.checks import LONG, MACHINES, TEXTS, Check, Equal, NodePart, look
from torchmuster.diagnose.doctor.show import NodeView, Rule, Situation, differ, show_bytes
from torchmuster.diagnose.finding import Finding, Level, names_of
from torchmuster.launcher.facts.collect import CollectedFacts

# InfiniBand, RoCE, Slingshot and EFA: which exist, and which NCCL would use.


BUILT_IN_NETWORKS = ("IB", "SOCKET")


def _variable(seen: NodePart, name: str) -> str:
    facts = seen.node.facts
    return facts.environment.variables.get(name, "") if facts and facts.environment else ""


def _has_gpus(seen: NodePart) -> bool:
    gpu = seen.node.facts.gpu if seen.node.facts else None
    return bool(gpu and gpu.num_devices)


def _plugins(seen: NodePart) -> Sequence[str]:
    """Return NCCL's network plugins; a placeholder if they are not known."""
    facts = seen.node.facts
    return facts.environment.plugins if facts and facts.environment else ("?",)


def _active(seen: NodePart, kind: str = "") -> list[Any]:
    return [p for p in seen.facts.rdma if p.state == "ACTIVE" and kind in ("", p.kind)]


def _num_active(seen: NodePart) -> int:
    return sum(port.name not in seen.facts.efa for port in _active(seen))


def _is_down(seen: NodePart) -> bool:
    net = seen.facts
    return _has_gpus(seen) and bool(net.rdma) and not _num_active(seen) and not net.efa


def _ports_differ(situation: Situation) -> bool:
    return not any(_is_down(seen) for seen in look(situation, "network"))


def _bare(seen: NodePart) -> list[str]:
    """Return the active RoCE ports without an address, on nodes with GPUs and without EFA."""
    bare = [port.name for port in _active(seen, "Ethernet") if not port.num_gids]
    return bare if _has_gpus(seen) and not seen.facts.efa else []


def _wrong_provider(seen: NodePart) -> dict[str, str] | None:
    """Return why FI_PROVIDER does not fit, and the fix.

    The variable is often copied from instructions for another machine.
    """
    wanted = _variable(seen, "FI_PROVIDER").lower()
    named = {word.strip().lstrip("^") for word in wanted.split(",") if word.strip()}
    if not named or wanted.startswith("^"):
        return None
    why, fix = "", "unset FI_PROVIDER"
    if seen.facts.cxi and "cxi" not in named:
        why, fix = "this node's fabric is Slingshot", "unset FI_PROVIDER, or FI_PROVIDER=cxi"
    elif "efa" in named and not seen.facts.efa:
        why = "there is no EFA device: only AWS has them"
    elif "cxi" in named and not seen.facts.cxi:
        why = "there is no Slingshot device (/sys/class/cxi)"
    return {"wanted": wanted, "why": why, "fix": fix} if why else None


def _missing_plugin(seen: NodePart) -> tuple[Level, str, str] | None:
    """Return the level, the variable that requires a missing plugin, and the plugin's file."""
    facts = seen.node.facts
    if not _has_gpus(seen) or not facts or not facts.environment:
        return None
    network, name = _variable(seen, "NCCL_NET"), _variable(seen, "NCCL_NET_PLUGIN")
    if network and network.upper() not in BUILT_IN_NETWORKS and not _plugins(seen):
        return Level.FAILURE, f"NCCL_NET={network}", "libnccl-net*.so"
    is_name = name and name.lower() != "none" and "/" not in name
    if is_name and not any(name in plugin for plugin in _plugins(seen)):
        file = name if ".so" in name else f"libnccl-net-{name}.so"
        return Level.WARNING, f"NCCL_NET_PLUGIN={name}", file
    return None


def _plugin_level(seen: NodePart) -> Level | None:
    missing = _missing_plugin(seen)
    return missing[0] if missing is not None else None


def _plugin_words(seen: NodePart) -> dict[str, Any]:
    _, asked, file = _missing_plugin(seen) or (None, "", "")
    return {"asked": asked, "file": file}


def _uses_tcp(seen: NodePart, kind: str) -> bool:
    """Return whether there is a fabric that NCCL can't use without a plugin."""
    is_wanted = _variable(seen, "NCCL_NET").upper() != "SOCKET"
    return _has_gpus(seen) and bool(getattr(seen.facts, kind)) and not _plugins(seen) and is_wanted


def _without_plugin(kind: str, fabric: str) -> Check:
    return Check(
        TEXTS["no-plugin-for-fabric"],
        bad=lambda s: _uses_tcp(s, kind),
        words=lambda _: {"fabric": fabric},
    )


def _memlock(seen: NodePart) -> int:
    """Return how many bytes may be locked; -1 for any number, or where RDMA is not used."""
    system = seen.node.facts.system if seen.node.facts else None
    if system is None or not _has_gpus(seen) or not _active(seen):
        return -1
    return system.limits.get("memlock", -1)


def _lacks_verbs(seen: NodePart) -> bool:
    environment = seen.node.facts.environment if seen.node.facts else None
    has_ports = _has_gpus(seen) and bool(_active(seen, "InfiniBand"))
    return environment is not None and has_ports and not environment.verbs


def network_in_use(situation: Situation) -> Iterator[Finding]:
    """Note the network that NCCL will use, in the long form."""
    seen = look(situation, "network") if situation.is_long else []
    chosen = {
        s.node.name: network_of(s.node.facts)
        for s in seen
        if _has_gpus(s) and s.node.facts and s.node.facts.environment
    }
    for word in dict.fromkeys(chosen.values()):
        names = [name for name, value in chosen.items() if value == word]
        yield TEXTS["network-used"].finding([], word=word, names=names_of(names))


def network_of(facts: CollectedFacts) -> str:
    """Return the network that NCCL would use between nodes, as far as known without starting it."""
    network, environment = facts.network, facts.environment
    if network is None or environment is None:
        return "an unknown network"
    asked = environment.variables.get("NCCL_NET", "")
    if asked.upper() == "SOCKET" or environment.variables.get("NCCL_IB_DISABLE") == "1":
        return "TCP sockets, as asked for"
    if environment.plugins and (network.cxi or network.efa):
        return f"libfabric ({'cxi' if network.cxi else 'efa'})"
    if (
        any(p.state == "ACTIVE" and p.name not in network.efa for p in network.rdma)
        and environment.verbs
    ):
        kinds = {p.kind for p in network.rdma if p.state == "ACTIVE"}
        return "InfiniBand" if "InfiniBand" in kinds else "RoCE"
    return "TCP sockets"


FABRIC_RULES: Sequence[Rule] = (
    Check(
        TEXTS["wrong-provider"],
        bad=lambda s: _wrong_provider(s) is not None,
        each=True,
        words=lambda s: _wrong_provider(s) or {},
    ),
    Check(TEXTS["plugin-missing"], level=_plugin_level, each=True, words=_plugin_words),
    _without_plugin("cxi", "Slingshot"),
    _without_plugin("efa", "EFA"),
    Check(TEXTS["rdma-down"], bad=_is_down),
    Equal(
        TEXTS["rdma-ports-differ"],
        when=_ports_differ,
        value=lambda s: _num_active(s) if _has_gpus(s) else None,
        show=lambda k: f"{k} active port{'s' if k != 1 else ''}",
    ),
    Check(
        TEXTS["roce-without-address"],
        bad=lambda s: bool(_bare(s)),
        each=True,
        words=lambda s: {"bare": ", ".join(_bare(s)[:4])},
    ),
    Check(
        TEXTS["rdma-closed"],
        bad=lambda s: _has_gpus(s) and bool(s.facts.rdma) and not s.facts.has_rdma_files,
        each=True,
    ),
    # RDMA has to lock memory; the usual limit is too low.
    Check(
        TEXTS["memlock"],
        bad=lambda s: _memlock(s) >= 0,
        worst=_memlock,
        words=lambda s: {"limit": show_bytes(_memlock(s))},
    ),
    Check(TEXTS["no-verbs"], bad=_lacks_verbs),
    network_in_use,
)


# torch's c10d rendezvous considers a node dead after 15 s of its own clock: 3 times 5 s.
CLOCK_WARNING_S, CLOCK_FAILURE_S = 2.0, 10.0
_SLOW_NAME_S = 2.0


def _level(seen: NodePart) -> Level:
    """Return WARNING in the long form only: workers of muster use addresses, not names."""
    return Level.WARNING if seen.situation.is_long else Level.NOTE


def _name_level(seen: NodePart) -> Level:
    """Return NOTE on one machine: nobody else uses its name before a job of several machines."""
    return _level(seen) if seen.situation.has_machines else Level.NOTE


def _names_matter(situation: Situation) -> bool:
    return situation.is_long or situation.has_machines


def clocks(situation: Situation) -> Iterator[Finding]:
    """Report clocks that differ: torchrun loses nodes, logs don't compare, certificates fail."""
    for node in situation.nodes:
        if node.clock_s is None or abs(node.clock_s) - node.clock_error_s < CLOCK_WARNING_S:
            continue
        is_far = abs(node.clock_s) - node.clock_error_s >= CLOCK_FAILURE_S
        yield TEXTS["clocks-differ"].finding(
            [node.name],
            level=Level.FAILURE if is_far else Level.WARNING,
            ahead_s=abs(node.clock_s),
            side="ahead of" if node.clock_s > 0 else "behind",
            error_s=max(node.clock_error_s, 0.001),
        )


def _name_is_loopback(seen: NodePart) -> bool:
    own = seen.facts.own_addresses
    return bool(own) and all(_is_loopback(address) for address in own)


def _outside(seen: NodePart) -> list[str]:
    """Return the addresses of a node's name if none of its interfaces has one of them."""
    outside = [a for a in seen.facts.own_addresses if not _is_loopback(a)]
    mine = {i.address for i in seen.facts.interfaces}
    return outside if mine and not mine & set(outside) else []


def shared_addresses(situation: Situation) -> Iterator[Finding]:
    """Report addresses that several machines have: those of container bridges."""
    networks = look(situation, "network")
    for address, name, nodes in _shared_addresses(networks) if situation.has_machines else ():
        named = [
            s.node.name for s in networks if s.node in nodes and address in s.facts.own_addresses
        ]
        yield TEXTS["bridge-address-named" if named else "bridge-address"].finding(
            [n.name for n in nodes],
            level=_level(networks[0]) if named else Level.NOTE,
            name=name,
            address=address,
            number=len(nodes),
            named=names_of(named),
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


def name_resolution(situation: Situation) -> Iterator[Finding]:
    """Report nodes that can't resolve each other's names, or resolve them differently."""
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
            yield TEXTS["name-not-resolved"].finding(
                list(deaf), name=subject.name, whys=list(dict.fromkeys(deaf.values()))[:3]
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
        yield TEXTS["name-means-itself"].finding(
            wrong, name=subject.name, address=seen[wrong[0]][0]
        )
    views = differ({k: v for k, v in seen.items() if k not in wrong}, "", ", ".join)
    if views is not None:
        yield TEXTS["names-differ"].finding(views.odd, name=subject.name, text=views.text)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


RULES: Sequence[Rule] = (
    clocks,
    # Nodes that use such a name connect to themselves.
    Check(TEXTS["name-is-loopback"], level=_name_level, when=_names_matter, bad=_name_is_loopback),
    Check(
        TEXTS["name-without-address"],
        level=_name_level,
        when=_names_matter,
        bad=lambda s: not s.facts.own_addresses,
        words=lambda s: {"why": s.facts.unresolved.get(s.facts.own_name, "no answer")},
    ),
    Check(
        TEXTS["name-of-nobody"],
        level=_level,
        when=MACHINES,
        bad=lambda s: bool(_outside(s)),
        each=True,
        words=lambda s: {
            "address": _outside(s)[0],
            "mine": ", ".join(sorted({i.address for i in s.facts.interfaces})),
        },
    ),
    shared_addresses,
    name_resolution,
    # A name server that does not answer delays every start.
    Check(
        TEXTS["slow-names"],
        level=_level,
        bad=lambda s: s.facts.name_s >= _SLOW_NAME_S,
        worst=lambda s: -s.facts.name_s,
    ),
    Equal(TEXTS["mtu-differs"], when=MACHINES, value=lambda s: s.facts.mtu.get(s.node.interface)),
    Check(TEXTS["no-way-out"], when=LONG, bad=lambda s: s.facts.outside is None),
)
