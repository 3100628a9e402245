"""Fill a node's scratch folder: link, copy or unpack what `--stage` names.

A file system that hangs must not stop the agent, and a copy must end when the run does: so this is a process that
can be killed. It speaks as all movers of files do (`launcher/node/shell.py`).
What is whole has a marker and is not done again; what is half is redone: it is written beside and renamed.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.plan import ARCHIVE_SUFFIXES, Stage, StageOrder
from torchmuster.core.model.text import show_size
from torchmuster.errors import MusterError
from torchmuster.workflow.data.tree import copy_file

OWN_FOLDER = ".muster"  # below the scratch folder: markers and incomplete stages
_BLOCK_BYTES = 4 << 20
_SAY_EVERY_S = 0.25

Tell = Callable[[str, int, int], None]  # source, bytes done, total bytes


class StagingError(MusterError):
    """A source can't be staged to the scratch folder."""


@dataclass(slots=True)
class StageProgress:
    """Counts the bytes of one stage and reports them at most every 0.25 s."""

    source: str
    tell: Tell
    total_bytes: int = 0
    done_bytes: int = 0
    said_at: float = 0.0

    def add(self, size_bytes: int) -> None:
        """Count finished bytes."""
        self.done_bytes += size_bytes
        if time.monotonic() - self.said_at >= _SAY_EVERY_S:
            self.said_at = time.monotonic()
            self.tell(self.source, self.done_bytes, self.total_bytes)


def is_archive(path: str) -> bool:
    """Return whether a path is to be unpacked: a file with the suffix of an archive."""
    return path.endswith(ARCHIVE_SUFFIXES) and not os.path.isdir(path)


def stage_all(scratch: str, stages: list[Stage], tell: Tell) -> None:
    """Stage everything that is not in the scratch folder yet.

    Raises:
        StagingError: A source is missing, an archive is unsafe, or the space does not suffice.
    """
    os.makedirs(os.path.join(scratch, OWN_FOLDER), mode=0o700, exist_ok=True)
    for number, stage in enumerate(stages):
        try:
            _stage(scratch, number, stage, StageProgress(stage.source, tell))
        except OSError as error:
            raise _explain(error, scratch, stage) from error
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, ValueError) as error:
            fix = "is it whole? compare its size and checksum with the original"
            what = f"`{stage.source}` can't be unpacked"
            raise StagingError(what, where=stage.source, why=str(error), fix=fix) from error


def _stage(scratch: str, number: int, stage: Stage, progress: StageProgress) -> None:
    facts = _facts(stage)
    target = os.path.normpath(os.path.join(scratch, stage.target))
    marker = os.path.join(scratch, OWN_FOLDER, f"stage-{number}.json")
    if atomic.read_json(marker) == facts and os.path.lexists(target):
        return
    _check_target(scratch, target, stage)
    half = os.path.join(scratch, OWN_FOLDER, f"half-{number}")
    _remove(half)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(marker)
    if is_archive(stage.source):
        os.mkdir(half)
        _unpack(stage.source, half, progress)
        os.makedirs(target, exist_ok=True)
        _merge(half, target)
    else:
        if os.stat(stage.source).st_dev == os.stat(scratch).st_dev:
            os.symlink(os.path.realpath(stage.source), half)
        else:
            _copy(scratch, stage.source, half, progress)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _remove(target)
        os.rename(half, target)
    atomic.write_json(marker, facts)


def _facts(stage: Stage) -> dict[str, Any]:
    """Return the facts that distinguish this source from another one of the same name."""
    status = os.stat(stage.source)
    return {
        "source": stage.source,
        "target": stage.target,
        "inode": status.st_ino,
        "size_bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }


def _check_target(scratch: str, target: str, stage: Stage) -> None:
    """Refuse a target outside of the scratch folder, e.g. through an earlier stage's link."""
    folder = target if is_archive(stage.source) else os.path.dirname(target)
    if os.path.commonpath([scratch, target]) != scratch:
        what = f"`{stage.target}` lies outside of the scratch folder"
        raise StagingError(what, where=stage.source)
    while folder != scratch:
        if os.path.islink(folder):
            what = f"`{stage.target}` lies behind a link: it would be written into {os.path.realpath(folder)}"
            raise StagingError(what, where=stage.source, fix="give it a DST of its own")
        folder = os.path.dirname(folder)


def _explain(error: OSError, scratch: str, stage: Stage) -> StagingError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_room(scratch, stage.source, None, reason)
    if error.errno == errno.ENOENT and not os.path.exists(stage.source):
        fix = "is the path right, and is its file system mounted on this node?"
        return StagingError(
            f"`{stage.source}` does not exist", where=stage.source, why=reason, fix=fix
        )
    what = f"`{stage.source}` can't be staged to {scratch}"
    return StagingError(what, where=error.filename or stage.source, why=reason)


def _no_room(scratch: str, source: str, need_bytes: int | None, why: str) -> StagingError:
    free = show_size(_room_bytes(scratch))
    need = f"it needs {show_size(need_bytes)}" if need_bytes is not None else why
    return StagingError(
        f"there is not enough space for `{source}`",
        where=scratch,
        why=f"{need}, and {free} are free there",
        fix="`scratch` of the site, or SLURM_TMPDIR or TMPDIR, names a folder with more space",
    )


def _room_bytes(folder: str) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _merge(source: str, target: str) -> None:
    """Move the entries of one folder into another and replace what is there."""
    for name in os.listdir(source):
        ours, theirs = os.path.join(source, name), os.path.join(target, name)
        are_folders = [os.path.isdir(p) and not os.path.islink(p) for p in (ours, theirs)]
        if all(are_folders):
            _merge(ours, theirs)
        else:
            _remove(theirs)
            os.rename(ours, theirs)
    os.rmdir(source)


# Copying.


def _copy(scratch: str, source: str, target: str, progress: StageProgress) -> None:
    progress.total_bytes = _total_bytes(source)
    if progress.total_bytes > _room_bytes(scratch):
        raise _no_room(scratch, source, progress.total_bytes, "")
    copy = _copy_folder if os.path.isdir(source) else _copy_file
    copy(source, target, progress)


def _total_bytes(path: str) -> int:
    if not os.path.isdir(path):
        return os.stat(path).st_size
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += _total_bytes(entry.path)
            elif entry.is_file(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _copy_folder(source: str, target: str, progress: StageProgress) -> None:
    os.mkdir(target, 0o700)
    with os.scandir(source) as entries:
        for entry in entries:
            path = os.path.join(target, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)
            elif entry.is_dir():
                _copy_folder(entry.path, path, progress)
            elif entry.is_file():
                _copy_file(entry.path, path, progress)
    shutil.copystat(source, target)
    os.chmod(target, stat.S_IMODE(os.stat(target).st_mode) | 0o700)  # so that it can be removed


def _copy_file(source: str, target: str, progress: StageProgress) -> None:
    copy_file(source, target, progress.add)
    shutil.copystat(source, target)


# Unpacking.


class _Counted:
    """A file that counts the bytes read from it."""

    def __init__(self, file: IO[bytes], progress: StageProgress) -> None:
        self._file = file
        self._progress = progress

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self._progress.add(len(block))
        return block


def _unpack(source: str, folder: str, progress: StageProgress) -> None:
    progress.total_bytes = os.stat(source).st_size
    if source.endswith(".zip"):
        _unpack_zip(source, folder, progress)
    elif source.endswith(".zst"):
        _unpack_zst(source, folder, progress)
    else:
        with open(source, "rb") as file:
            _unpack_tar(_Counted(file, progress), "r|*", folder)


def _unpack_tar(file: Any, mode: Any, folder: str) -> None:
    with tarfile.open(fileobj=file, mode=mode) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
            return
        for member in archive:  # Python 3.11.0 to 3.11.3, e.g. in Debian 12
            archive.extract(_checked(member, folder), folder)


def _checked(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Return a member as tarfile's own "data" filter would change it.

    Raises:
        ValueError: The member is a special file, or leads out of the folder.
    """
    member.name = member.name.lstrip("/")
    base = os.path.realpath(folder)
    path = os.path.join(base, member.name)
    places = [path]
    if member.islnk() or member.issym():
        if os.path.isabs(member.linkname):
            raise ValueError(f"`{member.name}` is a link to an absolute path")
        start = os.path.dirname(path) if member.issym() else base
        places.append(os.path.join(start, member.linkname))
    elif not (member.isreg() or member.isdir()):
        raise ValueError(f"`{member.name}` is a special file")
    for place in places:
        if os.path.commonpath([base, os.path.realpath(place)]) != base:
            raise ValueError(f"`{member.name}` would be outside of the folder")
    mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    member.mode = (member.mode & mode) | 0o600 | (0o100 if member.isdir() else 0)
    member.uid, member.gid = os.getuid(), os.getgid()
    member.uname = member.gname = ""
    return member


def _unpack_zst(source: str, folder: str, progress: StageProgress) -> None:
    program = shutil.which("zstd")
    if program is None:
        what = "a .zst archive needs the program `zstd`, which is not on this node"
        fix = "load its module in `setup`, or pack as .tar.gz"
        raise StagingError(what, where=source, fix=fix)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = proc.start([program, "-dcq", source], stdout=writer)
    os.close(writer)
    with open(reader, "rb") as file:
        _unpack_tar(_Counted(file, progress), "r|", folder)
        while file.read(_BLOCK_BYTES):  # so that zstd ends by itself
            pass
    status = child.wait(60.0)
    if status != 0:
        raise ValueError(f"zstd ended with {status}")


def _unpack_zip(source: str, folder: str, progress: StageProgress) -> None:
    with zipfile.ZipFile(source) as archive:
        members = archive.infolist()
        progress.total_bytes = sum(member.file_size for member in members)
        if progress.total_bytes > _room_bytes(folder):
            raise _no_room(folder, source, progress.total_bytes, "")
        for member in members:
            path = os.path.normpath(os.path.join(folder, member.filename))
            if os.path.commonpath([folder, path]) != folder:
                raise ValueError(f"`{member.filename}` would be written outside of the folder")
            archive.extract(member, folder)
            mode = (member.external_attr >> 16) & 0o777
            if mode and not member.is_dir():
                os.chmod(path, mode | 0o600)
            progress.add(member.file_size)


def main(arguments: list[str]) -> int:
    """Stage what the agent asks for; report progress on standard output."""
    order = codec.from_word(StageOrder, arguments)

    def say(kind: str, value: Any) -> None:
        sys.stdout.write(json.dumps({kind: value}) + "\n")
        sys.stdout.flush()

    def tell(source: str, done: int, total: int) -> None:
        say("progress", {"source": source, "bytes_done": done, "total_bytes": total})

    try:
        stage_all(order.scratch, list(order.stages), tell)
    except MusterError as error:
        say("error", error.parts())
        return 1
    say("done", {})
    return 0
