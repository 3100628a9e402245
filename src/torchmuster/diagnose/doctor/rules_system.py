"""Checks of folders and the script, and of each node's limits, memory and processors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.core.model import contract
from torchmuster.diagnose.doctor.checks import LONG, TEXTS, Check, Equal, NodePart, look
from torchmuster.diagnose.doctor.show import NodeView, Rule, Situation, differ, show_bytes
from torchmuster.diagnose.finding import Finding, Level
from torchmuster.launcher.facts.collect import FolderFacts

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
        yield replace(
            TEXTS["script-missing"].finding(
                [n.name for n, _ in missing],
                script=missing[0][1],
                others=["the other nodes see it"] if len(missing) < len(rows) else [],
            ),
            is_certain=situation.script_is_program,
        )
    closed = [(n, s) for n, s in rows if s.is_there and s.why]
    if closed:
        yield TEXTS["script-closed"].finding([n.name for n, _ in closed], script=closed[0][1])
    found = differ({n.name: s.sha256 for n, s in rows if s.sha256}, "", lambda value: value[:12])
    if found is not None:
        yield TEXTS["scripts-differ"].finding(
            found.odd,
            at=rows[0][1].path,
            differ="differs" if len(found.odd) == 1 else "differ",
            text=found.text,
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
                yield TEXTS["folder-full" if full else "folder-not-writable"].finding(
                    [n.name for n, _ in bad],
                    level=level,
                    at=bad[0][1].path,
                    folder=words,
                    what=what,
                    why=bad[0][1].why,
                    hint=_room_hint(role) if full else _folder_hint(role),
                )


def room(situation: Situation) -> Iterator[Finding]:
    """Report too little free space for logs and snapshots."""
    for role, words in _WORDS.items():
        rows = [(n, f) for n, f in _folders(situation, role) if f.is_writable]
        full = [(n, f) for n, f in rows if f.free_bytes < _FULL_BYTES]
        low = [(n, f) for n, f in rows if _FULL_BYTES <= f.free_bytes < _LOW_BYTES]
        if full or low:
            _node, folder = (full or low)[0]
            level = Level.WARNING if full or role != "temp" else Level.NOTE
            if full and role != "temp":
                level = Level.FAILURE
            yield TEXTS["little-room"].finding(
                [n.name for n, _ in full or low],
                level=level,
                at=folder.path,
                folder=words,
                free=show_bytes(folder.free_bytes),
                hint=_room_hint(role),
            )
        few = [(n, f) for n, f in rows if 0 <= f.free_files < _FEW_FILES]
        if few:
            yield TEXTS["few-inodes"].finding(
                [n.name for n, _ in few],
                at=few[0][1].path,
                folder=words,
                free=few[0][1].free_files,
                hint=_room_hint(role),
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
        yield TEXTS["folder-not-shared"].finding(
            [],
            at=_folders(situation, "run")[0][1].path,
            hint="`claims` and `home` of the site keep runs on a volume that all pods see"
            if in_pods
            else "set MUSTER_HOME to a folder that all nodes see",
        )


def long_temp(situation: Situation) -> Iterator[Finding]:
    """Report a long TMPDIR: it leaves no room for the names of sockets."""
    rows = [(n, f) for n, f in _folders(situation, "temp") if len(f.path) >= _LONG_TEMP]
    if rows:
        yield TEXTS["long-tmpdir"].finding(
            [n.name for n, _ in rows], at=rows[0][1].path, length=len(rows[0][1].path)
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
    Check(TEXTS["small-dev-shm"], level=_shm_level, words=_shm_size),
    Check(
        TEXTS["full-dev-shm"],
        bad=_is_shm_full,
        words=lambda s: {"free": show_bytes(s.facts.shm_free_bytes)},
    ),
    # Nothing else removes them before the machine restarts.
    Check(
        TEXTS["left-shared-memory"],
        level=_left_level,
        when=LONG,
        worst=lambda s: -s.facts.left_shm_bytes,
        words=_left,
    ),
    # Every connection and every loader process uses descriptors.
    Check(TEXTS["too-few-files"], level=_files_level, worst=lambda s: s.facts.limits["nofile"]),
    # Threads count as processes of the user.
    Check(
        TEXTS["too-few-processes"],
        bad=lambda s: 0 <= s.facts.limits.get("nproc", -1) < _LOW_PROCESSES and s.facts.uid != 0,
        worst=lambda s: s.facts.limits["nproc"],
    ),
    Check(TEXTS["core-files"], when=LONG, bad=lambda s: s.facts.limits.get("core") == -1),
    Check(
        TEXTS["out-of-memory"],
        level=_memory_level,
        words=lambda s: {
            "limit": show_bytes(s.facts.memory_limit_bytes),
            "total": show_bytes(s.facts.memory_bytes),
        },
    ),
    # Workers that share one CPU are slow without a message; srun of Slurm 22.05 to 23.02 did that.
    Check(TEXTS["too-few-cpus"], bad=_has_few_cpus, each=True, words=_cpus),
    # The slowest node sets the pace.
    Equal(TEXTS["cpus-differ"], when=LONG, value=lambda s: s.facts.num_usable_cpus),
    Equal(
        TEXTS["memory-differs"],
        when=LONG,
        value=lambda s: round(s.facts.memory_bytes / _GIB / 16) * 16,
    ),
)
