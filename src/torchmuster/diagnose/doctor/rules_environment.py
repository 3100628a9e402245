"""Variables that users and schedulers set: their grammar, and whether all nodes have them."""

import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torchmuster.diagnose.doctor.checks import LONG, Check, NodePart, look
from torchmuster.diagnose.doctor.grammar import meant, problem_of
from torchmuster.diagnose.doctor.show import Rule, Situation, differ, names_of
from torchmuster.diagnose.finding import Finding, Level
from torchmuster.model.network import VARIABLES, matches

# These may differ from node to node.
_OWN = {
    *VARIABLES,
    "CUDA_VISIBLE_DEVICES",
    "NCCL_IB_HCA",
    "NCCL_DEBUG_FILE",
    "NCCL_TOPO_FILE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "OMP_NUM_THREADS",
}
_LITTLE_S = 600.0


def grammars(situation: Situation) -> Iterator[Finding]:
    """An invalid value is ignored by the program that reads it, mostly without a message."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for one in look(situation, "environment"):
        for name, value in one.facts.variables.items():
            problem = problem_of(name, value)
            if problem is not None:
                seen.setdefault((name, value, problem), []).append(one.node.name)
    for (name, value, problem), nodes in seen.items():
        yield Finding(
            level=Level.WARNING,
            cause="bad-variable",
            error=f"{name}={value} is not a valid value",
            at=names_of(nodes),
            because=(problem,),
            hint=f"unset {name}, or correct it",
            weight=34,
        )


def misspelt(situation: Situation) -> Iterator[Finding]:
    """A variable that no program reads."""
    seen: dict[tuple[str, str], list[str]] = {}
    for one in look(situation, "environment"):
        for name in one.facts.variables:
            likely = meant(name)
            if likely is not None:
                seen.setdefault((name, likely), []).append(one.node.name)
    for (name, likely), nodes in seen.items():
        yield Finding(
            level=Level.NOTE,
            cause="bad-variable",
            error=f"no program reads {name}: {likely} was probably meant",
            at=names_of(nodes),
        )


def interfaces(situation: Situation) -> Iterator[Finding]:
    """A variable that names no interface of its node; before a start the network survey reports it."""
    if not situation.is_long:
        return
    for seen in look(situation, "environment"):
        node, environment = seen.node, seen.facts
        network = node.facts.network if node.facts else None
        if network is None or not network.links:
            continue
        for name in VARIABLES:
            value = environment.variables.get(name)
            if (
                value
                and problem_of(name, value) is None
                and not matches(name, value, network.links)
            ):
                there = ", ".join(link for link in network.links if link != "lo")
                yield Finding(
                    level=Level.FAILURE if situation.has_machines else Level.WARNING,
                    cause="no-such-interface",
                    error=f"{name}={value} names no interface of {node.name}",
                    at=node.name,
                    because=(f"it has {there}",),
                    hint=f"unset {name}: muster sets it on each node to the interface that reaches the others",
                    weight=56,
                )


def missing(situation: Situation) -> Iterator[Finding]:
    """Variables that differ between nodes or exist on some only."""
    rows = {seen.node.name: seen.facts.variables for seen in look(situation, "environment")}
    names = {name for variables in rows.values() for name in variables if name not in _OWN}
    for name in sorted(names):
        values = {node: variables.get(name, "") for node, variables in rows.items()}
        found = differ(values, "", lambda v: f"`{v}`" if v else "none")
        if found is not None:
            yield Finding(
                level=Level.WARNING,
                cause="environment-differs",
                error=f"{name} is not the same on all nodes: {found.text}",
                at=names_of(found.odd),
                because=("nodes that choose different algorithms or networks wait for each other",),
                hint="set it where all nodes get it: the job script, or `environment` of the engine in muster.toml",
                weight=28,
            )


def _time_is_short(seen: NodePart) -> bool:
    left_s, total_s = seen.facts.left_s, seen.facts.total_s
    # A job that was made for a few minutes has what was asked for.
    is_used_up = total_s is None or (left_s or 0.0) < total_s / 2
    return left_s is not None and left_s < _LITTLE_S and is_used_up


def _time(seen: NodePart) -> dict[str, Any]:
    total_s = seen.facts.total_s
    of = f" of {total_s:.0f} s" if total_s is not None else ""
    return {"left_s": max(seen.facts.left_s, 0.0), "of": of}


def _is_head(seen: NodePart) -> bool:
    return look(seen.situation, "environment")[0].node is seen.node


def _nodefile(seen: NodePart) -> dict[str, Any]:
    lines, hosts = seen.facts.nodefile or (0, 0)
    return {"lines": lines, "hosts": hosts, "used": len(seen.situation.nodes)}


def _tasks(seen: NodePart) -> dict[str, Any]:
    words = [seen.facts.scheduler.get(name, "") for name in ("SLURM_NTASKS", "SLURM_NNODES")]
    tasks, num_nodes = (int(word) if word.isdecimal() else 0 for word in words)
    return {"tasks": tasks, "num_nodes": num_nodes}


def _starts_several(seen: NodePart) -> bool:
    found = _tasks(seen)
    return _is_head(seen) and 0 < found["num_nodes"] < found["tasks"]


def _is_exempt(host: str, no_proxy: str) -> bool:
    """Say whether a host is among those that are called without a proxy.

    Source: curl(1), "NO_PROXY": names and their endings, networks; Python's urllib.request and requests read it alike.
    """
    return any(_matches_entry(host, entry.strip().lower()) for entry in no_proxy.split(","))


def _matches_entry(host: str, entry: str) -> bool:
    name = re.sub(r":\d+$", "", entry).removeprefix("*").lstrip(".")
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False)
    except ValueError:
        ends = bool(name) and (host == name or host.endswith(f".{name}"))
        return entry == "*" or ends


def _caught(seen: NodePart) -> list[str]:
    """Return what a proxy of this node would get: this machine's own services, and nodes by name and address."""
    proxies = seen.facts.proxies
    if not set(proxies) - {"no_proxy"}:
        return []
    exempt = proxies.get("no_proxy", "")
    caught = [] if _is_exempt("localhost", exempt) else ["localhost"]
    for node in seen.situation.known if seen.situation.has_machines else ():
        network = node.facts.network if node.facts else None
        addresses = (
            [i.address for i in network.interfaces if i.name == node.interface] if network else []
        )
        names = [network.own_name.lower(), *addresses] if network else []
        if names and not any(_is_exempt(name, exempt) for name in names):
            caught.append(names[-1])
    return caught


def _proxy(seen: NodePart) -> dict[str, Any]:
    caught = _caught(seen)
    exempt = seen.facts.proxies.get("no_proxy")
    return {
        "caught": names_of(caught),
        "why": f"no_proxy is {exempt[:80]}" if exempt else "no_proxy is not set",
        "fix": ",".join(
            dict.fromkeys(
                [exempt] * bool(exempt and len(exempt) <= 80) + ["localhost", "127.0.0.1", *caught]
            )
        ),
    }


RULES: Sequence[Rule] = (
    grammars,
    misspelt,
    interfaces,
    missing,
    # Variables of another launcher that were exported in a shell.
    Check(
        of="environment",
        cause="leftover-variables",
        level=Level.NOTE,
        when=LONG,
        bad=lambda s: bool({"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(s.facts.variables)),
        error="RANK, WORLD_SIZE or LOCAL_RANK are set on {nodes} before any launcher",
        because=("a script that is started without a launcher uses them",),
        hint="unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT",
    ),
    Check(
        of="environment",
        cause="slow-by-variable",
        level=Level.NOTE,
        bad=lambda s: s.facts.variables.get("CUDA_LAUNCH_BLOCKING") == "1",
        error="CUDA_LAUNCH_BLOCKING=1 on {nodes} makes every kernel wait for the one before",
        hint="unset CUDA_LAUNCH_BLOCKING when the bug is found",
    ),
    # What the scheduler gave, against what is started: the head's own word.
    Check(
        of="environment",
        cause="time-limit",
        level=Level.WARNING,
        bad=lambda s: _is_head(s) and _time_is_short(s),
        error="the job has {left_s:.0f} s{of} left",
        words=_time,
        because=("then the scheduler ends it",),
        hint="muster run --time 8h, --resubmit 3 to continue in another job",
        weight=29,
    ),
    Check(
        of="environment",
        cause="nodes-unused",
        level=Level.NOTE,
        bad=lambda s: _is_head(s) and (s.facts.nodefile or (0, 0))[1] > len(s.situation.nodes),
        error="the job has {hosts} nodes, {used} are used",
        words=_nodefile,
        hint="--nodes {hosts}",
    ),
    Check(
        of="environment",
        cause="nodefile-lines",
        level=Level.NOTE,
        when=LONG,
        bad=lambda s: (
            _is_head(s) and s.facts.nodefile and s.facts.nodefile[0] > s.facts.nodefile[1]
        ),
        error="PBS_NODEFILE has {lines} lines for {hosts} nodes: one for each MPI slot",
        words=_nodefile,
        because=("`wc -l` of it is not the number of nodes",),
        hint="sort -u $PBS_NODEFILE | wc -l",
    ),
    # The script of such a job puts `srun` in front of a launcher.
    Check(
        of="environment",
        cause="several-tasks-a-node",
        level=Level.NOTE,
        when=LONG,
        bad=_starts_several,
        error="the job has {tasks} tasks on {num_nodes} nodes: `srun` starts what follows it {tasks} times",
        words=_tasks,
        because=(
            "a launcher has to start once per node, a script without a launcher once per worker",
        ),
        hint="#SBATCH --ntasks-per-node=1 for torchrun and muster torchrun",
    ),
    Check(
        of="environment",
        cause="proxy",
        level=Level.NOTE,
        when=LONG,
        bad=lambda s: bool(_caught(s)),
        error="a proxy on {nodes} gets what is meant for {caught}",
        words=_proxy,
        because=(
            "{why}",
            "HTTP calls between the nodes (etcd, TensorBoard, storage inside of the cluster) go to the proxy",
        ),
        hint="export no_proxy={fix}, or the network of the nodes (10.0.0.0/8)",
    ),
)
