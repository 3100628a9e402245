"""The folders of a run as a node sees them: shared with other nodes, writable, free space."""

import errno
import hashlib
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MAX_HASHED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A folder that a run uses.

    Attributes:
        role: `run`, `snapshots` or `temp`.
        identity: Seconds and nanoseconds of the last change of a file in it that is written once; equal on two
            nodes that see the same file. Empty when there is no such file.
        why: Why it can't be written, or a file in it not renamed.
        free_files: How many more files it can have; -1 if the file system doesn't count them.
    """

    role: str
    path: str
    is_there: bool
    identity: tuple[int, ...] = ()
    is_writable: bool = False
    can_rename: bool = False
    why: str = ""
    free_bytes: int = 0
    free_files: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """The script as a node sees it; no checksum above 16 MiB."""

    path: str
    is_there: bool
    why: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Folders and script of a run on one node."""

    folders: tuple[FolderFacts, ...] = ()
    script: ScriptFacts | None = None


def collect_files(
    run_dir: str | None,
    once_written: str | None,
    script: str | None,
    environment: Mapping[str, str],
    more: Sequence[tuple[str, str]] = (),
) -> FileFacts:
    """Return the facts; test files are removed.

    Args:
        run_dir: The run's folder; None where there is no run.
        once_written: A file in it that nobody changes after the start.
        script: The program's path, absolute.
        environment: The job's variables: TMPDIR is among them.
        more: Other folders by role.
    """
    folders = []
    if run_dir is not None:
        folders.append(look_at("run", run_dir, once_written))
    folders += [look_at(role, path, None) for role, path in more]
    temporary = environment.get("TMPDIR") or tempfile.gettempdir()
    folders.append(look_at("temp", temporary, None))
    return FileFacts(
        folders=tuple(folders),
        script=look_at_script(script) if script else None,
    )


def look_at(role: str, path: str, once_written: str | None) -> FolderFacts:
    """Return the facts about a folder; a test file is created in it, renamed and removed."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return FolderFacts(role=role, path=path, is_there=False, why=_why(error))
    writable, renames, why = _try_to_write(path)
    return FolderFacts(
        role=role,
        path=path,
        is_there=True,
        identity=_identity(once_written),
        is_writable=writable,
        can_rename=renames,
        why=why,
        free_bytes=disk.f_bavail * disk.f_frsize,
        free_files=disk.f_favail if disk.f_files else -1,
    )


def _identity(path: str | None) -> tuple[int, ...]:
    """Return the ctime of a file: a copy can have every other attribute of it."""
    if path is None:
        return ()
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return divmod(status.st_ctime_ns, 1_000_000_000)


def _try_to_write(folder: str) -> tuple[bool, bool, str]:
    path = os.path.join(folder, f".muster-preflight-{secrets.token_hex(8)}")
    written = False
    try:
        with open(path, "xb") as file:
            file.write(b"preflight\n")
            file.flush()
        written = True
        os.replace(path, f"{path}.renamed")
        os.unlink(f"{path}.renamed")
    except OSError as error:
        for left in (path, f"{path}.renamed"):
            try:
                os.unlink(left)
            except OSError:
                continue
        return written, False, _why(error)
    return True, True, ""


def look_at_script(path: str) -> ScriptFacts:
    """Return size and checksum of the program."""
    digest = hashlib.sha256()
    try:
        size = os.stat(path).st_size
        if os.path.isdir(path):
            return ScriptFacts(path=path, is_there=True)
        with open(path, "rb") as file:
            if size <= _MAX_HASHED_BYTES:
                digest.update(file.read(_MAX_HASHED_BYTES))
    except OSError as error:
        is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        return ScriptFacts(path=path, is_there=not is_missing, why=_why(error))
    checksum = digest.hexdigest() if size <= _MAX_HASHED_BYTES else ""
    return ScriptFacts(path=path, is_there=True, sha256=checksum)


def _why(error: OSError) -> str:
    return error.strerror or str(error)
