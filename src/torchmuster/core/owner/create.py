"""Create a run directory: all that exists of a run before its engine starts it."""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, runs_dir
from torchmuster.core.model import codec
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.net.address import new_secret, write_secret
from torchmuster.core.plainfile import open_own
from torchmuster.errors import MusterError, RunDirectoryError, UsageError

# Room for a run: free bytes and inodes, where its records and snapshots go.


MIN_FREE_BYTES = 4 << 20
LOW_FREE_BYTES = 1 << 30
LOW_INODES = 1000
Statvfs = Callable[[str], os.statvfs_result]


def check_room(path: str, statvfs: Statvfs = os.statvfs) -> None:
    """Refuse a folder that can't hold anything: less than 4 MiB free, or no inode.

    Raises:
        OSError: ENOSPC, with what is missing.
    """
    disk = statvfs(path)
    if disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, "No space left on device")
    if disk.f_files and not disk.f_favail:  # some file systems count none
        raise OSError(errno.ENOSPC, "No inode is left on the device: it can hold no more files")


def room_warnings(path: str, statvfs: Statvfs = os.statvfs) -> list[str]:
    """Return a warning for each resource that is short in the folder, or its nearest parent."""
    folder = nearest_folder(os.path.realpath(path))
    try:
        disk = statvfs(folder)
    except OSError as error:
        return [f"{folder}: its free space can't be read: {error.strerror}"]
    found = []
    free = disk.f_bavail * disk.f_frsize
    if free < LOW_FREE_BYTES:
        found.append(f"{folder} has only {free >> 20} MiB free: `muster prune` makes room")
    if disk.f_files and disk.f_favail < LOW_INODES:
        found.append(f"{folder} can take only {disk.f_favail} more files: `muster prune` helps")
    return found


def nearest_folder(path: str) -> str:
    """Return the path, or the nearest folder above it that exists."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


_MOST_OF_NAME = 40
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_made: list[RunDir] = []  # by this process


@contextlib.contextmanager
def note_failed_start(run_dir: RunDir) -> Iterator[None]:
    """Record a failed start as the run's result, so that the run is not considered lost."""
    try:
        yield
    except MusterError as error:
        from torchmuster.core.model.text import report_of_error

        if not os.path.exists(run_dir.result):
            failed = failed_before_start(run_dir, error.exit_code, report_of_error(error))
            atomic.write_json(run_dir.result, codec.to_plain(failed))
        raise


def new_run_id(target: str, name: str | None = None) -> str:
    """Return an id that sorts by time and has the script's or given name.

    For example `20261121-041805-train-3f2a`.
    """
    now = datetime.now().astimezone()
    stem = os.path.splitext(os.path.basename(target))[0]
    word = name or re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:24] or "run"
    return f"{now:%Y%m%d-%H%M%S}-{word}-{secrets.token_hex(2)}"


def name_of(run_id: str) -> str:
    """Return the name in an id of `new_run_id` or `--run-id`, for the run that continues it."""
    made = re.fullmatch(r"\d{8}-\d{6}-(.+)-[0-9a-f]{4}", run_id)
    return made[1] if made is not None else run_id[:_MOST_OF_NAME]


def check_run_id(run_id: str) -> None:
    """Refuse a run id that can't be a folder's name.

    Raises:
        UsageError: It has characters other than letters, digits, `.`, `_` and `-`, or is reserved.
    """
    if run_id == "last":
        raise UsageError(
            "`last` can't be the name of a run",
            where="--run-id",
            why="every command takes `last` for the run that was submitted last",
        )
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"`{run_id}` can't be the name of a run",
            where="--run-id",
            why="it becomes the name of a folder: letters, digits, `.`, `_` and `-`",
        )


def choose_run_id(target: str, run_id: str | None, name: str | None) -> str:
    """Return the id of a run: `--run-id`, or a new one that begins with `--name` or the script.

    Raises:
        UsageError: One of them can't be part of a folder's and the scheduler job's name, or both
            are given.
    """
    if name is not None and run_id is not None:
        what = "`--run-id` is the whole name already"
        raise UsageError(what, where=f"--name {name}", fix="leave one of them out")
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(
            f"`{name}` is not a valid name for a run",
            where="--name",
            why="it is part of a folder's name and begins that of the scheduler's job",
            fix="a letter or digit, then up to 39 letters, digits, `.`, `_` and `-`",
        )
    if run_id is not None:
        check_run_id(run_id)
    return run_id or new_run_id(target, name)


def create_run_dir(plan: RunPlan, folder: str | None = None) -> RunDir:
    """Create the run directory with plan and secret, in `folder` or where all runs are.

    Raises:
        UsageError: It exists already.
        RunDirectoryError: It can't be created or written.
    """

    def fill(run_dir: RunDir) -> None:
        atomic.write_json(run_dir.plan, codec.to_plain(with_call(plan, run_dir)))
        os.makedirs(run_dir.logs, exist_ok=True)

    run_dir = make_dir(os.path.join(folder or runs_dir(), plan.run_id), fill)
    for notes in plugs.every("run_notes"):
        notes.note_origin(run_dir, plan.program)
    return run_dir


def create_member_dir(plan: RunPlan, sweep: RunDir) -> RunDir:
    """Create the run directory of a sweep's member; its origin is that of the sweep.

    Raises:
        UsageError: It exists already.
        RunDirectoryError: It can't be created or written.
    """

    def fill(run_dir: RunDir) -> None:
        atomic.write_json(run_dir.plan, codec.to_plain(plan))
        os.makedirs(run_dir.logs, exist_ok=True)
        if plan.program.call is not None:
            _share_call(sweep.call, run_dir.call)
        os.symlink(os.path.join("..", "..", os.path.basename(sweep.origin)), run_dir.origin)

    return make_dir(os.path.join(sweep.members, plan.run_id), fill)


def with_call(plan: RunPlan, run_dir: RunDir) -> RunPlan:
    """Copy the call file of a function into the run directory; return the plan with its new path.

    Raises:
        UsageError: Its hash differs from the plan's.
    """
    call = plan.program.call
    if call is None:
        return plan
    with open_own(call.source) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != call.sha256:
        raise UsageError("the call file has been changed", where=call.source)
    atomic.replace_file(run_dir.call, data, mode=0o600)
    here = replace(call, source=run_dir.call)
    return replace(plan, program=replace(plan.program, call=here))


def _share_call(source: str, path: str) -> None:
    """Link the sweep's call file for a member: it may have 64 MiB, so all members share it."""
    try:
        os.link(source, path)
    except OSError:  # a file system without hard links
        with open_own(source) as file:
            atomic.replace_file(path, file.read(), mode=0o600)


def make_dir(path: str, fill: Callable[[RunDir], None]) -> RunDir:
    """Create a private record directory, and let `fill` write its first content.

    Raises:
        UsageError: It exists already.
        RunDirectoryError: It can't be created or written.
    """
    run_dir = RunDir(path)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    except OSError as error:
        raise unusable(os.path.dirname(path), error.strerror or str(error)) from error
    try:
        os.mkdir(run_dir.path, 0o700)
    except FileExistsError as error:
        raise UsageError(
            f"the run directory of `{os.path.basename(path)}` exists already",
            where=run_dir.path,
            fix="choose another --run-id, or leave it out",
        ) from error
    except OSError as error:
        raise unusable(run_dir.path, error.strerror or str(error)) from error
    _made.append(run_dir)
    try:
        check_room(run_dir.path)
        fill(run_dir)
        write_secret(run_dir.secret, new_secret())
        write_owner(run_dir)
        os.makedirs(os.path.dirname(run_dir.agent_log("n1")), exist_ok=True)
    except OSError as error:
        _remove(run_dir.path)
        raise unusable(run_dir.path, error.strerror or str(error)) from error
    return run_dir


def remove_unbegun() -> None:
    """Remove directories created by this interrupted process in which nothing has begun."""
    for notes in plugs.every("run_notes"):
        notes.block_notes()
    for run_dir in _made:
        names = (run_dir.result, run_dir.events, run_dir.job, run_dir.jobs, run_dir.arrays)
        begun = [*names, os.path.join(run_dir.path, "groups")]
        owner = atomic.read_json(run_dir.owner)
        is_ours = owner is None or (isinstance(owner, dict) and owner.get("pid") == os.getpid())
        if is_ours and not any(map(os.path.exists, begun)):
            _remove(run_dir.path)


def link_snapshots(run_dir: RunDir, snapshots: str) -> None:
    """Give a run the snapshots of an earlier one: its snapshot folder becomes a link.

    Raises:
        RunDirectoryError: The link can't be created.
    """
    try:
        os.makedirs(snapshots, exist_ok=True)
        check_room(snapshots)
        os.symlink(os.path.realpath(snapshots), run_dir.snapshots)
    except OSError as error:
        raise unusable(run_dir.path, error.strerror or str(error)) from error


def holds_snapshots(folder: str) -> bool:
    """Say whether the folder has snapshots, good or set aside: the library reports the latter."""
    try:
        return any(name.startswith(("step-", "bad-")) for name in os.listdir(folder))
    except OSError:
        return False


def write_owner(run_dir: RunDir, pid: int | None = None) -> None:
    """Record the owner of the run (default: this process), so that others can check its life."""
    pid = os.getpid() if pid is None else pid
    facts = proc.read_process(pid)
    owner = {
        "pid": pid,
        "start_ticks": facts.start_ticks if facts else 0,
        "boot_id": proc.boot_id(),
        "host": socket.gethostname(),
    }
    atomic.write_json(run_dir.owner, owner)


def _remove(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def unusable(path: str, why: str) -> RunDirectoryError:
    """Return the error that says that a run directory can't be used."""
    return RunDirectoryError(
        "the run directory can't be written",
        where=path,
        why=why,
        fix="set MUSTER_HOME to a folder with space that you can write to",
    )


def failed_before_start(run_dir: RunDir, exit_code: int, report: Report) -> Result:
    """Return the result of a run that failed before its first attempt."""
    return Result(
        run_id=os.path.basename(run_dir.path),
        state=RunState.FAILED,
        exit_code=exit_code,
        attempts=0,
        restarts_spent=0,
        elapsed_s=0.0,
        report=report,
    )
