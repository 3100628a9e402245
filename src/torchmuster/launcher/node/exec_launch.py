"""Enter the view of a running process of a task, then become a command in it.

The process is either the task's command, a child of our parent, or a worker whose variables are our
own environment. We take over its namespaces (user, mount, network), root, working directory and
environment. Without a command we become its shell: bash, or else sh. Exit codes: 125 when the view
can't be entered, 126 and 127 as in a shell.
"""

import fcntl
import os
import sys
import termios
from dataclasses import dataclass
from typing import NoReturn

from torchmuster.core import proc
from torchmuster.core.model.codec import from_arguments
from torchmuster.launcher.node import namespaces
from torchmuster.launcher.node.namespaces import (
    VIEW_FAILED,
    LaunchError,
    become,
    find_command,
    read_environment,
)

_KINDS = (
    ("user", namespaces.NEW_USER),  # first: it gives the right to enter the others
    ("mnt", namespaces.NEW_MOUNTS),
    ("net", namespaces.NEW_NETWORK),
)
_SHELLS = ("bash", "sh")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOrder:
    """The arguments of the program `exec`.

    Attributes:
        worker_ticks: The worker's start time in clock ticks since boot; None for a task's command.
    """

    pid: int
    worker_ticks: int | None = None
    tty: bool = False
    term: str = ""
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecSurroundings:
    """What we take over from a process, opened while we still see its /proc.

    Attributes:
        spaces: (descriptor, kind) of the namespaces that differ from ours, in the order of
            entering.
        root: Descriptor of its root; None when it is the same as ours.
        folder: Descriptor of its working directory.
    """

    spaces: tuple[tuple[int, int], ...]
    root: int | None
    folder: int
    environment: dict[str, str]


def main(arguments: list[str]) -> NoReturn:
    """Enter the view and become the command, or exit; never return."""
    order = from_arguments(EntryOrder, arguments)
    try:
        surroundings = open_surroundings(order.pid, order.worker_ticks)
        if order.tty:
            _take_terminal()
        enter(surroundings)
        environment = dict(surroundings.environment)
        if order.tty and order.term:
            environment["TERM"] = order.term
        command = list(order.command) or [find_shell(environment.get("PATH", os.defpath))]
        become(command, environment)
    except LaunchError as error:
        print(f"muster: {error.what}", file=sys.stderr, flush=True)
        sys.exit(error.code)


def open_surroundings(pid: int, worker_ticks: int | None = None) -> ExecSurroundings:
    """Open the surroundings of a sibling process or, with `worker_ticks`, of that worker.

    Raises:
        LaunchError: The process has ended, can't be read, or is another one.
    """
    try:
        spaces = tuple((fd, kind) for name, kind in _KINDS if (fd := _space(pid, name)) is not None)
        changes_files = any(kind == namespaces.NEW_MOUNTS for _, kind in spaces)
        root_fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
        root: int | None = root_fd
        if not changes_files and os.path.samestat(os.fstat(root_fd), os.stat("/")):
            os.close(root_fd)
            root = None
        surroundings = ExecSurroundings(
            spaces=spaces,
            root=root,
            folder=os.open(f"/proc/{pid}/cwd", os.O_PATH | os.O_CLOEXEC),
            environment=read_environment(pid) if worker_ticks is None else dict(os.environ),
        )
        facts = proc.read_process(pid)
    except OSError as error:
        raise LaunchError(VIEW_FAILED, f"the task's process can't be seen: {error}") from error
    # Check this last: another process that has got the number meanwhile is not our sibling.
    is_it = facts is not None and facts.parent_pid == os.getppid()
    if worker_ticks is not None:
        is_it = facts is not None and facts.start_ticks == worker_ticks
    if not is_it:
        raise LaunchError(VIEW_FAILED, "the task's process has ended")
    return surroundings


def _space(pid: int, name: str) -> int | None:
    """Open a namespace of the process; return None when it is our own."""
    fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    if os.path.samestat(os.fstat(fd), os.stat(f"/proc/self/ns/{name}")):
        os.close(fd)
        return None
    return fd


def _take_terminal() -> None:
    """Make the terminal on standard input the controlling terminal of our session."""
    try:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    except OSError as error:
        raise LaunchError(VIEW_FAILED, f"there is no terminal: {error.strerror}") from error


def enter(surroundings: ExecSurroundings) -> None:
    """Enter the namespaces, the root and the working directory.

    Raises:
        LaunchError: The kernel refused.
    """
    step = "entering the task's namespaces"
    try:
        for fd, kind in surroundings.spaces:
            namespaces.join_fd(fd, kind)
        step = "entering the task's root"
        if surroundings.root is not None:
            os.fchdir(surroundings.root)
            os.chroot(".")
        step = "entering the task's working directory"
        os.fchdir(surroundings.folder)
    except OSError as error:
        raise LaunchError(VIEW_FAILED, f"{step} failed: {error.strerror}") from error


def find_shell(search: str) -> str:
    """Return the path of bash, or else of sh.

    Raises:
        LaunchError: Neither was found.
    """
    for name in _SHELLS:
        try:
            return find_command(name, search)
        except LaunchError as error:
            last = error
    raise LaunchError(last.code, f"the task has no shell ({' or '.join(_SHELLS)}): name a command")
