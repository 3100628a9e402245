"""What agents that were killed have left in temporary folders, removed by their owner or the next agent of the same user.

Each agent has a socket folder with a record in it that names its scratch folder. It holds a lock on both folders while
it lives; the kernel lets go of it with the process, however that ends. A folder is removed when there is a record of
ours and nobody holds its lock: one of another user, another program or a living agent is never touched.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Mapping

from torchmuster.errors import MusterError

# The scratch folder that a run has on a node: where it lies, that it is ours, and its end.


class ScratchError(MusterError):
    """The scratch folder of a node can't be used."""


def parent_folder(environment: Mapping[str, str], named: str | None = None) -> str:
    """Return the folder in which a run makes its own: as named, the scheduler's, else the temporary one."""
    if named:
        return named
    if environment.get("SLURM_TMPDIR"):
        return environment["SLURM_TMPDIR"]
    # PBS puts the job's id into the name of its own; another TMPDIR is the user's: that will do, too.
    own = environment.get("TMPDIR", "")
    return own if os.path.isdir(own) else tempfile.gettempdir()


def folder_name(run_id: str, place: int, run_dir: str) -> str:
    """Return the name of a run's folder; two runs of one name, in two homes, don't share it."""
    mark = hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:8]
    return f"muster-{run_id}-{place}-{mark}"


def make_scratch(parent: str, name: str) -> str:
    """Make the folder, or take over what an agent before us has left; return its path.

    The name can be known before: where somebody else has made it, ours gets one that can't.

    Raises:
        ScratchError: It can't be made.
    """
    path = os.path.join(os.path.realpath(parent), name)
    fix = "`scratch` of the site, SLURM_TMPDIR or TMPDIR names a folder of this node that you can write to"
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        what = "the scratch folder can't be made"
        raise ScratchError(what, where=path, why=error.strerror, fix=fix) from error
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return tempfile.mkdtemp(prefix=f"{name}-", dir=os.path.dirname(path))
    if status.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


def remove_scratch(path: str) -> None:
    """Remove the folder with all that is in it; what can't be removed stays."""

    def mend(function: object, name: str, error: object) -> None:
        """Open a folder that its owner may not write to, e.g. one that came out of an archive."""
        folder = os.path.dirname(name)
        try:
            if name != path:  # the folder that it lies in is not ours to open: it may be /tmp
                os.chmod(folder, 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, 0o700)
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)
        except OSError:
            return

    if os.path.islink(path) or not os.path.isdir(path):
        return
    shutil.rmtree(path, onerror=mend)
    try:
        os.rmdir(path)
    except OSError:
        return


_RECORD = "owner.json"
_SOCKET_FOLDER = re.compile(r"muster-[a-z0-9_]{8}$")  # as tempfile.mkdtemp names it
_GONE = ".gone"
_MAX_RECORD_BYTES = 1 << 16
_held: dict[str, int] = {}  # folders that are ours, with their locks


def hold(folder: str) -> bool:
    """Hold a folder of ours until this process ends; say whether it is still the one at this path.

    Several agents may hold one: a replacement takes the scratch folder of an agent that stands still.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(fd), os.lstat(folder))
    except BlockingIOError:
        same = False  # somebody removes it at this moment
    except OSError:  # this file system has no locks: then nobody can take one to remove it
        same = True
    if not same:
        os.close(fd)
        return False
    _held[folder] = fd
    return True


def keep_holding(folder: str) -> int:
    """Let the lock of a folder outlive this interpreter, for one that takes its place in this process; return its descriptor."""
    fd = _held[folder]
    os.set_inheritable(fd, True)
    return fd


def go_on_holding(folder: str, fd: int) -> None:
    """Hold a folder by the descriptor that the interpreter before this one has left."""
    os.set_inheritable(fd, False)
    _held[folder] = fd


def make_socket_folder() -> str:
    """Return a new folder that only we can enter, short enough for a socket's name, held while we live."""
    folder = _short_folder()
    hold(folder)
    note_owner(folder)
    return folder


def _short_folder() -> str:
    try:
        folder = tempfile.mkdtemp(prefix="muster-")
        if len(folder) < 80:
            return folder
        os.rmdir(folder)
    except OSError:
        pass
    return tempfile.mkdtemp(prefix="muster-", dir="/tmp")


def is_socket_folder(path: str) -> bool:
    """Say whether an agent of any user has made this folder for its sockets."""
    is_named_so = _SOCKET_FOLDER.match(os.path.basename(path)) is not None
    return is_named_so and os.path.lexists(os.path.join(path, _RECORD))


def note_owner(socket_folder: str, scratch: str | None = None) -> None:
    """Write the record of an agent into its socket folder; without one, its folders stay when it is killed."""
    path = os.path.join(socket_folder, _RECORD)
    with contextlib.suppress(OSError):
        with open(f"{path}.tmp", "w") as file:
            json.dump({"pid": os.getpid(), "scratch": scratch}, file)
        os.replace(f"{path}.tmp", path)


def sweep_beside(run_id: str | None) -> threading.Thread:
    """Do as `sweep` in a thread: large folders take their time, and an agent has none."""
    thread = threading.Thread(target=sweep, args=(run_id,), name="leftovers", daemon=True)
    thread.start()
    return thread


def sweep(run_id: str | None = None, folders: tuple[str, ...] = ()) -> None:
    """Remove what killed agents have left, but for the scratch of this run: a replacement goes on with it.

    Args:
        run_id: None where no run goes on.
        folders: Where to look; where agents make their folders when there are none.
    """
    for folder in set(folders or (tempfile.gettempdir(), "/tmp")):
        try:
            names = [entry for entry in os.listdir(folder) if _SOCKET_FOLDER.match(entry)]
        except OSError:
            continue
        for name in names:
            with contextlib.suppress(OSError):
                _sweep_one(os.path.join(folder, name), run_id)


def _sweep_one(socket_folder: str, run_id: str | None) -> None:
    record = _read_record(os.path.join(socket_folder, _RECORD))
    if record is None:
        return
    scratch = record.get("scratch")
    if isinstance(scratch, str):
        if run_id is not None and os.path.basename(scratch).startswith(f"muster-{run_id}-"):
            return
        if not _is_let_go(socket_folder):
            return
        _remove(scratch)
        if os.path.lexists(scratch + _GONE):
            return  # not all of it could be removed: the record stays for the next
    _remove(socket_folder)


def _read_record(path: str) -> dict[str, object] | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            return None
        try:
            record = json.loads(file.read(_MAX_RECORD_BYTES))
        except ValueError:
            return None
    return record if isinstance(record, dict) else None


def _is_let_go(folder: str) -> bool:
    fd = _take(folder)
    if fd is None:
        return False
    os.close(fd)
    return True


def _take(folder: str) -> int | None:
    """Return a descriptor that locks a folder of ours which nobody holds; None for any other."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_uid == os.getuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _remove(folder: str) -> None:
    """Remove a folder of ours that nobody holds: first its name, so that nobody takes half of it over."""
    if not os.path.basename(folder).startswith("muster-"):
        return
    fd = _take(folder)
    if fd is not None:
        try:
            if not os.path.lexists(folder + _GONE):
                os.rename(folder, folder + _GONE)
        finally:
            os.close(fd)
    if _is_let_go(folder + _GONE):
        remove_scratch(folder + _GONE)
