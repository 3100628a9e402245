"""Limits, memory, shared memory and processors of each node."""

from collections.abc import Sequence
from typing import Any

from torchmuster.diagnose.doctor.checks import LONG, Check, Equal, NodePart
from torchmuster.diagnose.doctor.show import Rule, show_bytes
from torchmuster.diagnose.facts.system import SHARED_MEMORY
from torchmuster.diagnose.finding import Level

_MIB, _GIB = 1 << 20, 1 << 30
# The default of Docker and of Kubernetes.
DEFAULT_SHM_BYTES = 64 * _MIB
_LOW_FILES, _USUAL_FILES = 1024, 4096
_LOW_PROCESSES = 1024
_WORKER_BYTES = _GIB


def _shm_level(seen: NodePart) -> Level | None:
    gpu = seen.node.facts.gpu if seen.node.facts else None
    has_gpus = bool(gpu and gpu.num_devices)
    return shm_level(seen.facts.shm_bytes, gpus=has_gpus, several=seen.node.num_workers > 1)


def shm_level(size: int | None, *, gpus: bool, several: bool) -> Level | None:
    """Return the level for a size of /dev/shm; None when it is large enough."""
    if size is None:
        return Level.WARNING
    if size < DEFAULT_SHM_BYTES:
        return Level.WARNING if not gpus else Level.FAILURE
    if size >= _GIB:
        return None
    if gpus:
        return Level.FAILURE if size == DEFAULT_SHM_BYTES and several else Level.WARNING
    return Level.NOTE


def _shm_size(seen: NodePart) -> dict[str, Any]:
    size = seen.facts.shm_bytes
    return {"size": f"is only {show_bytes(size)}" if size is not None else "is missing"}


def _is_shm_full(seen: NodePart) -> bool:
    size, free = seen.facts.shm_bytes, seen.facts.shm_free_bytes
    return None not in (size, free) and free < DEFAULT_SHM_BYTES < size


def _left_level(seen: NodePart) -> Level | None:
    """A quarter of /dev/shm is what the next job misses."""
    if not seen.facts.left_shm_files:
        return None
    is_much = seen.facts.left_shm_bytes >= (seen.facts.shm_bytes or 0) / 4
    return Level.WARNING if is_much else Level.NOTE


def _left(seen: NodePart) -> dict[str, Any]:
    count = seen.facts.left_shm_files
    files = "1 file lies" if count == 1 else f"{count} files lie"
    return {"files": files, "size": show_bytes(seen.facts.left_shm_bytes)}


def _files_level(seen: NodePart) -> Level | None:
    limit = seen.facts.limits.get("nofile", -1)
    if not 0 <= limit < _USUAL_FILES:
        return None
    return Level.WARNING if limit < _LOW_FILES else Level.NOTE


def _memory_level(seen: NodePart) -> Level | None:
    limit = seen.facts.memory_limit_bytes
    if limit is None or limit >= seen.facts.memory_bytes // 4:
        return None
    return Level.WARNING if limit < _WORKER_BYTES * seen.node.num_workers else Level.NOTE


def _asked_cpus(seen: NodePart) -> int | None:
    environment = seen.node.facts.environment if seen.node.facts else None
    word = environment.scheduler.get("SLURM_CPUS_PER_TASK", "") if environment else ""
    return int(word) if word.isdecimal() else None


def _has_few_cpus(seen: NodePart) -> bool:
    usable, there = seen.facts.num_usable_cpus, seen.facts.num_cpus
    if usable == there:  # a small machine, not a wrong mask
        return False
    alone = usable == 1 and there > 1 and seen.situation.is_long
    return usable < seen.node.num_workers or alone or usable < (_asked_cpus(seen) or 0)


def _cpus(seen: NodePart) -> dict[str, Any]:
    system, asked = seen.facts, _asked_cpus(seen)
    why = f"it may use CPU {system.cpus} of {system.num_cpus}"
    if asked is not None and system.num_usable_cpus < asked:
        why = f"SLURM_CPUS_PER_TASK is {asked}, the process may use {system.cpus}"
    return {
        "why": why,
        "workers": "worker" if seen.node.num_workers == 1 else "workers",
        "cpus": "CPU" if system.num_usable_cpus == 1 else "CPUs",
    }


RULES: Sequence[Rule] = (
    # When it is full, the processes that use it die with SIGBUS.
    Check(
        of="system",
        cause="small-dev-shm",
        level=_shm_level,
        error=f"{SHARED_MEMORY} {{size}} on {{nodes}}",
        words=_shm_size,
        because=(
            "loader processes and NCCL share memory there: when it is full, workers die of SIGBUS (-7)",
        ),
        hint="docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm;"
        " or num_workers=0",
        weight=48,
    ),
    Check(
        of="system",
        cause="small-dev-shm",
        level=Level.WARNING,
        bad=_is_shm_full,
        error=f"{SHARED_MEMORY} is nearly full on {{nodes}}: {{free}} are free",
        words=lambda s: {"free": show_bytes(s.facts.shm_free_bytes)},
        because=("files of jobs that were killed stay there",),
        hint=f"ls -l {SHARED_MEMORY}; remove what belongs to no running process (fuser -v {SHARED_MEMORY}/*)",
        weight=47,
    ),
    # Nobody else removes them before the machine is started again.
    Check(
        of="system",
        cause="left-shared-memory",
        level=_left_level,
        when=LONG,
        worst=lambda s: -s.facts.left_shm_bytes,
        error=f"{{files}} in {SHARED_MEMORY} that no process of yours has open on {{nodes}}: {{size}}",
        words=_left,
        because=(
            "torch, NCCL and semaphores of programs that were killed: they take memory until somebody removes them",
        ),
        hint=f"when no job of yours runs there: find {SHARED_MEMORY} -user $USER -type f"
        r" \( -name 'torch_*' -o -name 'nccl-*' -o -name 'sem.*' \) -mmin +10 -delete",
    ),
    # Every connection and every loader process takes descriptors.
    Check(
        of="system",
        cause="too-few-files",
        level=_files_level,
        worst=lambda s: s.facts.limits["nofile"],
        error="a process may open only {facts.limits[nofile]} files on {nodes}",
        because=("`Too many open files` is typical with many ranks or loader processes",),
        hint="ulimit -n 65536 in the job script; in a pod the script raises its own, with resource.setrlimit",
    ),
    # Threads count as processes of the user.
    Check(
        of="system",
        cause="too-few-processes",
        level=Level.WARNING,
        bad=lambda s: 0 <= s.facts.limits.get("nproc", -1) < _LOW_PROCESSES and s.facts.uid != 0,
        worst=lambda s: s.facts.limits["nproc"],
        error="the user may have only {facts.limits[nproc]} processes and threads on {nodes}",
        because=("`Resource temporarily unavailable` when threads are started",),
        hint="ulimit -u 65536, or ask the site for more",
    ),
    Check(
        of="system",
        cause="core-files",
        level=Level.NOTE,
        when=LONG,
        bad=lambda s: s.facts.limits.get("core") == -1,
        error="core files have no limit on {nodes}: each worker that crashes may leave all its memory",
        because=("a job of many workers fills a quota so",),
        hint="ulimit -c 0 in the job script, unless you want them",
    ),
    Check(
        of="system",
        cause="out-of-memory",
        level=_memory_level,
        error="the job may use only {limit} of {total} memory on {nodes}",
        words=lambda s: {
            "limit": show_bytes(s.facts.memory_limit_bytes),
            "total": show_bytes(s.facts.memory_bytes),
        },
        because=(
            "its control group has that limit; above it the kernel kills a process with SIGKILL (-9)",
        ),
        hint="ask for more: `muster run --mem 64Gi`, sbatch --mem, docker run --memory",
    ),
    # Workers that share one CPU are slow without a word; srun of Slurm 22.05 to 23.02 did that.
    Check(
        of="system",
        cause="too-few-cpus",
        level=Level.WARNING,
        bad=_has_few_cpus,
        each=True,
        error="{node.num_workers} {workers} of {nodes} may use only {facts.num_usable_cpus} {cpus}",
        words=_cpus,
        because=("{why}",),
        hint="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, or `muster run --cpus-per-node N`",
    ),
    # The slowest node decides.
    Equal(
        of="system",
        cause="nodes-differ",
        level=Level.NOTE,
        when=LONG,
        value=lambda s: s.facts.num_usable_cpus,
        error="the nodes have different numbers of CPUs: {text}",
    ),
    Equal(
        of="system",
        cause="nodes-differ",
        level=Level.NOTE,
        when=LONG,
        value=lambda s: round(s.facts.memory_bytes / _GIB / 16) * 16,
        error="the nodes have different numbers of GiB memory: {text}",
    ),
)
