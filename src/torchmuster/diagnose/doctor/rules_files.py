"""Folders and script: existing, writable, with free space, and the same on all nodes."""

from collections.abc import Iterator, Sequence

from torchmuster.diagnose.doctor.checks import look
from torchmuster.diagnose.doctor.show import NodeView, Rule, Situation, differ, names_of, show_bytes
from torchmuster.diagnose.facts.files import FolderFacts
from torchmuster.diagnose.finding import Finding, Level
from torchmuster.model import contract

_MIB, _GIB = 1 << 20, 1 << 30
_FULL_BYTES, _LOW_BYTES = 16 * _MIB, _GIB
_LOW_FILES = 1000
# A Unix socket's path has 108 bytes, and programs add about 20.
_LONG_TEMP = 90
_WORDS = {"run": "the folder of the run", "snapshots": "the folder of snapshots", "temp": "TMPDIR"}


def _folders(situation: Situation, role: str) -> list[tuple[NodeView, FolderFacts]]:
    seen = look(situation, "files")
    return [(s.node, folder) for s in seen for folder in s.facts.folders if folder.role == role]


def script(situation: Situation) -> Iterator[Finding]:
    """A script that is missing or differs between nodes."""
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
    """A folder that can't be written or does not allow renaming."""
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
    """Too little free space for logs and snapshots."""
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
        few = [(n, f) for n, f in rows if 0 <= f.free_files < _LOW_FILES]
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
    """Whether all nodes write into the same folder: otherwise ranks can't read each other's snapshots."""
    rows = {n.name: f.identity for n, f in _folders(situation, "run") if f.identity}
    seconds = {name: stamp[:1] for name, stamp in rows.items()}
    coarse = any(stamp[1:] == (0,) for stamp in rows.values())  # sftp knows whole seconds only
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
    """A long TMPDIR leaves no room for the names of sockets."""
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


RULES: Sequence[Rule] = (script, writable, room, shared, long_temp)
