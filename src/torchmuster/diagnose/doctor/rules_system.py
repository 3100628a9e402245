"""Limits, memory, shared memory and processors of each node."""

from collections.abc import Iterator, Sequence

from torchmuster.diagnose.doctor.situation import (
    NodeView,
    Rule,
    Situation,
    differ,
    names_of,
    show_bytes,
)
from torchmuster.diagnose.facts.system import SHARED_MEMORY, SystemFacts
from torchmuster.diagnose.finding import Finding, Level

_MIB, _GIB = 1 << 20, 1 << 30
# The default of Docker and of Kubernetes.
DEFAULT_SHM_BYTES = 64 * _MIB
_NO_ROOM_BYTES = 16 * _MIB
_LOW_FILES, _USUAL_FILES = 1024, 4096
_LOW_PROCESSES = 1024
_WORKER_BYTES = _GIB


def _systems(situation: Situation) -> list[tuple[NodeView, SystemFacts]]:
    found = [(n, n.facts.system) for n in situation.known if n.facts is not None]
    return [(node, system) for node, system in found if system is not None]


def _has_gpus(node: NodeView) -> bool:
    return bool(node.facts and node.facts.gpu and node.facts.gpu.num_devices)


def shared_memory(situation: Situation) -> Iterator[Finding]:
    """NCCL and loader processes keep what they share in /dev/shm; when it is full they die with SIGBUS."""
    small: dict[Level, list[tuple[NodeView, SystemFacts]]] = {}
    for node, system in _systems(situation):
        level = shm_level(system.shm_bytes, gpus=_has_gpus(node), several=node.num_workers > 1)
        if level is not None:
            small.setdefault(level, []).append((node, system))
    for level, rows in small.items():
        size = rows[0][1].shm_bytes
        names = [node.name for node, _ in rows]
        what = f"is only {show_bytes(size)}" if size is not None else "is missing"
        yield Finding(
            level=level,
            cause="small-dev-shm",
            error=f"{SHARED_MEMORY} {what} on {names_of(names)}",
            at=names_of(names),
            because=(
                "loader processes and NCCL share memory there: when it is full, workers die of SIGBUS (-7)",
            ),
            hint="docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm;"
            " or num_workers=0",
            weight=48,
        )


def shm_level(size: int | None, *, gpus: bool, several: bool) -> Level | None:
    """Return how bad a size of /dev/shm is; None when it is large enough."""
    if size is None:
        return Level.WARNING
    if size < DEFAULT_SHM_BYTES:
        return Level.WARNING if not gpus else Level.FAILURE
    if size >= _GIB:
        return None
    if gpus:
        return Level.FAILURE if size == DEFAULT_SHM_BYTES and several else Level.WARNING
    return Level.NOTE


def full_shared_memory(situation: Situation) -> Iterator[Finding]:
    """What dead jobs left in /dev/shm takes the room."""
    full = [
        (node.name, system.shm_free_bytes)
        for node, system in _systems(situation)
        if system.shm_free_bytes is not None
        and system.shm_bytes is not None
        and system.shm_bytes > DEFAULT_SHM_BYTES
        and system.shm_free_bytes < DEFAULT_SHM_BYTES
    ]
    if full:
        names = [name for name, _ in full]
        yield Finding(
            level=Level.WARNING,
            cause="small-dev-shm",
            error=f"{SHARED_MEMORY} is nearly full on {names_of(names)}: {show_bytes(full[0][1])} are free",
            at=names_of(names),
            because=("files of jobs that were killed stay there",),
            hint=f"ls -l {SHARED_MEMORY}; remove what belongs to no running process (fuser -v {SHARED_MEMORY}/*)",
            weight=47,
        )


def open_files(situation: Situation) -> Iterator[Finding]:
    """Every connection and every loader process takes descriptors."""
    rows = {
        n.name: s.limits["nofile"]
        for n, s in _systems(situation)
        if 0 <= s.limits.get("nofile", -1) < _USUAL_FILES
    }
    if not rows:
        return
    lowest = min(rows.values())
    yield Finding(
        level=Level.WARNING if lowest < _LOW_FILES else Level.NOTE,
        cause="too-few-files",
        error=f"a process may open only {lowest} files on {names_of(list(rows))}",
        at=names_of(list(rows)),
        because=("`Too many open files` comes with many ranks or loader processes",),
        hint="ulimit -n 65536 in the job script",
    )


def processes(situation: Situation) -> Iterator[Finding]:
    """Threads count as processes of the user."""
    rows = {
        n.name: s.limits["nproc"]
        for n, s in _systems(situation)
        if 0 <= s.limits.get("nproc", -1) < _LOW_PROCESSES and s.uid != 0
    }
    if rows:
        yield Finding(
            level=Level.WARNING,
            cause="too-few-processes",
            error=f"the user may have only {min(rows.values())} processes and threads on {names_of(list(rows))}",
            at=names_of(list(rows)),
            because=("`Resource temporarily unavailable` when threads are started",),
            hint="ulimit -u 65536, or ask the site for more",
        )


def core_files(situation: Situation) -> Iterator[Finding]:
    """A worker that crashes may write all its memory into the folder of the job."""
    rows = [n.name for n, s in _systems(situation) if s.limits.get("core") == -1]
    if rows and situation.is_long:
        yield Finding(
            level=Level.NOTE,
            cause="core-files",
            error=f"core files have no limit on {names_of(rows)}: each worker that crashes may leave all its memory",
            at=names_of(rows),
            because=("a job of many workers fills a quota so",),
            hint="ulimit -c 0 in the job script, unless you want them",
        )


def memory(situation: Situation) -> Iterator[Finding]:
    """A limit below what the machine has ends workers with SIGKILL."""
    for level, rows in _memory_rows(situation).items():
        name, limit, total = rows[0]
        yield Finding(
            level=level,
            cause="out-of-memory",
            error=f"the job may use only {show_bytes(limit)} of {show_bytes(total)} memory on"
            f" {names_of([row[0] for row in rows])}",
            at=name,
            because=(
                "its control group has that limit; above it the kernel kills a process with SIGKILL (-9)",
            ),
            hint="ask for more: `muster run --mem 64Gi`, sbatch --mem, docker run --memory",
        )


def _memory_rows(situation: Situation) -> dict[Level, list[tuple[str, int, int]]]:
    found: dict[Level, list[tuple[str, int, int]]] = {}
    for node, system in _systems(situation):
        limit = system.memory_limit_bytes
        if limit is None or limit >= system.memory_bytes // 4:
            continue
        is_tight = limit < _WORKER_BYTES * node.num_workers
        level = Level.WARNING if is_tight else Level.NOTE
        found.setdefault(level, []).append((node.name, limit, system.memory_bytes))
    return found


def processors(situation: Situation) -> Iterator[Finding]:
    """Workers that share one CPU are slow without a word; srun of Slurm 22.05 to 23.02 did that."""
    for node, system in _systems(situation):
        asked = _asked_cpus(node)
        few = system.num_usable_cpus < node.num_workers or (
            system.num_usable_cpus == 1 and system.num_cpus > 1 and situation.is_long
        )
        if asked is not None and system.num_usable_cpus < asked:
            because = f"SLURM_CPUS_PER_TASK is {asked}, the process may use {system.cpus}"
        elif few:
            because = f"it may use CPU {system.cpus} of {system.num_cpus}"
        else:
            continue
        if system.num_cpus == system.num_usable_cpus:  # a small machine, not a wrong mask
            continue
        word = "CPU" if system.num_usable_cpus == 1 else "CPUs"
        yield Finding(
            level=Level.WARNING,
            cause="too-few-cpus",
            error=f"{node.num_workers} worker{'s' if node.num_workers != 1 else ''} of {node.name} may use only"
            f" {system.num_usable_cpus} {word}",
            at=node.name,
            because=(because,),
            hint="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, or `muster run --cpus-per-node N`",
        )


def _asked_cpus(node: NodeView) -> int | None:
    environment = node.facts.environment if node.facts else None
    word = environment.scheduler.get("SLURM_CPUS_PER_TASK", "") if environment else ""
    return int(word) if word.isdecimal() else None


def uneven(situation: Situation) -> Iterator[Finding]:
    """Nodes of different size: the slowest decides."""
    rows = _systems(situation)
    for what, values in (
        ("CPUs", {n.name: s.num_usable_cpus for n, s in rows}),
        ("GiB memory", {n.name: round(s.memory_bytes / _GIB / 16) * 16 for n, s in rows}),
    ):
        found = differ(values, "") if situation.is_long else None
        if found is not None:
            yield Finding(
                level=Level.NOTE,
                cause="nodes-differ",
                error=f"the nodes have different numbers of {what}: {found.text}",
                at=names_of(found.odd),
            )


RULES: Sequence[Rule] = (
    shared_memory,
    full_shared_memory,
    open_files,
    processes,
    core_files,
    memory,
    processors,
    uneven,
)
