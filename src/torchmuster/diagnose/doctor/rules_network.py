"""Checks of names, addresses, clocks and fabrics: many problems show only across machines."""

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Any

from torchmuster.diagnose.doctor.checks import LONG, MACHINES, Check, Equal, NodePart, look
from torchmuster.diagnose.doctor.show import NodeView, Rule, Situation, differ, names_of, show_bytes
from torchmuster.diagnose.finding import Finding, Level
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
        of="network",
        cause="network-plugin",
        level=Level.WARNING,
        bad=lambda s: _uses_tcp(s, kind),
        error=f"{{nodes}} {{has}} {fabric}, but not NCCL's plugin for it",
        because=("no libnccl-net*.so was found: NCCL uses TCP, 2 to 10 times slower",),
        hint="module load aws-ofi-nccl, or build it; NCCL_DEBUG=INFO shows `Using network ...`",
        weight=32,
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
        yield Finding(
            level=Level.NOTE,
            cause="network-used",
            error=f"NCCL will use {word} on {names_of(names)}",
        )


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
        of="network",
        cause="wrong-provider",
        level=Level.FAILURE,
        bad=lambda s: _wrong_provider(s) is not None,
        each=True,
        error="FI_PROVIDER={wanted} does not fit the network of {nodes}",
        words=lambda s: _wrong_provider(s) or {},
        because=("{why}", "NCCL's libfabric plugin fails, or falls back to slow sockets"),
        hint="{fix}",
        weight=58,
    ),
    Check(
        of="network",
        cause="network-plugin",
        level=_plugin_level,
        each=True,
        error="{asked} asks for a plugin that {nodes} does not have",
        words=_plugin_words,
        because=("no {file} on LD_LIBRARY_PATH or in the system's folders",),
        hint="load the site's module that has it (aws-ofi-nccl), or unset the variable",
        weight=57,
    ),
    _without_plugin("cxi", "Slingshot"),
    _without_plugin("efa", "EFA"),
    Check(
        of="network",
        cause="ib-path",
        level=Level.WARNING,
        bad=_is_down,
        error="no RDMA port is active on {nodes}",
        because=("NCCL falls back to TCP there",),
        hint="ibstat; ask the site: cable, subnet manager",
        weight=31,
    ),
    Equal(
        of="network",
        cause="ib-path",
        level=Level.WARNING,
        when=_ports_differ,
        value=lambda s: _num_active(s) if _has_gpus(s) else None,
        show=lambda k: f"{k} active port{'s' if k != 1 else ''}",
        error="the nodes have different numbers of active RDMA ports: {text}",
        hint="NCCL_IB_HCA names those that all nodes have",
        weight=31,
    ),
    Check(
        of="network",
        cause="ib-path",
        level=Level.WARNING,
        bad=lambda s: bool(_bare(s)),
        each=True,
        error="RoCE on {nodes} has no address: {bare}",
        words=lambda s: {"bare": ", ".join(_bare(s)[:4])},
        because=("no global id (GID) is set: NCCL's first transfer fails with error 12",),
        hint="give the interface an address; NCCL_IB_GID_INDEX=3 is the usual one of RoCE v2",
        weight=31,
    ),
    Check(
        of="network",
        cause="ib-path",
        level=Level.WARNING,
        bad=lambda s: _has_gpus(s) and bool(s.facts.rdma) and not s.facts.has_rdma_files,
        each=True,
        error="{nodes} has RDMA devices that this process can't open",
        because=("/dev/infiniband is missing: usual inside of a container",),
        hint="docker run --device=/dev/infiniband --ulimit memlock=-1",
        weight=31,
    ),
    # RDMA has to lock memory; the usual limit is too low.
    Check(
        of="network",
        cause="memlock",
        level=Level.WARNING,
        bad=lambda s: _memlock(s) >= 0,
        worst=_memlock,
        error="a process may lock only {limit} of memory on {nodes}",
        words=lambda s: {"limit": show_bytes(_memlock(s))},
        because=("RDMA needs more: `ibv_reg_mr: Cannot allocate memory`",),
        hint="ulimit -l unlimited; limits.conf does not apply to daemons: slurmd needs LimitMEMLOCK=infinity,"
        " docker --ulimit memlock=-1",
        weight=31,
    ),
    Check(
        of="network",
        cause="network-plugin",
        level=Level.WARNING,
        bad=_lacks_verbs,
        error="{nodes} {has} InfiniBand, but no libibverbs",
        because=("NCCL then uses TCP without a message",),
        hint="apt-get install libibverbs1 ibverbs-providers in the image",
        weight=31,
    ),
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
    # Nodes that use such a name connect to themselves.
    Check(
        of="network",
        cause="loopback-address",
        level=_name_level,
        when=_names_matter,
        bad=_name_is_loopback,
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
        when=_names_matter,
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
    name_resolution,
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
