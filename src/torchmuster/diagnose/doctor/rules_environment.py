"""Variables that users and schedulers set: their grammar, and whether all nodes have them."""

from collections.abc import Iterator, Sequence
from typing import Any

from torchmuster.diagnose.doctor.checks import LONG, Check, NodePart, look
from torchmuster.diagnose.doctor.grammar import meant, problem_of
from torchmuster.diagnose.doctor.situation import (
    Rule,
    Situation,
    differ,
    names_of,
)
from torchmuster.diagnose.finding import Finding, Level
from torchmuster.model.network import VARIABLES
from torchmuster.model.network_choice import matches

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
    """A value that its reader does not understand is ignored, mostly in silence."""
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
            error=f"{name}={value} can't be understood by its reader",
            at=names_of(nodes),
            because=(problem,),
            hint=f"unset {name}, or correct it",
            weight=34,
        )


def misspelt(situation: Situation) -> Iterator[Finding]:
    """A variable that nobody reads."""
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
            error=f"nobody reads {name}: {likely} was probably meant",
            at=names_of(nodes),
        )


def interfaces(situation: Situation) -> Iterator[Finding]:
    """A variable that names no interface of its node; before every start the survey of networks says it."""
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
    """Variables that some nodes have and others don't, or with other values."""
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
                because=(
                    "nodes that decide differently about algorithm or network wait for each other",
                ),
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


def _has_open_proxy(seen: NodePart) -> bool:
    return bool(set(seen.facts.proxies) - {"no_proxy"}) and "no_proxy" not in seen.facts.proxies


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
        because=("a script that is started without a launcher takes them for true",),
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
        because=("its scheduler ends it then",),
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
            "a launcher is wanted once on each node, a script with srun alone once for each worker",
        ),
        hint="#SBATCH --ntasks-per-node=1 for torchrun and muster torchrun",
    ),
    Check(
        of="environment",
        cause="proxy",
        level=Level.NOTE,
        when=lambda situation: situation.is_long and situation.has_machines,
        bad=_has_open_proxy,
        error="a proxy is set on {nodes}, and no_proxy is not",
        because=(
            "HTTP calls between the nodes (etcd, TensorBoard, storage inside of the cluster) go to the proxy",
        ),
        hint="export no_proxy=localhost,127.0.0.1,.cluster,10.0.0.0/8",
    ),
)
