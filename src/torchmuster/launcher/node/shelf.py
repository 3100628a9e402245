"""The shelf of a node: environments that were sent here, named by their content, in a folder of the user's in the node's scratch.

One is unpacked beside its place and renamed at the end, so nobody meets half of one; of two that come at once, the first stays. Who uses one
holds a lock on it, and who unpacks one holds a lock on that: what nobody holds can be removed. Where all nodes see a file of the environment,
each unpacks it by a program of its own (`unpack`): an agent must not wait for disks.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchmuster.core import proc
from torchmuster.core.model import codec
from torchmuster.core.model.plan import EnvironmentNeeds, ShippedEnvironment, UnpackOrder
from torchmuster.core.model.text import show_size
from torchmuster.core.node import setup
from torchmuster.errors import MusterError
from torchmuster.launcher.files.environment import ParcelError, ParcelFile, Unpacker, relocate

VARIABLE = "MUSTER_ENVIRONMENT"
_BEGUN = ".unpacking-"
_KEPT = 3
_ASK_LIMIT_S = 10.0
_TRY_LIMIT_S = 300.0
_ROOM_BYTES = 256 << 20
_BLOCK_BYTES = 4096
_NOTES_BYTES = 1 << 20


class Shelf:
    """The place of one environment on this node.

    Attributes:
        folder: Where all of the user's lie.
        path: Where this one lies, once it is there.

    Raises:
        MusterError: The folder can't be made.
    """

    def __init__(self, needs: EnvironmentNeeds, parent: str | None = None) -> None:
        self.needs = needs
        self.folder = shelf_folder(parent)
        self.path = os.path.join(self.folder, needs.sha[:16])
        self._hold: int | None = None

    def take(self) -> bool:
        """Use what is there, and let nobody remove it as long as this process lives; False where it is not."""
        if self._hold is None:
            self._hold = setup.lock_folder(self.path, fcntl.LOCK_SH)
            if self._hold is not None:
                os.utime(self.path)
        return self._hold is not None

    def check_room(self) -> None:
        """Make room for one more.

        Raises:
            MusterError: There is none.
        """
        forget_old(self.folder, keep=_KEPT - 1)
        needs, stat = self.needs, os.statvfs(self.folder)
        free = stat.f_bavail * stat.f_frsize
        wanted = needs.size_bytes + needs.unpacked_bytes + needs.num_files * _BLOCK_BYTES // 2
        wanted += _ROOM_BYTES
        fix = "TMPDIR, or `scratch` of the site, names a folder with more room"
        if free < wanted:
            why = f"{show_size(free)} are free, it needs {show_size(wanted)}"
            raise _no_room(self.folder, why, fix)
        if stat.f_files and stat.f_favail < needs.num_files:
            why = f"{stat.f_favail} files can be made, it has {needs.num_files}"
            raise _no_room(self.folder, why, fix)

    def no_room(self) -> MusterError:
        """Return the error of a disk that was full before all was there."""
        free = show_size(shutil.disk_usage(self.folder).free)
        why = f"it was full before all {show_size(self.needs.unpacked_bytes)} were there: {free} are free now"
        return _no_room(self.folder, why, "make room there, or name another folder: TMPDIR")


def _no_room(folder: str, why: str, fix: str) -> MusterError:
    return MusterError("there is no room for the environment", where=folder, why=why, fix=fix)


def shelf_folder(parent: str | None = None) -> str:
    """Return the folder of all environments of this user on this node; it is made.

    Raises:
        MusterError: It can't be made, or is another user's.
    """
    known = find_folder(parent)
    path = setup.make_scratch(os.path.dirname(known), folder_name())
    if path != known:  # the next run would not find it
        os.rmdir(path)
        fix = "`scratch` of the site names another folder of the node"
        raise MusterError("the folder of environments is another user's", where=known, fix=fix)
    return path


def find_folder(parent: str | None = None) -> str:
    """Return the folder of all environments of this user on this node, which need not exist."""
    parent = parent or setup.parent_folder(dict(os.environ))
    return os.path.join(os.path.realpath(parent), folder_name())


def folder_name() -> str:
    """Return how the folder is called in the node's scratch."""
    return f"muster-environments-{os.getuid()}"


class Unpacking:
    """An environment on its way to its place.

    Raises:
        OSError: It can't be begun.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf, needs = shelf, shelf.needs
        while True:
            self._folder = tempfile.mkdtemp(prefix=_BEGUN, dir=shelf.folder)
            self._hold = setup.lock_folder(self._folder, fcntl.LOCK_EX)
            if self._hold is not None:
                break  # else somebody has just taken it for what a killed one has left
        limit = needs.unpacked_bytes + _NOTES_BYTES
        self._unpacker = Unpacker(self._folder, limit, needs.num_files)

    def feed(self, content: bytes) -> None:
        """Take the next part.

        Raises:
            ParcelError: It is damaged.
            MusterError: The disk is full.
            OSError: It can't be written.
        """
        with self._telling_room():
            self._unpacker.feed(content)

    def finish(self) -> None:
        """Put it into its place, and use it.

        Raises:
            ParcelError: It is damaged, or can't live at this place.
            MusterError: The disk is full.
            OSError: It can't be written.
        """
        shelf = self._shelf
        with self._telling_room():
            noted = self._unpacker.finish()
            try:
                relocate(self._folder, shelf.path, noted)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ParcelError(f"it can't live at {shelf.path}: {error}") from error
        with contextlib.suppress(OSError):  # another run was first
            os.rename(self._folder, shelf.path)
        self.close()
        if not shelf.take():
            raise ParcelError("it was removed while it was unpacked")

    @contextlib.contextmanager
    def _telling_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._shelf.no_room() from error
            raise

    def close(self) -> None:
        """Remove what is not in its place."""
        self._unpacker.close()
        if self._hold is not None:
            setup.remove_scratch(self._folder)
            os.close(self._hold)
            self._hold = None


# What is removed.


@dataclass(frozen=True, slots=True)
class Kept:
    """An environment on the shelf; `age_s` since it was used last."""

    path: str
    age_s: float


def kept_in(folder: str) -> list[Kept]:
    """Return what lies on a shelf, the one used last first."""
    now, found = time.time(), []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                age_s = now - entry.stat(follow_symlinks=False).st_mtime
                found.append(Kept(entry.path, age_s))
    return sorted(found, key=lambda kept: kept.age_s)


def old_ones(folder: str, older_s: float, most_bytes: int | None) -> list[tuple[Kept, int]]:
    """Return the environments that were not used for so long, and the oldest beyond so many bytes, each with its size.

    Those that somebody uses are left out, but counted.
    """
    found, total = [], 0
    for kept in kept_in(folder):
        size = _size_of(kept.path)
        total += size
        too_much = most_bytes is not None and total > most_bytes
        if (too_much or kept.age_s > older_s) and not is_used(kept.path):
            found.append((kept, size))
            total -= size
    return found


def _size_of(path: str) -> int:
    size, waiting = 0, [path]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                size += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return size


def is_used(path: str) -> bool:
    """Say whether somebody holds an environment, or it is not ours to remove."""
    return os.path.lexists(path) and not setup.is_unlocked(path)


def forget_old(folder: str, keep: int) -> None:
    """Remove the environments that were not used for longest, unless somebody uses them, and what killed processes have begun."""
    for kept in kept_in(folder)[keep:]:
        forget(kept.path)
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(_BEGUN):
                forget(os.path.join(folder, name))


def forget(path: str) -> bool:
    """Remove one that nobody holds; say whether it is gone. First its name: nobody meets half of it when we are killed."""
    hold = setup.take_over(path)
    if hold is not None:
        gone = os.path.join(os.path.dirname(path), f"{_BEGUN}{os.urandom(6).hex()}")
        try:
            with contextlib.suppress(OSError):
                os.rename(path, gone)
                setup.remove_scratch(gone)
        finally:
            os.close(hold)
    return not os.path.lexists(path)


# Whether it can live here.


def check_fit(needs: EnvironmentNeeds) -> None:
    """Refuse a node on which the environment can't run, before anything is sent.

    Raises:
        MusterError: Why it can't.
    """
    machine, own = os.uname().machine, _own_glibc()
    if machine != needs.machine:
        raise MusterError(
            "the environment is for another processor",
            why=f"its files are for {needs.machine}, this host has {machine}",
            fix="make one on a machine of this kind, and name it there: --python",
        )
    if needs.glibc and (own is None or own < needs.glibc):
        has = f"glibc 2.{own}" if own is not None else "no glibc"
        raise MusterError(
            "the environment needs a newer C library",
            why=f"its files need glibc 2.{needs.glibc}, this host has {has}",
            fix="make the environment on a machine as old as this one",
        )
    if not needs.base:
        return
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        said = proc.ask_spared([needs.base, "-I", "-S", "-c", ask], _ASK_LIMIT_S)
        found = said.stdout.decode(errors="replace").strip()
    except MusterError:
        found = ""
    if found != needs.python:
        has = f"is Python {found[:20]}" if found else "does not exist"
        raise MusterError(
            "the base interpreter of the environment is missing",
            why=f"it needs Python {needs.python}; {needs.base} {has} on this host",
            fix="make the environment with `uv venv --managed-python`: its interpreter travels too",
        )


def _own_glibc() -> int | None:
    """Return the minor number of this host's glibc 2."""
    try:
        words = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        return int(words[1].split(".")[1])
    except (ValueError, OSError, IndexError):
        return None


def try_torch(path: str, needs: EnvironmentNeeds) -> None:
    """Import torch as the job will.

    Raises:
        MusterError: It does not work here.
    """
    word = "torch" if needs.has_torch else "sys"
    argv = [os.path.join(path, "env", "bin", "python"), "-I", "-c", f"import {word}"]
    said = proc.ask_spared(argv, _TRY_LIMIT_S)
    if said.status != 0:
        last = said.stderr.decode(errors="replace").strip().splitlines()[-1:]
        what = f"`import {word}` fails in the environment on this host"
        raise MusterError(what, why=last[0][:500] if last else f"status {said.status}")


# The program `unpack`: the environment comes from a file that all nodes see.


_SAY_EVERY_S = 0.25


def unpack(
    shipped: ShippedEnvironment, parent: str, *, tries: bool, tell: Callable[[int, int], None]
) -> str:
    """Return the folder of the environment on this node; what is there already is used.

    Args:
        shipped: The environment.
        parent: The scratch folder of the node.
        tries: Import torch in it when it is new here.
        tell: Hears how many bytes of how many are read.

    Raises:
        MusterError: It can't be had here.
    """
    needs = shipped.needs
    check_fit(needs)
    shelf = Shelf(needs, parent)
    if shelf.take():
        return shelf.path
    # Of several agents of a node, or of nodes that share the folder, one unpacks.
    with _alone(shelf):
        if shelf.take():
            return shelf.path
        shelf.check_room()
        try:
            _read(shipped, Unpacking(shelf), tell)
        except (OSError, ParcelError) as error:
            raise MusterError(
                "the environment can't be unpacked", where=shipped.archive, why=str(error)
            ) from error
        if tries:
            try_torch(shelf.path, needs)
    return shelf.path


def _read(
    shipped: ShippedEnvironment, unpacking: Unpacking, tell: Callable[[int, int], None]
) -> None:
    needs, said_at = shipped.needs, 0.0
    with contextlib.closing(unpacking):
        parcel = ParcelFile(shipped.archive, needs.sha, needs.num_pieces)
        with contextlib.closing(parcel):
            for index, piece in enumerate(parcel.pieces):
                unpacking.feed(piece.content(parcel.piece(index)))
                if time.monotonic() - said_at > _SAY_EVERY_S:
                    said_at = time.monotonic()
                    tell(parcel.offset(index), needs.size_bytes)
        unpacking.finish()


@contextlib.contextmanager
def _alone(shelf: Shelf) -> Iterator[None]:
    """Let the others who want the same wait; where the file system has no locks, each unpacks its own and the first stays."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(shelf.folder, f".lock-{shelf.needs.sha[:16]}"), flags, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def main(arguments: list[str]) -> int:
    """Unpack what the agent asks for; say on standard output how it goes."""
    order = codec.from_word(UnpackOrder, arguments)
    shipped = order.shipped

    def say(kind: str, value: Any) -> None:
        sys.stdout.write(json.dumps({kind: value}) + "\n")
        sys.stdout.flush()

    def tell(done: int, total: int) -> None:
        say("progress", {"source": shipped.archive, "bytes_done": done, "total_bytes": total})

    try:
        path = unpack(shipped, order.parent, tries=order.tries, tell=tell)
    except MusterError as error:
        say("error", error.parts())
        return 1
    say("done", {"path": path})
    return 0
