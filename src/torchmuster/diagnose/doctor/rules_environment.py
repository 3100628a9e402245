"""Variables that users and schedulers set: their grammar, and whether all nodes have them."""

from collections.abc import Iterator, Sequence

from torchmuster.diagnose.doctor.grammar import meant, problem_of
from torchmuster.diagnose.doctor.situation import (
    NodeView,
    Rule,
    Situation,
    differ,
    names_of,
)
from torchmuster.diagnose.facts.environment import EnvironmentFacts
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


def _environments(situation: Situation) -> list[tuple[NodeView, EnvironmentFacts]]:
    found = [(n, n.facts.environment) for n in situation.known if n.facts is not None]
    return [(node, environment) for node, environment in found if environment is not None]


def grammars(situation: Situation) -> Iterator[Finding]:
    """A value that its reader does not understand is ignored, mostly in silence."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for node, environment in _environments(situation):
        for name, value in environment.variables.items():
            problem = problem_of(name, value)
            if problem is not None:
                seen.setdefault((name, value, problem), []).append(node.name)
    for (name, value, problem), nodes in seen.items():
        yield Finding(
            level=Level.WARNING,
            cause="bad-variable",
            error=f"{name}={value} can't be understood by its reader",
            at=names_of(nodes),
            because=(problem,),
            hint=f"unset {name}, or mend it",
            weight=34,
        )


def misspelt(situation: Situation) -> Iterator[Finding]:
    """A variable that nobody reads."""
    seen: dict[tuple[str, str], list[str]] = {}
    for node, environment in _environments(situation):
        for name in environment.variables:
            likely = meant(name)
            if likely is not None:
                seen.setdefault((name, likely), []).append(node.name)
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
    for node, environment in _environments(situation):
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
    rows = _environments(situation)
    names = {name for _, e in rows for name in e.variables if name not in _OWN}
    for name in sorted(names):
        found = differ(
            {n.name: e.variables.get(name, "") for n, e in rows},
            "",
            lambda v: f"`{v}`" if v else "none",
        )
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


def leftovers(situation: Situation) -> Iterator[Finding]:
    """Variables of another launcher that were exported in a shell."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rows = [
        n.name for n, e in _environments(situation) if any(name in e.variables for name in names)
    ]
    if rows and situation.is_long:
        yield Finding(
            level=Level.NOTE,
            cause="leftover-variables",
            error=f"RANK, WORLD_SIZE or LOCAL_RANK are set on {names_of(rows)} before any launcher",
            at=names_of(rows),
            because=("a script that is started without a launcher takes them for true",),
            hint="unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT",
        )


def blocking(situation: Situation) -> Iterator[Finding]:
    """Switches for finding bugs that make training slow."""
    rows = [
        n.name
        for n, e in _environments(situation)
        if e.variables.get("CUDA_LAUNCH_BLOCKING") == "1"
    ]
    if rows:
        yield Finding(
            level=Level.NOTE,
            cause="slow-by-variable",
            error=f"CUDA_LAUNCH_BLOCKING=1 on {names_of(rows)} makes every kernel wait for the one before",
            at=names_of(rows),
            hint="unset CUDA_LAUNCH_BLOCKING when the bug is found",
        )


def scheduler(situation: Situation) -> Iterator[Finding]:
    """What the scheduler gave, against what is started."""
    for node, environment in _environments(situation)[:1]:
        left_s, total_s = environment.left_s, environment.total_s
        # A job that was made for a few minutes has what was asked for.
        is_used_up = total_s is None or (left_s or 0.0) < total_s / 2
        if left_s is not None and left_s < _LITTLE_S and is_used_up:
            of = f" of {total_s:.0f} s" if total_s is not None else ""
            yield Finding(
                level=Level.WARNING,
                cause="time-limit",
                error=f"the job has {max(left_s, 0.0):.0f} s{of} left",
                at=node.name,
                because=("its scheduler ends it then",),
                hint="muster run --time 8h, --resubmit 3 to go on in another job",
                weight=29,
            )
        lines, hosts = environment.nodefile or (0, 0)
        if hosts > len(situation.nodes):
            yield Finding(
                level=Level.NOTE,
                cause="nodes-unused",
                error=f"the job has {hosts} nodes, {len(situation.nodes)} are used",
                at=node.name,
                hint=f"--nodes {hosts}",
            )
        if lines > hosts and situation.is_long:
            yield Finding(
                level=Level.NOTE,
                cause="nodefile-lines",
                error=f"PBS_NODEFILE has {lines} lines for {hosts} nodes: one for each MPI slot",
                at=node.name,
                because=("`wc -l` of it is not the number of nodes",),
                hint="sort -u $PBS_NODEFILE | wc -l",
            )


def several_tasks(situation: Situation) -> Iterator[Finding]:
    """A job with several tasks on each node, whose script puts `srun` in front of a launcher."""
    if not situation.is_long:
        return
    for node, environment in _environments(situation)[:1]:
        tasks, nodes = (
            int(text) if (text := environment.scheduler.get(name, "")).isdecimal() else 0
            for name in ("SLURM_NTASKS", "SLURM_NNODES")
        )
        if 0 < nodes < tasks:
            yield Finding(
                level=Level.NOTE,
                cause="several-tasks-a-node",
                error=f"the job has {tasks} tasks on {nodes} nodes: `srun` starts what follows it {tasks} times",
                at=node.name,
                because=(
                    "a launcher is wanted once on each node, a script with srun alone once for each worker",
                ),
                hint="#SBATCH --ntasks-per-node=1 for torchrun and muster torchrun",
            )


def proxies(situation: Situation) -> Iterator[Finding]:
    """A proxy catches calls between the nodes unless they are excluded."""
    rows = [
        n.name
        for n, e in _environments(situation)
        if any(k != "no_proxy" for k in e.proxies) and "no_proxy" not in e.proxies
    ]
    if rows and situation.is_long and situation.has_machines:
        yield Finding(
            level=Level.NOTE,
            cause="proxy",
            error=f"a proxy is set on {names_of(rows)}, and no_proxy is not",
            at=names_of(rows),
            because=(
                "HTTP calls between the nodes (etcd, TensorBoard, storage inside of the cluster) go to the proxy",
            ),
            hint="export no_proxy=localhost,127.0.0.1,.cluster,10.0.0.0/8",
        )


RULES: Sequence[Rule] = (
    grammars,
    misspelt,
    interfaces,
    missing,
    leftovers,
    blocking,
    scheduler,
    several_tasks,
    proxies,
)
