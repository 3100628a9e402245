"""InfiniBand, RoCE, Slingshot and EFA: what exists, and what NCCL would use."""

from collections.abc import Iterator, Sequence
from typing import Any

from torchmuster.diagnose.doctor.checks import Check, Equal, NodePart, look
from torchmuster.diagnose.doctor.show import Rule, Situation, names_of, show_bytes
from torchmuster.diagnose.facts.collect import CollectedFacts
from torchmuster.diagnose.finding import Finding, Level

BUILT_IN_NETWORKS = ("IB", "SOCKET")


def _variable(seen: NodePart, name: str) -> str:
    facts = seen.node.facts
    return facts.environment.variables.get(name, "") if facts and facts.environment else ""


def _has_gpus(seen: NodePart) -> bool:
    gpu = seen.node.facts.gpu if seen.node.facts else None
    return bool(gpu and gpu.num_devices)


def _plugins(seen: NodePart) -> Sequence[str]:
    """Return NCCL's network plugins; not empty if nothing is known about them."""
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
    """Return the RoCE ports without an address."""
    bare = [port.name for port in _active(seen, "Ethernet") if not port.num_gids]
    return bare if _has_gpus(seen) and not seen.facts.efa else []


def _wrong_provider(seen: NodePart) -> dict[str, str] | None:
    """Return why FI_PROVIDER does not fit, and the fix: it is often copied from instructions for another machine."""
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
    """Return how much memory may be locked where RDMA is used; -1 for any amount."""
    system = seen.node.facts.system if seen.node.facts else None
    if system is None or not _has_gpus(seen) or not _active(seen):
        return -1
    return system.limits.get("memlock", -1)


def _lacks_verbs(seen: NodePart) -> bool:
    environment = seen.node.facts.environment if seen.node.facts else None
    has_ports = _has_gpus(seen) and bool(_active(seen, "InfiniBand"))
    return environment is not None and has_ports and not environment.verbs


def would_use(situation: Situation) -> Iterator[Finding]:
    """A note on the network that NCCL will use."""
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


RULES: Sequence[Rule] = (
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
    would_use,
)
