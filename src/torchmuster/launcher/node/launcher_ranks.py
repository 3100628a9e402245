"""Correct the rank variables of srun and mpiexec for a worker.

Agents are tasks of such a launcher, or children of a batch script. Workers inherit the launcher's
variables, such as rank 0 of 1. A script that was written for the launcher would believe them and
train alone. So a worker gets what the launcher would have set, had it started this world itself.
The addresses at which a launcher's server waits for the one task that it knows are removed: an MPI
program there would join another world.

Source: https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES, and Slurm's
src/common/env.c, `env_array_for_step`; docs.open-mpi.org, "Environment variables"; MPICH's
simple_pmi.c; HPE PALS's mpiexec(1).
"""

from collections.abc import Mapping

from torchmuster.core.model.contract import WorkerRanks
from torchmuster.core.node.options import VariableChange
from torchmuster.launcher.model.scheduler import expand_counts, expand_hostlist

# srun sets these for every task; a script that reads one of them reads the others, too.
_OF_EVERY_TASK = {
    "SLURM_PROCID": "rank",
    "SLURM_LOCALID": "local_rank",
    "SLURM_NODEID": "node_rank",
    "SLURM_NTASKS": "world_size",
    "SLURM_NPROCS": "world_size",
    "SLURM_NNODES": "num_nodes",
    "SLURM_TASKS_PER_NODE": "tasks_per_node",
    "SLURM_STEP_NUM_TASKS": "world_size",
    "SLURM_STEP_NUM_NODES": "num_nodes",
    "SLURM_STEP_TASKS_PER_NODE": "tasks_per_node",
    "SLURM_GTIDS": "ranks_here",
}
_OF_MPI = {
    "RANK": "rank",
    "SIZE": "world_size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_SIZE": "local_world_size",
}
# These are corrected only where they are set already.
_WHERE_THEY_STAND = {
    f"{launcher}_{name}": fact
    for launcher in ("PMI", "OMPI_COMM_WORLD", "MV2_COMM_WORLD")
    for name, fact in _OF_MPI.items()
} | {
    "SLURM_NTASKS_PER_NODE": "each_node",
    "SLURM_CPUS_PER_TASK": "cpus_per_task",
    "SLURM_STEP_NODELIST": "nodelist",
    "PMIX_RANK": "rank",
    "OMPI_COMM_WORLD_NODE_RANK": "local_rank",  # Open MPI's name for the rank on its node
    "MPI_LOCALRANKID": "local_rank",
    "MPI_LOCALNRANKS": "local_world_size",
    "PALS_RANKID": "rank",
    "PALS_SIZE": "world_size",
    "PALS_NODEID": "node_rank",
    "PALS_LOCAL_RANKID": "local_rank",
    "PALS_LOCAL_SIZE": "local_world_size",
}
# These belong to one process, or to a server that knows one task here.
_UNTRUE = frozenset(
    {
        *("SLURM_TASK_PID", "SLURM_STEP_LAUNCHER_PORT", "SLURM_SRUN_COMM_HOST"),
        *("SLURM_SRUN_COMM_PORT", "SLURM_PMIXP_ABORT_AGENT_PORT", "SLURM_PMIX_MAPPING_SERV"),
        *("PMI_FD", "PMI_PORT", "PMI_ID", "PMI_JOBID", "PMI_SPAWNED", "PMI_UNIVERSE_SIZE"),
        *("PMI_CONTROL_FD", "PMI_CONTROL_PORT", "PMI_SHARED_SECRET"),
        *("PMIX_NAMESPACE", "PMIX_ID", "PMIX_SECURITY_MODE", "PMIX_GDS_MODULE"),
        *("OMPI_MCA_ess_base_jobid", "OMPI_MCA_ess_base_vpid", "OMPI_MCA_orte_hnp_uri"),
        *("OMPI_MCA_orte_local_daemon_uri", "OMPI_MCA_orte_ess_num_procs"),
        *("OMPI_APP_CTX_NUM_PROCS", "OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX", "OMPI_UNIVERSE_SIZE"),
        *("PALS_APINFO", "PALS_SPOOL_DIR", "PALS_FD"),
    }
)
_UNTRUE_PREFIXES = ("PMIX_SERVER_", "PMIX_DSTORE_", "PMIX_PTL_", "PMI2_")
_OF_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID")
_SIZES = (
    *("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE"),
    "MV2_COMM_WORLD_SIZE",
)


def make_true(
    environment: Mapping[str, str], place: WorkerRanks, tasks_per_node: str
) -> VariableChange:
    """Return how a worker's variables of other launchers differ from its agent's.

    Args:
        environment: The agent's environment, on which the worker's is based.
        place: The worker's ranks and counts.
        tasks_per_node: The workers of every node, in Slurm's notation: `2(x2),1`.
    """
    if _is_task_for_task(environment, place, tasks_per_node):
        return VariableChange(values={})
    facts = _facts(environment, place, tasks_per_node)
    in_slurm = "SLURM_JOB_ID" in environment or "SLURM_JOBID" in environment
    values = {name: facts[key] for name, key in _OF_EVERY_TASK.items() if in_slurm}
    values |= {name: facts[key] for name, key in _WHERE_THEY_STAND.items() if name in environment}
    known = {name: text for name, text in values.items() if text}
    removed = [name for name in environment if name in values and name not in known]
    removed += [
        name for name in environment if name in _UNTRUE or name.startswith(_UNTRUE_PREFIXES)
    ]
    return VariableChange(values=known, removed=tuple(removed))


def _is_task_for_task(
    environment: Mapping[str, str], place: WorkerRanks, tasks_per_node: str
) -> bool:
    """Return whether each worker is the only one of its launcher task.

    Then all of the launcher's variables are correct.
    """
    alone = set(_counts(tasks_per_node)) <= {1} and place.local_world_size == 1
    sizes = {environment[name] for name in _SIZES if name in environment}
    return alone and sizes == {str(place.world_size)}


def _facts(
    environment: Mapping[str, str], place: WorkerRanks, tasks_per_node: str
) -> dict[str, str]:
    """Return the values by their meaning; an empty one is unknown."""
    counts = _counts(tasks_per_node)
    first = sum(counts[: place.node_rank])
    ranks = range(first, first + place.local_world_size)
    return {
        "rank": str(place.rank),
        "local_rank": str(place.local_rank),
        "node_rank": str(place.node_rank),
        "world_size": str(place.world_size),
        "local_world_size": str(place.local_world_size),
        "num_nodes": str(place.num_nodes),
        "tasks_per_node": tasks_per_node,
        "each_node": str(counts[0]) if len(set(counts)) == 1 else "",
        "ranks_here": ",".join(str(rank) for rank in ranks),
        "nodelist": _nodelist(environment, place.num_nodes),
        "cpus_per_task": _cpus_per_task(environment, place.local_world_size),
    }


def _nodelist(environment: Mapping[str, str], num_nodes: int) -> str:
    """Return the job's node list if the world uses all of its nodes, else nothing."""
    text = environment.get("SLURM_JOB_NODELIST", "")
    try:
        return text if len(expand_hostlist(text)) == num_nodes else ""
    except ValueError:
        return ""


def _cpus_per_task(environment: Mapping[str, str], num_workers: int) -> str:
    """Return a worker's share of the node's CPUs, but no more than a task was given."""
    asked = environment.get("SLURM_CPUS_PER_TASK", "")
    on_node = environment.get("SLURM_CPUS_ON_NODE", "")
    if not (asked.isdecimal() and on_node.isdecimal()):
        return asked
    return str(min(int(asked), max(1, int(on_node) // num_workers)))


def _counts(tasks_per_node: str) -> tuple[int, ...]:
    return expand_counts(tasks_per_node) if tasks_per_node else ()


def is_one_of_many(environment: Mapping[str, str]) -> bool:
    """Return whether srun, mpiexec or pbsdsh has started this process along with others.

    SLURM_NTASKS can't tell: sbatch sets it for its script, too, which is one process.
    """
    if any(_number(environment.get(name)) > 1 for name in _SIZES):
        # `srun --pty` keeps only task 0, at which a user types.
        has_mpi = any(_number(environment.get(name)) > 1 for name in _SIZES[1:])
        return has_mpi or not environment.get("SLURM_PTY_PORT")
    if "PALS_RANKID" in environment:  # Cray's mpiexec sets no size
        return True
    # A job's script is task 1 of PBS; what pbsdsh and pbs_tmrsh start comes after it.
    return "PBS_JOBID" in environment and _task_of_pbs(environment.get("PBS_TASKNUM", "")) > 1


def num_tasks(environment: Mapping[str, str]) -> int:
    """Return how many tasks this process's launcher has started; 0 without a launcher."""
    return max(_number(environment.get(name)) for name in _SIZES)


def task_here(environment: Mapping[str, str]) -> int:
    """Return this process's index among its launcher's tasks on this node."""
    ranks = {**_OF_EVERY_TASK, **_WHERE_THEY_STAND}
    return max(
        _number(environment.get(name)) for name, fact in ranks.items() if fact == "local_rank"
    )


def are_one_step(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether one call of a launcher started both processes."""
    return all(one.get(name) == other.get(name) for name in _OF_STEP)


def is_first_of_many(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher calls this process rank 0 or, like pbsdsh, gives it no rank."""
    ranks = {**_OF_EVERY_TASK, **_WHERE_THEY_STAND}
    return all(environment.get(name, "0") == "0" for name, fact in ranks.items() if fact == "rank")


def _task_of_pbs(text: str) -> int:
    """Return the number of a PBS task, 0 if it is unreadable.

    As recorded: eight hexadecimal digits, the host's index in the top bits.
    """
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
