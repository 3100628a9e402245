"""What an agent makes on its node before workers start: its folders, and the job's interpreter.

Setup lines, shipped environments, `--stage` and `--before` are another room's (table `node_work`).

The owner of a killed agent, or the user's next agent, removes its folders. Each agent has a socket folder
with a record that names its scratch folder, and holds a lock on both folders while it lives. The
kernel releases the locks with the process, however it ends. A folder is removed only if it has a
record of ours and its lock is free: folders of other users, other programs or living agents are
never touched.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torchmuster.core import plugs
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.model import contract
from torchmuster.core.model.plan import Program
from torchmuster.core.node.options import AgentOptions
from torchmuster.errors import MusterError

# The scratch folder of a run on a node: its location, its creation and its removal.


class ScratchError(MusterError):
    """The scratch folder of a node can't be used."""


def parent_folder(environment: Mapping[str, str], named: str | None = None) -> str:
    """Return the folder for scratch folders: the named one, the scheduler's, or the temporary one."""
    if named:
        return named
    if environment.get("SLURM_TMPDIR"):
        return environment["SLURM_TMPDIR"]
    # PBS sets TMPDIR to a folder named after the job; if the user has set it, that will do, too.
    own = environment.get("TMPDIR", "")
    return own if os.path.isdir(own) else tempfile.gettempdir()


def folder_name(run_id: str, place: int, run_dir: str) -> str:
    """Return the name of a run's folder; runs of the same name in two homes don't share it."""
    mark = hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:8]
    return f"muster-{run_id}-{place}-{mark}"


def make_scratch(parent: str, name: str) -> str:
    """Create the folder, or take over what an earlier agent has left; return its path.

    The name is predictable: if another user has created it, ours gets an unpredictable one.

    Raises:
        ScratchError: The folder can't be created.
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
    """Remove the folder with its content; what can't be removed stays."""

    def mend(function: object, name: str, error: object) -> None:
        """Make a read-only folder, e.g. one from an archive, writable, and try again."""
        with contextlib.suppress(OSError):
            if name != path:  # the parent of `path` is not ours to change: it may be /tmp
                os.chmod(os.path.dirname(name), 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, 0o700)
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)

    if os.path.islink(path) or not os.path.isdir(path):
        return
    shutil.rmtree(path, onerror=mend)
    with contextlib.suppress(OSError):
        os.rmdir(path)


# Who holds a folder, and the removal of those that nobody holds.


_RECORD = "owner.json"
_SOCKET_FOLDER = re.compile(r"muster-[a-z0-9_]{8}$")  # as tempfile.mkdtemp names it
_REMOVING = ".gone"
_MAX_RECORD_BYTES = 1 << 16
_held: dict[str, int] = {}  # our folders -> descriptors of their locks


def hold(folder: str) -> bool:
    """Lock a folder of ours until this process ends; return whether it is still at this path.

    Several agents may hold a folder: a replacement shares the scratch folder of a stalled agent.
    """
    fd = lock_folder(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if fd is None:
        return False  # another process is removing it now, or has
    _held[folder] = fd
    return True


def lock_folder(folder: str, kind: int) -> int | None:
    """Lock a folder; return the descriptor that holds it, None if it is not at this path any more.

    With `LOCK_NB`, also None while another process has a lock that excludes this one.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if _lock(fd, kind) and os.path.samestat(os.fstat(fd), os.lstat(folder)):
            return fd
    os.close(fd)
    return None


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind)
    except BlockingIOError:
        return False
    except OSError:
        pass  # this file system has no locks, so nobody can lock it to remove it
    return True


def lock_for_exec(folder: str) -> int:
    """Return a folder's lock descriptor, inheritable by an interpreter that replaces this one."""
    fd = _held[folder]
    os.set_inheritable(fd, True)
    return fd


def adopt_lock(folder: str, fd: int) -> None:
    """Hold a folder by the lock descriptor that the previous interpreter has left."""
    os.set_inheritable(fd, False)
    _held[folder] = fd


def make_socket_folder() -> str:
    """Return a new private folder with a path short enough for sockets, held while we live."""
    folder = _short_folder()
    hold(folder)
    write_agent_record(folder)
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
    """Return whether this is a socket folder of an agent of any user."""
    is_named_so = _SOCKET_FOLDER.match(os.path.basename(path)) is not None
    return is_named_so and os.path.lexists(os.path.join(path, _RECORD))


def write_agent_record(socket_folder: str, scratch: str | None = None) -> None:
    """Write an agent's record into its socket folder.

    Without a record, its folders would stay when it is killed.
    """
    path = os.path.join(socket_folder, _RECORD)
    with contextlib.suppress(OSError):
        with open(f"{path}.tmp", "w") as file:
            json.dump({"pid": os.getpid(), "scratch": scratch}, file)
        os.replace(f"{path}.tmp", path)


def start_removing_leftovers(run_id: str | None) -> threading.Thread:
    """Run `remove_leftovers` in a thread: removing large folders takes time that an agent does not have."""
    thread = threading.Thread(
        target=remove_leftovers, args=(run_id,), name="leftovers", daemon=True
    )
    thread.start()
    return thread


def remove_leftovers(run_id: str | None = None, folders: tuple[str, ...] = ()) -> None:
    """Remove what killed agents have left, except this run's scratch, which a replacement reuses.

    Args:
        run_id: The id of this run; None if no run continues.
        folders: Where to look; by default, where agents make their folders.
    """
    for folder in set(folders or (tempfile.gettempdir(), "/tmp")):
        try:
            names = [entry for entry in os.listdir(folder) if _SOCKET_FOLDER.match(entry)]
        except OSError:
            continue
        for name in names:
            with contextlib.suppress(OSError):
                _remove_leftover(os.path.join(folder, name), run_id)


def _remove_leftover(socket_folder: str, run_id: str | None) -> None:
    record = _read_record(os.path.join(socket_folder, _RECORD))
    if record is None:
        return
    scratch = record.get("scratch")
    if isinstance(scratch, str):
        if run_id is not None and os.path.basename(scratch).startswith(f"muster-{run_id}-"):
            return
        if not is_unlocked(socket_folder):
            return
        _remove(scratch)
        if os.path.lexists(scratch + _REMOVING):
            return  # not all of it could be removed: the record stays for the next time
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


def is_unlocked(folder: str) -> bool:
    """Return whether a folder is ours and nobody holds it."""
    fd = take_over(folder)
    if fd is None:
        return False
    os.close(fd)
    return True


def take_over(folder: str) -> int | None:
    """Lock a folder of ours that nobody holds; return the descriptor, None for any other folder."""
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
    """Remove a folder of ours that nobody holds; rename it first, so that nobody takes it over."""
    if not os.path.basename(folder).startswith("muster-"):
        return
    fd = take_over(folder)
    if fd is not None:
        try:
            if not os.path.lexists(folder + _REMOVING):
                os.rename(folder, folder + _REMOVING)
        finally:
            os.close(fd)
    if is_unlocked(folder + _REMOVING):
        remove_scratch(folder + _REMOVING)


_MAX_TAKES = 10


# The setup itself.


StartWith = Callable[[Program, Mapping[str, str]], None]


class NodeWork:
    """The setup of one node, from the agent's start to the agent's end.

    Args:
        options: The agent's options.
        disk: Writes the setup log.
        socket_folder: The folder with the agent's record, which names what it has made.
    """

    def __init__(
        self, options: AgentOptions, disk: DiskWriter, socket_folder: str | None = None
    ) -> None:
        self.plan, self.setup = options.plan, options.plan.node_setup
        self.options = options
        self.run_dir = options.run_directory(options.plan.run_id)
        self.place = options.place or 0
        self._socket_folder = socket_folder
        self.scratch: str | None = None
        self.is_done = False
        self._disk = disk

    @property
    def pids(self) -> frozenset[int]:
        """Return the pids of the setup's processes."""
        return frozenset()

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables that workers and commands get on top of the job's environment."""
        named = {
            contract.PLACE_VARIABLE: str(self.place),
            contract.NODE_VARIABLE: self.options.host,
        }
        return named | ({contract.SCRATCH_VARIABLE: self.scratch} if self.scratch else {})

    def try_at_once(self) -> None:
        """Do the setup now if it is only the scratch folder; that takes less than a millisecond."""
        if not self.setup.is_empty or not self.setup.is_plain:
            return
        with contextlib.suppress(MusterError):  # `run` meets it again, where it can be told
            self.make_scratch(parent_folder(self.options.environment, self.setup.scratch))
            self.is_done = True

    async def run(self, tell: Callable[[str], None], start_with: StartWith) -> None:
        """Do the whole setup.

        Args:
            tell: Shows the user a sentence.
            start_with: Sets the job's interpreter and variables, and starts the spawner unless one
                runs.

        Raises:
            MusterError: A part failed; the message names the node.
        """
        del tell
        if not self.setup.is_plain:
            raise MusterError(
                "setup lines and staging need torchmuster's launcher, which is not installed here"
            )
        start_with(self.plan.program, self.options.environment)
        self.make_scratch(parent_folder(self.options.environment, self.setup.scratch))
        self.is_done = True

    def make_scratch(self, parent: str) -> None:
        """Make the scratch folder in `parent`, and hold it while we live."""
        name = folder_name(self.plan.run_id, self.place, self.run_dir.path)
        for _ in range(_MAX_TAKES):
            self.scratch = make_scratch(parent, name)
            if hold(self.scratch):
                break  # else another process just removed it as a leftover of a killed agent
        if self._socket_folder is not None:
            write_agent_record(self._socket_folder, self.scratch)


def with_python(program: Program, python: str, *flags: str) -> Program:
    """Return the program with another interpreter, also where its first word is one: a session server."""
    server_entry = plugs.entry("session_server")
    target = python if server_entry and server_entry in program.args else program.target
    return replace(program, target=target, python=(python, *flags))


def other_interpreter(program: Program, environment: Mapping[str, str]) -> Program | None:
    """Return the program with PATH's python3 if its own can't be executed here, else None."""
    word = program.python[0]
    path = environment.get("PATH")
    found = shutil.which("python3", path=path)
    if found is None or found == word or not os.path.isdir(program.cwd):
        return None
    if shutil.which(word, path=path) is not None and not _of_another_processor(word):
        return None
    return with_python(program, found)


def _of_another_processor(path: str) -> bool:
    """Return whether an ELF file is for another processor than our own Python."""
    try:
        with open(path, "rb") as theirs, open(sys.executable, "rb") as ours:
            one, other = theirs.read(20), ours.read(20)
    except OSError:
        return False
    both_elf = one[:4] == other[:4] == b"\x7fELF"
    return both_elf and (one[4:6], one[18:20]) != (other[4:6], other[18:20])


def refusal_of(error: MusterError) -> dict[str, Any]:
    """Return an error as the fields of a `SpawnerRefused`."""
    return {
        "why": error.why or error.what,
        "what": error.what,
        "where": error.where,
        "hint": error.fix,
    }
