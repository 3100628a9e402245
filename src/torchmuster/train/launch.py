"""Which launcher started this process, and what it announces in the environment; no I/O.

muster, torchrun   RANK, WORLD_SIZE, LOCAL_RANK, ... MASTER_ADDR, MASTER_PORT
srun               SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, ... of the step, one task a worker
mpiexec            OMPI_COMM_WORLD_*, PMI_*, PALS_* or MPI_*; under PBS with its node file
nothing            a world of one
"""

import enum
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.core.model import contract
from torchmuster.errors import UsageError

# Below the usual range of ephemeral ports (32768 and up), above the services that sites run.
_FIRST_PORT, _NUM_PORTS = 20000, 10000


class Launcher(enum.Enum):
    """The launcher that started the workers."""

    MUSTER = "muster"
    TORCHRUN = "torchrun"
    SLURM = "srun"
    MPI = "mpiexec"
    NONE = "no launcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a launcher announces to one worker.

    Attributes:
        local_rank: None when the launcher doesn't say; the check of the group finds it.
        local_world_size: None likewise.
        num_nodes: None likewise.
        master_addr: Where rank 0's store listens; None in a world of one without a launcher.
        run_id: The same text on all ranks, and another one in another job.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str = ""


def read_launch(environ: Mapping[str, str], node_file: Sequence[str] = ()) -> Launch:
    """Return what the launcher announces to this worker.

    Args:
        environ: The environment of the process.
        node_file: The lines of `$PBS_NODEFILE`, if there is one.

    Raises:
        UsageError: The variables contradict each other, or a needed one is missing.
    """
    env = _Numbers(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        launch = _from_torchrun(env)
    else:
        mpi = _from_mpi(env, node_file)
        if _is_slurm_task(environ) and not _is_inside(mpi, env):
            launch = _from_slurm(env)
        else:
            launch = mpi or _alone(env)
    _check(launch)
    return launch


def torchrun_variables(launch: Launch) -> dict[str, str]:
    """Return the variables that torch's `env://` and many scripts read."""
    values = {
        "RANK": launch.rank,
        "WORLD_SIZE": launch.world_size,
        "LOCAL_RANK": launch.local_rank,
        "LOCAL_WORLD_SIZE": launch.local_world_size,
        "GROUP_RANK": launch.node_rank,
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": launch.master_port,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


class _Numbers:
    """Reads whole numbers, with the variable's name in the error."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def text(self, *names: str) -> str | None:
        return next((self.environ[name] for name in names if self.environ.get(name)), None)

    def get(self, *names: str) -> int | None:
        for name in names:
            text = self.environ.get(name)
            if text:
                try:
                    return int(text)
                except ValueError as error:
                    raise UsageError(
                        f"`{name}` is not a whole number", where=f"{name}={text}"
                    ) from error
        return None

    def need(self, *names: str) -> int:
        value = self.get(*names)
        if value is None:
            raise UsageError(
                f"`{names[0]}` is not set, but other variables of its launcher are",
                fix="start all workers with one launcher, or unset the variables of another launcher",
            )
        return value


def _from_torchrun(env: _Numbers) -> Launch:
    ours = contract.ATTEMPT_VARIABLE in env.environ
    return Launch(
        launcher=Launcher.MUSTER if ours else Launcher.TORCHRUN,
        rank=env.need("RANK"),
        world_size=env.need("WORLD_SIZE"),
        local_rank=env.get("LOCAL_RANK", "SLURM_LOCALID"),
        local_world_size=env.get("LOCAL_WORLD_SIZE"),
        node_rank=env.get("GROUP_RANK"),
        num_nodes=env.get("GROUP_WORLD_SIZE"),
        master_addr=env.text("MASTER_ADDR"),
        master_port=env.get("MASTER_PORT"),
        run_id=env.text("TORCHELASTIC_RUN_ID") or "",
    )


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started us; the batch script itself also has `SLURM_PROCID=0`.

    Source: https://slurm.schedmd.com/sbatch.html and srun.html, OUTPUT ENVIRONMENT VARIABLES.
    """
    if "SLURM_PROCID" not in environ:
        return False
    is_step = any(name in environ for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"))
    return is_step or environ.get("ENVIRONMENT") != "BATCH"


def _is_inside(mpi: Launch | None, env: _Numbers) -> bool:
    """Return whether mpiexec runs inside a step of srun: its workers inherit the step's variables.

    `srun --mpi=pmi2` sets PMI's variables too, to the same values as the step's own.
    """
    if mpi is None:
        return False
    slurm = _from_slurm(env)
    return (mpi.rank, mpi.world_size) != (slurm.rank, slurm.world_size)


def _from_slurm(env: _Numbers) -> Launch:
    world_size = env.get("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or 1
    node_rank = env.get("SLURM_NODEID")
    num_nodes = env.get("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    tasks = _tasks_per_node(env.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or "")
    known = node_rank is not None and node_rank < len(tasks) and sum(tasks) == world_size
    job = f"{env.text('SLURM_JOB_ID', 'SLURM_JOBID') or ''}.{env.text('SLURM_STEP_ID') or ''}"
    host = first_host(env.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") or "")
    if num_nodes == 1:
        host = "127.0.0.1"
    return Launch(
        launcher=Launcher.SLURM,
        rank=env.need("SLURM_PROCID"),
        world_size=world_size,
        local_rank=env.get("SLURM_LOCALID"),
        local_world_size=tasks[node_rank] if known and node_rank is not None else None,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=env.text("MASTER_ADDR") or host,
        master_port=env.get("MASTER_PORT") or derive_port(job),
        run_id=f"slurm-{job}",
    )


# Open MPI; MPICH, Intel MPI and Hydra (PMI); HPE's PALS. The first row with its rank set is used.
#
# Source: docs.open-mpi.org "Environment variables"; pmi.h; the `mpiexec` page of HPE PALS.
_MPI = (
    (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    (("PALS_RANKID", "PALS_SIZE"), ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")),
    (("PMI_RANK", "PMI_SIZE"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
    (("PMI_RANK", "PMI_SIZE"), ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
)


def _from_mpi(env: _Numbers, node_file: Sequence[str]) -> Launch | None:
    rows = [row for row in _MPI if env.get(row[0][0]) is not None]
    if not rows:
        return None
    (rank_name, size_name), _ = rows[0]
    world_size = env.get(size_name, "PMI_SIZE") or env.need(size_name)
    local_world_size = env.get(*(size for _, (_, size) in rows))
    hosts = list(dict.fromkeys(line.strip() for line in node_file if line.strip()))
    # A value that the launcher gives all its processes: PBS_JOBID may be set on the first host
    # only.
    job = env.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "PBS_JOBID") or ""
    host = env.text("MASTER_ADDR") or (hosts[0] if hosts else None)
    if env.text("MASTER_ADDR") is None and (local_world_size == world_size or len(hosts) == 1):
        host = "127.0.0.1"
    return Launch(
        launcher=Launcher.MPI,
        rank=env.need(rank_name),
        world_size=world_size,
        local_rank=env.get(*(rank for _, (rank, _) in rows)),
        local_world_size=local_world_size,
        num_nodes=len(hosts) or None,
        master_addr=host,
        master_port=env.get("MASTER_PORT") or derive_port(job),
        run_id=f"mpi-{job}",
    )


def _alone(env: _Numbers) -> Launch:
    if env.get("RANK") is not None or (env.get("WORLD_SIZE") or 1) > 1:
        # Part of a world must not train as a world of one.
        env.need("RANK"), env.need("WORLD_SIZE")
    return Launch(launcher=Launcher.NONE, rank=0, world_size=1, local_rank=0, local_world_size=1)


def _check(launch: Launch) -> None:
    pairs = [("rank", launch.rank, launch.world_size)]
    if launch.local_rank is not None and launch.local_world_size is not None:
        pairs.append(("local rank", launch.local_rank, launch.local_world_size))
    for name, rank, size in pairs:
        if not 0 <= rank < size:
            raise UsageError(
                f"{name} {rank} does not exist in a world of {size}",
                where=f"the environment that {launch.launcher.value} gave this process",
                fix="unset the variables that another launcher left in the environment",
            )
    if launch.world_size > 1 and launch.master_addr is None:
        raise UsageError(
            f"{launch.world_size} workers can't find each other: nothing names rank 0's host",
            where=launch.launcher.value,
            why="MASTER_ADDR is not set and the launcher has no list of hosts",
            fix="where no launcher has started this process: unset RANK WORLD_SIZE; else export MASTER_ADDR=<host of rank 0> and MASTER_PORT before the launcher",
        )


def first_host(nodelist: str) -> str | None:
    """Return the first host of Slurm's notation: `n[03-05,9],m1` gives `n03`.

    Source: https://slurm.schedmd.com/scontrol.html, "hostlist".
    """
    first = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodelist).split(",")[0]
    return first or None


def _tasks_per_node(text: str) -> list[int]:
    """Return `[2, 2, 1]` for Slurm's `2(x2),1`."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def derive_port(job: str) -> int:
    """Return the port that all tasks of a job derive from its id; `MASTER_PORT` overrides it.

    A bare `srun` or `mpiexec` gives its tasks no way to agree on a free port. If this one is in
    use, rank 0 reports it and names the variable.
    """
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
