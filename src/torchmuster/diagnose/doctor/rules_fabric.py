"""InfiniBand, RoCE, Slingshot and EFA: what is there, and what NCCL would use of it."""

from collections.abc import Iterator, Sequence

from torchmuster.diagnose.doctor.situation import (
    NodeView,
    Rule,
    Situation,
    differ,
    has,
    names_of,
    show_bytes,
)
from torchmuster.diagnose.facts.collect import CollectedFacts
from torchmuster.diagnose.finding import Finding, Level

BUILT_IN_NETWORKS = ("IB", "SOCKET")


def _parts(node: NodeView) -> CollectedFacts | None:
    facts = node.facts
    return facts if facts and facts.network and facts.environment else None


def _with_gpus(situation: Situation) -> list[NodeView]:
    return [n for n in situation.known if n.facts and n.facts.gpu and n.facts.gpu.num_devices]


def provider(situation: Situation) -> Iterator[Finding]:
    """FI_PROVIDER from a recipe for another machine."""
    for node in situation.known:
        facts = _parts(node)
        if facts is None or facts.environment is None or facts.network is None:
            continue
        wanted = facts.environment.variables.get("FI_PROVIDER", "").lower()
        named = {word.strip().lstrip("^") for word in wanted.split(",") if word.strip()}
        if not named or wanted.startswith("^"):
            continue
        if facts.network.cxi and "cxi" not in named:
            yield _wrong(
                node,
                wanted,
                "this node's fabric is Slingshot",
                "unset FI_PROVIDER, or FI_PROVIDER=cxi",
            )
        elif "efa" in named and not facts.network.efa:
            yield _wrong(
                node, wanted, "there is no EFA device: it is of AWS only", "unset FI_PROVIDER"
            )
        elif "cxi" in named and not facts.network.cxi:
            yield _wrong(
                node, wanted, "there is no Slingshot device (/sys/class/cxi)", "unset FI_PROVIDER"
            )


def _wrong(node: NodeView, wanted: str, why: str, hint: str) -> Finding:
    return Finding(
        level=Level.FAILURE,
        cause="wrong-provider",
        error=f"FI_PROVIDER={wanted} does not fit the network of {node.name}",
        at=node.name,
        because=(why, "NCCL's libfabric plugin fails, or falls back to slow sockets"),
        hint=hint,
        weight=58,
    )


def plugin(situation: Situation) -> Iterator[Finding]:
    """A network that was asked for and that NCCL can't load."""
    for node in _with_gpus(situation):
        facts = _parts(node)
        if facts is None or facts.environment is None:
            continue
        variables, plugins = facts.environment.variables, facts.environment.plugins
        network = variables.get("NCCL_NET", "")
        name = variables.get("NCCL_NET_PLUGIN", "")
        if network and network.upper() not in BUILT_IN_NETWORKS and not plugins:
            asked, file = f"NCCL_NET={network}", "libnccl-net*.so"
        elif (
            name
            and name.lower() != "none"
            and "/" not in name
            and not any(name in p for p in plugins)
        ):
            asked, file = (
                f"NCCL_NET_PLUGIN={name}",
                name if ".so" in name else f"libnccl-net-{name}.so",
            )
        else:
            continue
        yield Finding(
            level=Level.FAILURE if asked.startswith("NCCL_NET=") else Level.WARNING,
            cause="network-plugin",
            error=f"{asked} asks for a plugin that {node.name} does not have",
            at=node.name,
            because=(f"no {file} on LD_LIBRARY_PATH or in the system's folders",),
            hint="load the module of the site that has it (aws-ofi-nccl), or unset the variable",
            weight=57,
        )


def fabric_plugin(situation: Situation) -> Iterator[Finding]:
    """Slingshot and EFA are used by NCCL only through a plugin; without it everything goes over TCP."""
    for kind in ("cxi", "efa"):
        rows = []
        for node in _with_gpus(situation):
            facts = _parts(node)
            if facts and facts.network and facts.environment:
                devices = facts.network.cxi if kind == "cxi" else facts.network.efa
                if devices and not facts.environment.plugins and not _is_tcp(facts):
                    rows.append(node.name)
        if rows:
            fabric = "Slingshot" if kind == "cxi" else "EFA"
            yield Finding(
                level=Level.WARNING,
                cause="network-plugin",
                error=f"{names_of(rows)} {has(rows)} {fabric}, but not the plugin with which NCCL uses it",
                at=names_of(rows),
                because=("no libnccl-net*.so was found: NCCL uses TCP, 2 to 10 times slower",),
                hint="module load aws-ofi-nccl, or build it; NCCL_DEBUG=INFO shows `Using network ...`",
                weight=32,
            )


def _is_tcp(facts: CollectedFacts) -> bool:
    asked = facts.environment.variables.get("NCCL_NET", "") if facts.environment else ""
    return asked.upper() == "SOCKET"


def ports(situation: Situation) -> Iterator[Finding]:
    """RDMA devices that are down, differ, or can't be opened."""
    rows = [(n, n.facts.network) for n in _with_gpus(situation) if n.facts and n.facts.network]
    active = {
        n.name: sum(p.state == "ACTIVE" for p in net.rdma if p.name not in net.efa)
        for n, net in rows
    }
    down = [
        name
        for (n, net), name in zip(rows, active, strict=True)
        if net.rdma and not active[name] and not net.efa
    ]
    if down:
        yield Finding(
            level=Level.WARNING,
            cause="ib-path",
            error=f"no RDMA port is active on {names_of(down)}",
            at=names_of(down),
            because=("NCCL falls back to TCP there",),
            hint="ibstat; ask the site: cable, subnet manager",
            weight=31,
        )
    found = differ(active, "", lambda k: f"{k} active port{'s' if k != 1 else ''}")
    if found is not None and not down:
        yield Finding(
            level=Level.WARNING,
            cause="ib-path",
            error=f"the nodes have different numbers of active RDMA ports: {found.text}",
            at=names_of(found.odd),
            hint="NCCL_IB_HCA names those that all nodes have",
            weight=31,
        )


def closed_ports(situation: Situation) -> Iterator[Finding]:
    """RoCE without an address, and devices that can't be opened."""
    rows = [(n, n.facts.network) for n in _with_gpus(situation) if n.facts and n.facts.network]
    for node, net in rows:
        bare = [
            p.name
            for p in net.rdma
            if p.kind == "Ethernet" and p.state == "ACTIVE" and not p.num_gids
        ]
        if bare and not net.efa:
            yield Finding(
                level=Level.WARNING,
                cause="ib-path",
                error=f"RoCE on {node.name} has no address: {', '.join(bare[:4])}",
                at=node.name,
                because=("no global id (GID) is set: NCCL's first transfer fails with error 12",),
                hint="give the interface an address; NCCL_IB_GID_INDEX=3 is the usual one of RoCE v2",
                weight=31,
            )
        if net.rdma and not net.has_rdma_files:
            yield Finding(
                level=Level.WARNING,
                cause="ib-path",
                error=f"{node.name} has RDMA devices that this process can't open",
                at=node.name,
                because=("/dev/infiniband is missing: usual inside of a container",),
                hint="docker run --device=/dev/infiniband --ulimit memlock=-1",
                weight=31,
            )


def locked_memory(situation: Situation) -> Iterator[Finding]:
    """RDMA has to lock memory; the usual limit is too low."""
    rows = {}
    for node in _with_gpus(situation):
        facts = node.facts
        if (
            facts
            and facts.network
            and facts.system
            and any(p.state == "ACTIVE" for p in facts.network.rdma)
        ):
            limit = facts.system.limits.get("memlock", -1)
            if limit >= 0:
                rows[node.name] = limit
    if rows:
        yield Finding(
            level=Level.WARNING,
            cause="memlock",
            error=f"a process may lock only {show_bytes(min(rows.values()))} of memory on {names_of(list(rows))}",
            at=names_of(list(rows)),
            because=("RDMA needs more: `ibv_reg_mr: Cannot allocate memory`",),
            hint="ulimit -l unlimited; limits.conf does not apply to daemons: slurmd needs LimitMEMLOCK=infinity,"
            " docker --ulimit memlock=-1",
            weight=31,
        )


def verbs(situation: Situation) -> Iterator[Finding]:
    """InfiniBand is used only where libibverbs is installed."""
    rows = [
        n.name
        for n in _with_gpus(situation)
        if (facts := _parts(n)) and facts.network and facts.environment
        and any(p.state == "ACTIVE" and p.kind == "InfiniBand" for p in facts.network.rdma)
        and not facts.environment.verbs
    ]  # fmt: skip
    if rows:
        yield Finding(
            level=Level.WARNING,
            cause="network-plugin",
            error=f"{names_of(rows)} {'has' if len(rows) == 1 else 'have'} InfiniBand, but no libibverbs",
            at=names_of(rows),
            because=("NCCL then uses TCP without a word",),
            hint="apt-get install libibverbs1 ibverbs-providers in the image",
            weight=31,
        )


def would_use(situation: Situation) -> Iterator[Finding]:
    """What NCCL would use, for those who ask."""
    if not situation.is_long:
        return
    chosen = {n.name: network_of(f) for n in _with_gpus(situation) if (f := _parts(n))}
    for word in dict.fromkeys(chosen.values()):
        names = [name for name, value in chosen.items() if value == word]
        yield Finding(
            level=Level.NOTE,
            cause="network-used",
            error=f"NCCL will use {word} on {names_of(names)}",
        )


def network_of(facts: CollectedFacts) -> str:
    """Return the network that NCCL would use between nodes, as far as it can be told without starting it."""
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


RULES: Sequence[Rule] = (
    provider,
    plugin,
    fabric_plugin,
    ports,
    closed_ports,
    locked_memory,
    verbs,
    would_use,
)
