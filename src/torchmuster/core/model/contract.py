"""The environment of workers, and the exit codes with a meaning.

The variables are torchrun's own, name for name, so that PyTorch, Lightning, Accelerate and DeepSpeed
scripts run unchanged.

Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, `_start_workers` (2.13).
"""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass

# sysexits.h: a temporary failure, try again. A worker that leaves with it was preempted.
EX_TEMPFAIL = 75
# From a pod's door to agents: the pod is taken away because of its own use of disk or memory.
OVERUSED_SIGNAL = signal.SIGRTMIN

# Ours, for the library in the script; the library also works without them.
SOCKET_VARIABLE = "TORCHMUSTER_SOCKET"
RUN_DIR_VARIABLE = "TORCHMUSTER_RUN_DIR"
ATTEMPT_VARIABLE = "TORCHMUSTER_ATTEMPT"

# torchrun's own: what stands before each line on the terminal, with ${role_name}, ${rank} and ${local_rank}.
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"

# For the doors of a session: what it was started with.
SESSION_VARIABLE = "TORCHMUSTER_SESSION"
# The number of a sweep's member, and the name of the metric that the value of its function may be.
MEMBER_VARIABLE = "MUSTER_SWEEP_MEMBER"
METRIC_VARIABLE = "TORCHMUSTER_METRIC"
# The names of the variables that its site has set on this node: they hold for runs in it, too.
SITE_NAMES_VARIABLE = "TORCHMUSTER_SITE_NAMES"

# `muster run --debug`: NCCL's words go into a file for each rank.
DEBUG_VARIABLE = "TORCHMUSTER_DEBUG"

# `muster run --debugpy R` and `--pdb`: the tool, and the rank that it is for (of none: every rank).
DEBUGGER_VARIABLE = "TORCHMUSTER_DEBUGGER"
DEBUGPY, PDB = "debugpy", "pdb"
PDB_STOPS = "pdb:stops"  # a rank that has not failed: it goes on when the user has looked
# The first byte that a worker says to who brings its debugger: call me at your port, or here it is.
CALLS_BACK, STREAMS = b"C", b"S"

# `muster replay`: the step that is made again (`ReplayOrder`).
REPLAY_VARIABLE = "TORCHMUSTER_REPLAY"

# `muster run --verify-every K`: after how many steps one is made again on another rank.
VERIFY_VARIABLE = "TORCHMUSTER_VERIFY_EVERY"

# For the script and for `--before`: a folder of this run on this node, and which node it is.
SCRATCH_VARIABLE = "MUSTER_SCRATCH"
PLACE_VARIABLE = "MUSTER_PLACE"
NODE_VARIABLE = "MUSTER_NODE"

# In pods: the machine of the cluster that they are on.
MACHINE_VARIABLE = "MUSTER_POD_NODE"

# In every task of a workflow: the socket on which its processes call their agent.
TASK_SOCKET_VARIABLE = "TORCHMUSTER_TASK_SOCKET"
GROUP_VARIABLE = "TORCHMUSTER_GROUP"
TASK_VARIABLE = "TORCHMUSTER_TASK"
CREDENTIALS_VARIABLE = "MUSTER_CREDENTIALS"  # a path, where it is not $MUSTER_HOME/credentials.toml

# What torch, its BLAS and its OpenMP read when they are loaded, so before the script can set it in
# a forked worker. TORCH_NCCL_* is read when the process group is made and needs no fresh start.
READ_AT_IMPORT_PREFIXES = (
    "ATEN_",
    "BLIS_",
    "COMPILE_STROBELIGHT_",
    "DNNL_",
    "FX_",
    "GFORTRAN_",
    "GOMP_",
    "GOTO_",
    "KINETO_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKLDNN_",
    "MKL_",
    "NPY_",
    "NUMEXPR_",
    "NUMPY_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "OPENSSL_",
    "PYTORCH_",
    "TORCH",
    "TQDM_",
)
READ_LATER_PREFIXES = ("TORCH_NCCL_", "TORCHELASTIC_", "TORCHMUSTER_")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """The position of one worker in the world of one attempt."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    role_rank: int
    role_world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """The values that all workers of one attempt share."""

    run_id: str
    attempt: int
    restarts_spent: int
    max_restarts: int
    master_addr: str
    master_port: int
    role: str = "default"
    has_store: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOrder:
    """A step of an earlier run that the workers of this one make again.

    Attributes:
        step: Its number, counted from 1.
        rank: The one that is looked into.
        run_id: Of the earlier run.
        snapshots: Its folder of them, a path or a URL. Only what is older than the step is read, nothing is written.
        debugger: Whether pdb opens at the first NaN; else it is printed.
        gradients: Checksum of each rank's gradients, where the earlier run has noted that they were not finite.
        shares_gpus: There are fewer GPUs here than ranks, so that Gloo has to sum.
    """

    step: int
    rank: int
    run_id: str
    snapshots: str
    debugger: bool = False
    gradients: tuple[int, ...] = ()
    shares_gpus: bool = False

    def text(self) -> str:
        """Return the value of the variable."""
        return json.dumps(asdict(self))


def replay_order(environment: Mapping[str, str]) -> ReplayOrder | None:
    """Return what `muster replay` has told this worker; None in every other run."""
    text = environment.get(REPLAY_VARIABLE)
    if not text:
        return None
    said = json.loads(text)
    return ReplayOrder(**{**said, "gradients": tuple(said["gradients"])})


def worker_environment(place: WorkerPlace, facts: AttemptFacts) -> dict[str, str]:
    """Return the variables that torchrun would set for this worker."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_RANK": str(place.role_rank),
        "ROLE_NAME": facts.role,
        "ROLE_WORLD_SIZE": str(place.role_world_size),
        "MASTER_ADDR": facts.master_addr,
        "MASTER_PORT": str(facts.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(facts.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(facts.max_restarts),
        "TORCHELASTIC_RUN_ID": facts.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(facts.has_store),
        ATTEMPT_VARIABLE: str(facts.attempt),
    }


def debugger_socket(agent_socket: str, rank: str | int) -> str:
    """Return where the worker of a rank waits for its debugger, in the folder of its agent's own socket."""
    return f"{agent_socket.rpartition('/')[0]}/debug-{rank}"


def signal_name(signum: int) -> str:
    """Return `SIGSEGV` for 11; unknown numbers keep their number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_exit(status: int) -> str:
    """Return a status as `subprocess` has it in words: a negative one is a signal."""
    return signal_name(-status) if status < 0 else f"exit code {status}"


def may_be_read_at_import(begin: str) -> bool:
    """Return whether torch may read a variable with this prefix while it is imported."""
    if begin.startswith(READ_LATER_PREFIXES):
        return False
    return any(begin.startswith(p) or p.startswith(begin) for p in READ_AT_IMPORT_PREFIXES)


def is_read_at_import(variable: str) -> bool:
    """Return whether torch may read `variable` while it is imported."""
    return variable.startswith(READ_AT_IMPORT_PREFIXES) and not variable.startswith(
        READ_LATER_PREFIXES
    )


# The agent sends it to have a worker's stacks written into its stack file: one of the real-time signals, which
# nobody sends by chance. Source: signal(7); glibc keeps 32 and 33 for itself.
STACK_SIGNAL = 47
# Where a worker keeps the files open: far from what a script opens, closes or takes for its own.
STACK_FD = 700


def stacks_path(folder: str, attempt: int | str, rank: int | str) -> str:
    """Return the file into which a rank's stacks are written."""
    return os.path.join(folder, f"stacks-{attempt}-{rank}")
