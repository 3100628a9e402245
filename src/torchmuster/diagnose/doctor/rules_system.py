"""Checks of folders and the script, and of each node's limits, memory and processors."""

from collections.abc import Iterator, Sequence
from typing import Any

from torchmuster.core.model import contract
from torchmuster.diagnose.doctor.checks import LONG, Check, Equal, NodePart, look
from torchmuster.diagnose.doctor.show import NodeView, Rule, Situation, differ, names_of, show_bytes
from torchmuster.diagnose.finding import Finding, Level
from torchmuster.launcher.facts.collect import SHARED_MEMORY, FolderFacts

# Folders and script: they exist, are writable, have free space, and are the same on all nodes.


_MIB, _GIB = 1 << 20, 1 << 30
_FULL_BYTES, _LOW_BYTES = 16 * _MIB, _GIB
_FEW_FILES = 1000
# A Unix socket's path has 108 bytes, and programs add about 20.
_LONG_TEMP = 90
_WORDS = {"run": "the folder of the run", "snapshots": "the folder of snapshots", "temp": "TMPDIR"}


def _folders(situation: Situation, role: str) -> list[tuple[NodeView, FolderFacts]]:
    seen = look(situation, "files")
    return [(s.node, folder) for s in seen for folder in s.facts.folders if folder.role == role]


def script(situation: Situation) -> Iterator[Finding]:
    """Report a script that is missing, can't be read, or differs between nodes."""
    seen = look(situation, "files")
    rows = [(s.node, s.facts.script) for s in seen if s.facts.script is not None]
    missing = [(n, s) for n, s in rows if not s.is_there]
    if missing:
        nodes = names_of([n.name for n, _ in missing])
        some = len(missing) < len(rows)
        yield Finding(
            level=Level.FAILURE,
            cause="script-missing",
            error=f"the script does not exist on {nodes}: {missing[0][1].path}",
            at=nodes,
            because=(missing[0][1].why, *(("the other nodes see it",) if some else ())),
            hint="put it on a file system that all nodes see, or copy it to the same path on each",
            is_certain=situation.script_is_program,
            weight=95,
        )
    closed = [(n, s) for n, s in rows if s.is_there and s.why]
    if closed:
        yield Finding(
            level=Level.FAILURE,
            cause="script-missing",
            error=f"the script can't be read on {names_of([n.name for n, _ in closed])}: {closed[0][1].path}",
            at=names_of([n.name for n, _ in closed]),
            because=(closed[0][1].why,),
            hint=f"chmod u+r {closed[0][1].path}",
            weight=94,
        )
    found = differ({n.name: s.sha256 for n, s in rows if s.sha256}, "", lambda value: value[:12])
    if found is not None:
        yield Finding(
            level=Level.FAILURE,
            cause="scripts-differ",
            error=f"the script is not the same on all nodes: {names_of(found.odd)}"
            f" {'differs' if len(found.odd) == 1 else 'differ'}",
            at=rows[0][1].path,
            because=(f"sha256: {found.text}",),
            hint="copy one version to all nodes, or use a file system that they share",
            weight=60,
        )


def writable(situation: Situation) -> Iterator[Finding]:
    """Report folders that are missing, can't be written or do not allow renaming."""
    for role, words in _WORDS.items():
        rows = [(n, f) for n, f in _folders(situation, role) if f.is_there or role != "snapshots"]
        gone = [(n, f) for n, f in rows if not f.is_there]
        closed = [(n, f) for n, f in rows if f.is_there and not f.is_writable]
        stiff = [(n, f) for n, f in rows if f.is_writable and not f.can_rename]
        level = Level.WARNING if role == "temp" else Level.FAILURE
        for bad, what in (
            (gone, "does not exist"),
            (closed, "can't be written"),
            (stiff, "does not allow renaming files"),
        ):
            if bad:
                full = "space" in bad[0][1].why
                yield Finding(
                    level=level,
                    cause="disk-full" if full else "folder-not-writable",
                    error=f"{words} {what} on {names_of([n.name for n, _ in bad])}",
                    at=bad[0][1].path,
                    because=(bad[0][1].why,),
                    hint=_room_hint(role) if full else _folder_hint(role),
                    weight=55,
                )


def room(situation: Situation) -> Iterator[Finding]:
    """Report too little free space for logs and snapshots."""
    for role, words in _WORDS.items():
        rows = [(n, f) for n, f in _folders(situation, role) if f.is_writable]
        full = [(n, f) for n, f in rows if f.free_bytes < _FULL_BYTES]
        low = [(n, f) for n, f in rows if _FULL_BYTES <= f.free_bytes < _LOW_BYTES]
        if full or low:
            _node, folder = (full or low)[0]
            names = names_of([n.name for n, _ in full or low])
            hard = bool(full) and role != "temp"
            yield Finding(
                level=Level.FAILURE
                if hard
                else Level.WARNING
                if full or role != "temp"
                else Level.NOTE,
                cause="disk-full",
                error=f"{words} has {show_bytes(folder.free_bytes)} free on {names}",
                at=folder.path,
                because=("a snapshot with Adam takes about 12 to 16 bytes for each parameter",),
                hint=_room_hint(role),
                weight=54,
            )
        few = [(n, f) for n, f in rows if 0 <= f.free_files < _FEW_FILES]
        if few:
            yield Finding(
                level=Level.WARNING,
                cause="disk-full",
                error=f"{words} can take only {few[0][1].free_files} more files on"
                f" {names_of([n.name for n, _ in few])}",
                at=few[0][1].path,
                because=("its file system has no more inodes",),
                hint=_room_hint(role),
                weight=53,
            )


def shared(situation: Situation) -> Iterator[Finding]:
    """Note nodes that do not share the run's folder: ranks can't read each other's snapshots."""
    rows = {n.name: f.identity for n, f in _folders(situation, "run") if f.identity}
    seconds = {name: stamp[:1] for name, stamp in rows.items()}
    coarse = any(stamp[1:] == (0,) for stamp in rows.values())  # sftp knows only whole seconds
    found = differ(seconds if coarse else rows, "", lambda stamp: ".".join(map(str, stamp)))
    seen = [one.facts.scheduler for one in look(situation, "environment")]
    in_pods = any(contract.MACHINE_VARIABLE in scheduler for scheduler in seen)
    if found is not None and situation.has_machines:
        yield Finding(
            level=Level.NOTE,
            cause="folder-not-shared",
            error="the nodes do not share the folder of the run: each has its own",
            at=_folders(situation, "run")[0][1].path,
            because=(
                "sharded snapshots, and files that rank 0 writes for others, are not visible on all nodes",
            ),
            hint="`claims` and `home` of the site keep runs on a volume that all pods see"
            if in_pods
            else "set MUSTER_HOME to a folder that all nodes see",
        )


def long_temp(situation: Situation) -> Iterator[Finding]:
    """Report a long TMPDIR: it leaves no room for the names of sockets."""
    rows = [(n, f) for n, f in _folders(situation, "temp") if len(f.path) >= _LONG_TEMP]
    if rows:
        yield Finding(
            level=Level.WARNING,
            cause="long-tmpdir",
            error=f"the path of TMPDIR has {len(rows[0][1].path)} characters on {names_of([n.name for n, _ in rows])}",
            at=rows[0][1].path,
            because=("a Unix socket's path has at most 108: `AF_UNIX path too long` follows",),
            hint="export TMPDIR=/tmp",
        )


def _folder_hint(role: str) -> str:
    if role == "temp":
        return "export TMPDIR=/tmp"
    return "set MUSTER_HOME to a folder that all nodes can write to"


def _room_hint(role: str) -> str:
    if role == "temp":
        return "export TMPDIR to a folder with room"
    return "`muster prune` removes old runs; or set MUSTER_HOME to a file system with room"


FILE_RULES: Sequence[Rule] = (script, writable, room, shared, long_temp)


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
    """Return WARNING for leftovers of a quarter of /dev/shm: the next job lacks that space."""
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
    # Nothing else removes them before the machine restarts.
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
    # Every connection and every loader process uses descriptors.
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
    # Workers that share one CPU are slow without a message; srun of Slurm 22.05 to 23.02 did that.
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
    # The slowest node sets the pace.
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
