"""The storage of snapshots: a local (or shared) directory, or a URL that fsspec supports.

    step-000000120/              a committed snapshot
    .step-000000150.3.tmp/       being written by generation 3
    bad-step-000000090/          set aside because it was damaged
    generation-3                 the newest start of the run in this folder

A local commit: write and fsync the files in the temporary directory, fsync it, check that no newer
generation has begun, rename, fsync the parent. An object store has no rename: there the manifest is
written last and is the commit.
"""

import contextlib
import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from torchmuster.core.model import contract
from torchmuster.core.plainfile import write_all
from torchmuster.train.snapshot.layout import MANIFEST
from torchmuster.train.snapshot.state import DamagedError, SnapshotError, vanished
from torchmuster.workflow.data.remote import open_fsspec_store

# Every file operation of a save, by name, so that tests can kill a process at each of them.
#
# `before` is called with the operation's name and the path before each operation; it does nothing
# unless a test replaces it.


def _nothing(_operation: str, _path: str) -> None:
    pass


before: Callable[[str, str], None] = _nothing


def make_dir(path: str) -> None:
    """Create a directory with its missing parents."""
    before("mkdir", path)
    run_dir = os.environ.get(contract.RUN_DIR_VARIABLE)
    if run_dir is not None and path.startswith(run_dir):
        os.makedirs(run_dir, mode=0o700, exist_ok=True)  # if it was removed: it is private
    os.makedirs(path, exist_ok=True)


def make_one_dir(path: str) -> None:
    """Create a directory; don't create missing parents, which have vanished."""
    before("mkdir", path)
    os.mkdir(path)


def create(path: str) -> int:
    """Open a new file for writing."""
    before("create", path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def claim(path: str) -> bool:
    """Create an empty file; return False if it exists already."""
    before("claim", path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    return True


def write(fd: int, data: Any, path: str) -> None:
    """Write all of `data`."""
    before("write", path)
    write_all(fd, data)


def sync(fd: int, path: str) -> None:
    """Flush a file to the disk."""
    before("fsync", path)
    os.fsync(fd)


def sync_dir(path: str) -> None:
    """Flush a directory to the disk."""
    before("fsync directory", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(old: str, new: str) -> None:
    """Rename, atomically within one file system."""
    before("rename", new)
    os.rename(old, new)


def remove_tree(path: str) -> None:
    """Remove a directory and its contents."""
    before("remove", path)
    shutil.rmtree(path, ignore_errors=True)


_NAME = re.compile(r"step-(\d{9,})")
_BAD = re.compile(r"bad-step-\d{9,}(-\d+)?")
_GENERATION = re.compile(r"generation-(\d{1,9})")


def name_of(step: int) -> str:
    """Return the name of a step's snapshot."""
    return f"step-{step:09d}"


class Sink(Protocol):
    """A file being written."""

    def write(self, data: Any) -> None:
        """Append bytes."""

    def finish(self) -> None:
        """Flush to the disk and close."""


class Destination(Protocol):
    """What a writer needs from a destination of snapshots; `Folder` documents it."""

    @property
    def url(self) -> str:
        """The path or URL, for messages."""

    def steps(self) -> list[int]:
        """Return the steps of all committed snapshots, the newest first."""

    def begin(self, step: int, generation: int) -> None:
        """Create the place of a snapshot."""

    def create(self, step: int, generation: int, name: str) -> Sink:
        """Open one file of a snapshot that was begun."""

    def commit(self, step: int, generation: int, manifest: bytes) -> None:
        """Write the manifest and make the snapshot visible."""

    def abandon(self, step: int, generation: int) -> None:
        """Remove the files of a snapshot that could not be committed."""

    def delete(self, step: int) -> None:
        """Remove a committed snapshot."""


class Folder(ABC):
    """A folder of snapshots.

    Attributes:
        url: Its path or URL.
        is_foreign: It belongs to another run, and only that run may change it.
    """

    url: str
    is_foreign = False

    def newest_generation(self) -> int:
        """Return the number of the newest start; 0 for none."""
        return max(self._generations(), default=0)

    def steps(self) -> list[int]:
        """Return the steps of all committed snapshots, the newest first."""
        return self._steps()

    def set_aside_names(self) -> list[str]:
        """Return the names of the snapshots that were set aside."""
        return sorted(filter(_BAD.fullmatch, self._names()))

    def exists_here(self, name: str) -> bool:
        """Return whether a plain file of that name is visible from this node."""
        # Listing makes an NFS client ask the server again.
        return name in self._names()

    def _generations(self) -> list[int]:
        return [int(m[1]) for m in map(_GENERATION.fullmatch, self._names()) if m]

    def _steps(self) -> list[int]:
        found = map(_NAME.fullmatch, self._names())
        return sorted((int(m[1]) for m in found if m), reverse=True)

    def _name_for_bad(self, step: int) -> str:
        """Return `bad-...` for a step, with a number appended if that name exists."""
        taken, name, number = self._names(), f"bad-{name_of(step)}", 1
        unused = name
        while unused in taken:
            number += 1
            unused = f"{name}-{number}"
        return unused

    @abstractmethod
    def _names(self) -> list[str]:
        """Return the names in the folder; none if it does not exist."""

    @abstractmethod
    def claim_generation(self, at_least: int = 1) -> int:
        """Claim and return a number above those of all earlier starts."""

    @abstractmethod
    def begin(self, step: int, generation: int) -> None:
        """Create the directory that a snapshot is written to."""

    @abstractmethod
    def create(self, step: int, generation: int, name: str) -> Sink:
        """Open one file of a snapshot that was begun."""

    @abstractmethod
    def commit(self, step: int, generation: int, manifest: bytes) -> None:
        """Write the manifest and make the snapshot visible."""

    @abstractmethod
    def abandon(self, step: int, generation: int) -> None:
        """Remove the files of a snapshot that could not be committed."""

    @abstractmethod
    def size(self, step: int, name: str) -> int:
        """Return the size of a committed file in bytes."""

    @abstractmethod
    def read_into(self, step: int, name: str, buffer: memoryview, begin: int = 0) -> int:
        """Fill `buffer` from byte `begin` of a committed file; return the number of bytes read."""

    @abstractmethod
    def set_aside(self, step: int) -> str:
        """Rename a damaged snapshot; return its new name."""

    @abstractmethod
    def delete(self, step: int) -> None:
        """Remove a committed snapshot."""

    @abstractmethod
    def tidy(self, generation: int) -> None:
        """Remove incomplete snapshots of older generations."""


def open_folder(url: str) -> Folder:
    """Return the folder at a path or URL; it is created at the first write."""
    if "://" in url and not url.startswith("file://"):
        return UrlFolder(url)
    return LocalFolder(url.removeprefix("file://"))


class _LocalSink:
    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = create(path)

    def write(self, data: Any) -> None:
        write(self._fd, data, self._path)

    def finish(self) -> None:
        try:
            sync(self._fd, self._path)
        finally:
            os.close(self._fd)


class LocalFolder(Folder):
    """Snapshots in a directory."""

    def __init__(self, path: str) -> None:
        self.url = os.path.abspath(os.path.expanduser(path))

    def claim_generation(self, at_least: int = 1) -> int:
        """Claim and return a number above those of all earlier starts."""
        make_dir(self.url)
        number = max(self.newest_generation() + 1, at_least)
        while not claim(os.path.join(self.url, f"generation-{number}")):
            number += 1
        sync_dir(self.url)
        for older in self._generations():
            if older < number:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.url, f"generation-{older}"))
        return number

    def begin(self, step: int, generation: int) -> None:
        """Create the temporary directory."""
        path = self._temporary(step, generation)
        remove_tree(path)
        try:
            make_one_dir(path)
        except FileNotFoundError as error:
            raise vanished(self.url, step) from error

    def create(self, step: int, generation: int, name: str) -> Sink:
        """Open one file in the temporary directory."""
        return _LocalSink(os.path.join(self._temporary(step, generation), name))

    def commit(self, step: int, generation: int, manifest: bytes) -> None:
        """Write the manifest, then rename the directory."""
        temporary = self._temporary(step, generation)
        sink = self.create(step, generation, MANIFEST)
        sink.write(manifest)
        sink.finish()
        sync_dir(temporary)
        refuse_older(self, generation)
        final = os.path.join(self.url, name_of(step))
        if os.path.exists(final):  # a run resumes from the newest: this one is incomplete
            self.set_aside(step)
        rename(temporary, final)
        sync_dir(self.url)

    def abandon(self, step: int, generation: int) -> None:
        """Remove the temporary directory, to free its disk space."""
        remove_tree(self._temporary(step, generation))

    def size(self, step: int, name: str) -> int:
        """Return the size of a committed file in bytes."""
        status = os.stat(self._path(step, name))
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{name} is not a plain file", where=name)
        return status.st_size

    def read_into(self, step: int, name: str, buffer: memoryview, begin: int = 0) -> int:
        """Fill `buffer` from a committed file."""
        total = 0
        # Without O_NONBLOCK, a pipe put there meanwhile would block until somebody writes to it.
        fd = os.open(self._path(step, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            file.seek(begin)
            while total < len(buffer):
                count = file.readinto(buffer[total : total + (64 << 20)])
                if not count:
                    break
                total += count
        return total

    def set_aside(self, step: int) -> str:
        """Rename a damaged snapshot to `bad-...`."""
        name = self._name_for_bad(step)
        rename(os.path.join(self.url, name_of(step)), os.path.join(self.url, name))
        sync_dir(self.url)
        return name

    def delete(self, step: int) -> None:
        """Rename, then remove: an interrupted removal leaves nothing that looks complete."""
        doomed = os.path.join(self.url, f".{name_of(step)}.deleted")
        rename(os.path.join(self.url, name_of(step)), doomed)
        remove_tree(doomed)

    def tidy(self, generation: int) -> None:
        """Remove half-written and half-removed snapshots of older generations."""
        for name in self._names():
            found = re.fullmatch(r"\.step-\d+\.(?:(\d+)\.tmp|deleted)", name)
            if found and not (found[1] and int(found[1]) >= generation):
                remove_tree(os.path.join(self.url, name))

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.url)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SnapshotError(
                "the folder of the snapshots can't be read", where=self.url, why=error.strerror
            ) from error

    def _temporary(self, step: int, generation: int) -> str:
        return os.path.join(self.url, f".{name_of(step)}.{generation}.tmp")

    def _path(self, step: int, name: str) -> str:
        return os.path.join(self.url, name_of(step), name)


class UrlFolder(Folder):
    """Snapshots on an object store or in memory, through fsspec."""

    def __init__(self, url: str) -> None:
        try:
            self._store = open_fsspec_store(url).bare()
        except (ValueError, ImportError) as error:
            raise SnapshotError(
                "nothing here can write to that kind of URL",
                where=url,
                why=str(error),
                fix="pip install the package that fsspec names, or use a local path",
            ) from error
        self.url = self._store.url

    def claim_generation(self, at_least: int = 1) -> int:
        """Claim and return a number above those of all earlier starts."""
        number = max(self.newest_generation() + 1, at_least)
        self._store.make_folder()
        self._store.write(f"generation-{number}", b"")
        return number

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, the newest first."""
        return [step for step in self._steps() if self._is_committed(step)]

    def begin(self, step: int, generation: int) -> None:
        """Remove the files of an earlier attempt without a manifest."""
        refuse_older(self, generation)  # a newer start writes files with the same names
        self.delete(step)
        self._store.make_folder(name_of(step))

    def create(self, step: int, generation: int, name: str) -> Sink:
        """Open one file."""
        refuse_older(self, generation)
        return _UrlSink(self._store.open_new(f"{name_of(step)}/{name}"))

    def commit(self, step: int, generation: int, manifest: bytes) -> None:
        """Write the manifest, last."""
        refuse_older(self, generation)
        self._store.write(f"{name_of(step)}/{MANIFEST}", manifest)

    def abandon(self, step: int, generation: int) -> None:
        """Remove the snapshot if it has no manifest and can be ours."""
        is_ours = self.newest_generation() <= generation
        if is_ours and not self._is_committed(step):
            self.delete(step)

    def size(self, step: int, name: str) -> int:
        """Return the size of a committed file in bytes."""
        return self._store.size(f"{name_of(step)}/{name}")

    def read_into(self, step: int, name: str, buffer: memoryview, begin: int = 0) -> int:
        """Fill `buffer` from a committed file."""
        data = self._store.read(f"{name_of(step)}/{name}", begin, begin + len(buffer))
        count = min(len(data), len(buffer))
        buffer[:count] = data[:count]
        return count

    def set_aside(self, step: int) -> str:
        """Move a damaged snapshot to `bad-...`, the manifest first, so that it no longer counts."""
        bad = self._name_for_bad(step)
        self._store.move_folder(name_of(step), bad, first=MANIFEST)
        return bad

    def delete(self, step: int) -> None:
        """Remove a snapshot: its manifest first."""
        self._store.delete_folder(name_of(step), first=MANIFEST)

    def tidy(self, generation: int) -> None:
        """Remove snapshots without a manifest."""
        for step in self._steps():
            if not self._is_committed(step):
                self.delete(step)

    def _is_committed(self, step: int) -> bool:
        # Not exists(): it treats any storage error as absence, and `tidy` would delete.
        return MANIFEST in self._store.names(name_of(step))

    def _names(self) -> list[str]:
        return self._store.names()


class _UrlSink:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> None:
        self._file.write(data)

    def finish(self) -> None:
        self._file.close()


def refuse_older(folder: Folder, generation: int) -> None:
    """Raise if a newer start of the run uses this folder.

    Raises:
        SnapshotError: A newer generation has begun.
    """
    newest = folder.newest_generation()
    if newest > generation:
        raise SnapshotError(
            f"a newer start of this run writes here: generation {newest}, ours is {generation}",
            where=folder.url,
            why="this process was considered dead and was replaced",
            fix="end this process; the snapshots of the newer run were not changed",
        )
