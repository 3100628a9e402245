"""The environment of workers, and the exit codes that have a meaning.

The variables are torchrun's own, name for name, so that PyTorch, Lightning, Accelerate and
DeepSpeed scripts run unchanged.

Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, `_start_workers` (2.13).
"""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass

# sysexits.h: a temporary failure, try again. A worker that leaves with it was preempted.
EX_TEMPFAIL = 75
# Sent by the server of a pod to agents: the pod is removed because it used too much disk or memory.
OVERUSED_SIGNAL = signal.SIGRTMIN

# Our variables for the library in the script, which also works without them.
SOCKET_VARIABLE = "TORCHMUSTER_SOCKET"
RUN_DIR_VARIABLE = "TORCHMUSTER_RUN_DIR"
ATTEMPT_VARIABLE = "TORCHMUSTER_ATTEMPT"

# torchrun's own: the prefix of each line on the terminal, with ${role_name}, ${rank} and
# ${local_rank}.
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"

# Variables that name interfaces, to gloo, NCCL and TensorPipe, each in a grammar of its own.
GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
INTERFACE_VARIABLES = (GLOO, NCCL, TENSORPIPE)

# For the servers of a session: what it was started with.
SESSION_VARIABLE = "TORCHMUSTER_SESSION"
# The number of a sweep's member, and the name of the metric that its function returns.
MEMBER_VARIABLE = "MUSTER_SWEEP_MEMBER"
METRIC_VARIABLE = "TORCHMUSTER_METRIC"
# Names of the variables that the session's site has set on this node; its runs get them, too.
SITE_NAMES_VARIABLE = "TORCHMUSTER_SITE_NAMES"

# `muster run --debug`: NCCL logs to a file for each rank.
DEBUG_VARIABLE = "TORCHMUSTER_DEBUG"

# `muster run --debugpy R` and `--pdb`: the tool and its rank (none given: every rank).
DEBUGGER_VARIABLE = "TORCHMUSTER_DEBUGGER"
DEBUGPY, PDB = "debugpy", "pdb"
PDB_STOPS = "pdb:stops"  # a rank that has not failed: it continues afterwards
# The first byte that a worker sends to the debugger's client: connect to my port, or talk here.
CALLS_BACK, STREAMS = b"C", b"S"

# `muster replay`: the step to repeat (`ReplayOrder`).
REPLAY_VARIABLE = "TORCHMUSTER_REPLAY"

# `muster run --verify-every K`: how often a step is repeated on another rank.
VERIFY_VARIABLE = "TORCHMUSTER_VERIFY_EVERY"

# For the script and `--before`: the run's folder on this node, the place, and the node's name.
SCRATCH_VARIABLE = "MUSTER_SCRATCH"
PLACE_VARIABLE = "MUSTER_PLACE"
NODE_VARIABLE = "MUSTER_NODE"

# In pods: the cluster machine that they run on.
MACHINE_VARIABLE = "MUSTER_POD_NODE"

# In every task of a workflow: the socket on which its processes call their agent.
TASK_SOCKET_VARIABLE = "TORCHMUSTER_TASK_SOCKET"
GROUP_VARIABLE = "TORCHMUSTER_GROUP"
TASK_VARIABLE = "TORCHMUSTER_TASK"
CREDENTIALS_VARIABLE = "MUSTER_CREDENTIALS"  # a path, where it is not $MUSTER_HOME/credentials.toml

# Variables that torch, its BLAS and its OpenMP read when they are loaded, before the script can set
# them in a forked worker. TORCH_NCCL_* is read when the process group is made and needs no fresh
# start.
READ_AT_IMPORT_PREFIXES = (
    *("ATEN_", "BLIS_", "COMPILE_STROBELIGHT_", "DNNL_", "FX_", "GFORTRAN_", "GOMP_", "GOTO_"),
    *("KINETO_", "KMP_", "LD_", "MALLOC_", "MKLDNN_", "MKL_", "NPY_", "NUMEXPR_", "NUMPY_", "OMP_"),
    *("ONEDNN_", "OPENBLAS_", "OPENSSL_", "PYTORCH_", "TORCH", "TQDM_"),
)
READ_LATER_PREFIXES = ("TORCH_NCCL_", "TORCHELASTIC_", "TORCHMUSTER_")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRanks:
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
    """A step of an earlier run that the workers of this run repeat.

    Attributes:
        step: Its number, counted from 1.
        rank: The rank under examination.
        run_id: Id of the earlier run.
        snapshots: Its snapshot folder, a path or a URL. Only snapshots before the step are read;
            nothing is written.
        debugger: Whether to open pdb at the first NaN rather than print it.
        gradients: Checksums of each rank's gradients, where the earlier run recorded that they were
            not finite.
        shares_gpus: There are fewer GPUs here than ranks, so the all-reduce uses Gloo.
    """

    step: int
    rank: int
    run_id: str
    snapshots: str
    debugger: bool = False
    gradients: tuple[int, ...] = ()
    shares_gpus: bool = False

    def text(self) -> str:
        """Return the value for the environment variable."""
        return json.dumps(asdict(self))


def replay_order(environment: Mapping[str, str]) -> ReplayOrder | None:
    """Return the order of `muster replay` for this worker; None in any other run."""
    text = environment.get(REPLAY_VARIABLE)
    if not text:
        return None
    said = json.loads(text)
    return ReplayOrder(**{**said, "gradients": tuple(said["gradients"])})


def worker_environment(place: WorkerRanks, facts: AttemptFacts) -> dict[str, str]:
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
    """Return the socket where a rank's worker waits for its debugger, in its agent's folder."""
    return f"{agent_socket.rpartition('/')[0]}/debug-{rank}"


def signal_name(signum: int) -> str:
    """Return `SIGSEGV` for 11; `signal N` for an unknown number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_exit(status: int) -> str:
    """Return a `subprocess` return code in words: a negative one is a signal."""
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


# The agent sends it to make a worker write its stacks to its stack file. A real-time signal, which
# nothing sends by chance. Source: signal(7); glibc keeps 32 and 33 for itself.
STACK_SIGNAL = 47
# Where a worker keeps such files open: far from descriptors that a script opens or closes.
STACK_FD = 700


def stacks_path(folder: str, attempt: int | str, rank: int | str) -> str:
    """Return the file for a rank's stacks."""
    return os.path.join(folder, f"stacks-{attempt}-{rank}")
