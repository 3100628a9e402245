"""System calls for namespaces and mounts, by ctypes: Python 3.11 has none of them.

Only fresh processes with a single thread use them (`view`, `exec`, `network_hold`). Nothing here
touches the machine's own mounts: each caller leaves them with `unshare` before it mounts anything.

The program `view` builds a task's view of the machine's files, then becomes the task's command.

    view SPEC.json -- COMMAND ARGUMENTS...
    view --probe                            exit 0 when views can be made

`place.write_view` writes SPEC.json (0600). The process keeps its pid, uid, gid, session,
standard streams and environment: it only enters its own namespaces, mounts and calls `exec`. On
failure it exits with 125, or with 126 or 127 as a shell does when the command is at fault. It
prints one sentence to standard error and writes the same as a line of JSON to the spec's
`report_fd`.
"""

import contextlib
import ctypes
import errno
import json
import os
import signal
import sys
from typing import Any, NoReturn

NEW_MOUNTS = 0x00020000
NEW_USER = 0x10000000
NEW_NETWORK = 0x40000000

BIND = 4096
RECURSIVE = 16384
SLAVE = 1 << 19

_DETACH = 2
# pivot_root(2) has no function in libc; its number depends on the machine.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move this process into new namespaces of the kinds in `flags`.

    Raises:
        OSError: The kernel refused.
    """
    _check(_libc.unshare(flags), "unshare")


def join(path: str, kind: int) -> None:
    """Enter the namespace at `path` (`/proc/PID/ns/net`), which must be of `kind`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        join_fd(fd, kind)
    finally:
        os.close(fd)


def join_fd(fd: int, kind: int) -> None:
    """Enter the namespace of an open descriptor, which must be of `kind`."""
    _check(_libc.setns(fd, kind), "setns")


def enter_user_namespace(flags: int) -> bool:
    """Enter new namespaces of the kinds in `flags`; add a user namespace only if required.

    User and group stay the same: each is mapped to itself. Return whether there is a new user
    namespace.

    Raises:
        OSError: The kernel refuses with and without a user namespace.
    """
    try:
        unshare(flags)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
    else:
        return False
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEW_USER | flags)
    # Without root a group may be mapped only by a process that has given up setgroups.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def bind(source: str, target: str, *, recursive: bool = True) -> None:
    """Bind-mount `source` at `target`; with the mounts below it when `recursive`."""
    _mount(source, target, BIND | (RECURSIVE if recursive else 0))


def stop_propagation() -> None:
    """Keep our mounts out of the machine's; its later mounts (automount) still reach us."""
    _mount("none", "/", SLAVE | RECURSIVE)


def pivot_root(new_root: str) -> None:
    """Make the mount point `new_root` the root of this process and detach the old one."""
    machine = os.uname().machine
    if machine not in _PIVOT_ROOT:
        raise OSError(errno.ENOSYS, f"pivot_root is not known on {machine}")
    os.chdir(new_root)
    # At the same path the old root is stacked on the new one; the detach below removes it.
    _check(_libc.syscall(_PIVOT_ROOT[machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")


def _mount(source: str, target: str, flags: int) -> None:
    code = _libc.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None)
    _check(code, f"mount on {target}")


def _check(code: int, what: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# The program `view`.


VIEW_FAILED, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127


class LaunchError(Exception):
    """The task can't be started; `code` is the exit code, 125 if the view is at fault."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code
        self.what = what


def main(arguments: list[str]) -> NoReturn:
    """Build the view and become the command, or exit; never return."""
    if arguments == ["--probe"]:
        _probe()
    spec: dict[str, Any] = {}
    try:
        spec = _read_spec(arguments)
        _enter(spec)
        environment = own_environment() | spec.get("environment", {})
        become(arguments[2:], environment)
    except LaunchError as error:
        _report(error, spec.get("report_fd"))
        sys.exit(error.code)


def own_environment() -> dict[str, str]:
    """Return our initial environment: in some locales Python adds LC_CTYPE to `os.environ`."""
    try:
        return read_environment("self")
    except OSError:
        return dict(os.environ)


def read_environment(pid: int | str) -> dict[str, str]:
    """Return the environment that a process was started with.

    Raises:
        OSError: The process has ended, or may not be read.
    """
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def become(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by `command`, looked up on the environment's PATH.

    Raises:
        LaunchError: There is no such command, or it can't be executed.
    """
    path = find_command(command[0], environment.get("PATH", os.defpath))
    # Python ignores these two signals; a program expects the kernel's defaults.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execve(path, command, environment)
    except OSError as error:
        if error.errno == errno.ENOEXEC:
            raise LaunchError(
                NOT_EXECUTABLE, f"{path} is neither a program nor a script that begins with #!"
            ) from error
        if error.errno == errno.ENOENT:
            raise LaunchError(
                NOT_FOUND, f"the interpreter in the first line of {path} does not exist"
            ) from error
        raise LaunchError(
            NOT_EXECUTABLE, f"{path} can't be executed: {os.strerror(error.errno or 0)}"
        ) from error


def find_command(name: str, search: str) -> str:
    """Return the path of the command `name`.

    Raises:
        LaunchError: 127 when it was not found, 126 when it is not executable.
    """
    folders = [""] if "/" in name else [folder or "." for folder in search.split(":")]
    blocked = None
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isdir(path) or not os.path.exists(path):
            blocked = blocked or (path if os.path.isdir(path) and "/" in name else None)
        elif os.access(path, os.X_OK):
            return path
        else:
            blocked = path
    if blocked is not None:
        fix = "a directory" if os.path.isdir(blocked) else f"not executable (chmod +x {blocked})"
        raise LaunchError(NOT_EXECUTABLE, f"{blocked} is {fix}")
    raise LaunchError(NOT_FOUND, f"the command `{name}` was not found{_near(name, folders)}")


def _near(name: str, folders: list[str]) -> str:
    import difflib

    if folders == [""]:
        folders, name = [os.path.dirname(name) or "/"], os.path.basename(name)
    known: set[str] = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            known.update(os.listdir(folder))
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    return f"; did you mean `{found[0]}`?" if found else ""


def _read_spec(arguments: list[str]) -> dict[str, Any]:
    if len(arguments) < 3 or arguments[1] != "--":
        raise LaunchError(VIEW_FAILED, "use: view SPEC.json -- COMMAND ARGUMENTS...")
    path = arguments[0]
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if os.fstat(fd).st_uid != os.geteuid():
                raise LaunchError(VIEW_FAILED, f"{path} belongs to another user")
            spec = json.load(file)
    except (OSError, ValueError) as error:
        raise LaunchError(VIEW_FAILED, f"{path} can't be read: {error}") from error
    if not isinstance(spec, dict):
        raise LaunchError(VIEW_FAILED, f"{path} holds no object")
    if spec.get("report_fd") is not None:
        os.set_inheritable(spec["report_fd"], False)  # its end of file means: the task runs
    return spec


def _enter(spec: dict[str, Any]) -> None:
    step = "joining the task's network"
    try:
        for kind, flag in (("user", NEW_USER), ("net", NEW_NETWORK)):
            if spec.get("join", {}).get(kind):
                join(spec["join"][kind], flag)
        if spec.get("view"):
            step = "making a mount namespace"
            enter_user_namespace(NEW_MOUNTS)
            stop_propagation()
            step = "building the task's view of the files"
            for mirror in spec["mirrors"]:
                show_mirror(mirror)
            for cover in spec["covers"]:
                bind(cover["from"], cover["at"], recursive=False)
        step = "entering the working directory"
        os.chdir(spec["working_dir"])
    except OSError as error:
        named = f" ({error.filename})" if error.filename else ""
        raise LaunchError(VIEW_FAILED, f"{step} failed: {error.strerror}{named}") from error


def show_mirror(mirror: dict[str, Any]) -> None:
    """Mount the folder of a mirror over its directory, with the directory's entries in it."""
    at, folder = mirror["at"], mirror["folder"]
    _make_mount_points(mirror)
    if at == "/":
        bind(folder, folder, recursive=False)
        _fill(folder, "/", mirror)
        pivot_root(folder)
        return
    # The descriptor still refers to the machine's own directory once the folder is mounted over it.
    fd = os.open(at, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        bind(folder, at, recursive=False)
        _fill(at, f"/proc/self/fd/{fd}", mirror)
    finally:
        os.close(fd)


def _make_mount_points(mirror: dict[str, Any]) -> None:
    folder = mirror["folder"]
    for name, link in mirror["links"].items():
        _quietly(os.symlink, link, os.path.join(folder, name))
    for name in mirror["dirs"]:
        _quietly(os.mkdir, os.path.join(folder, name), 0o755)
    # Link one empty file under all names: an inode for each costs 120 us on ext4, the mount 7 us.
    empty = folder + ".empty"
    _quietly(os.mknod, empty, 0o644)
    for name in mirror["files"]:
        place = os.path.join(folder, name)
        if not _quietly(os.link, empty, place):
            _quietly(os.mknod, place, 0o644)  # too many links, or a file system without them


def _fill(target: str, source: str, mirror: dict[str, Any]) -> None:
    # Leave out an entry that is gone by now or can't be bound: it was not a file of the task.
    for names, remove in ((mirror["dirs"], os.rmdir), (mirror["files"], os.unlink)):
        for name in names:
            place = os.path.join(target, name)
            if not _quietly(bind, os.path.join(source, name), place):
                _quietly(remove, place)


def _quietly(action: Any, *arguments: Any) -> bool:
    try:
        action(*arguments)
    except OSError:
        return False
    return True


def _probe() -> NoReturn:
    step = "unshare"
    try:
        enter_user_namespace(NEW_MOUNTS)
        step = "mount"
        stop_propagation()
        bind("/proc/self", "/proc/self", recursive=False)
    except OSError as error:
        print(json.dumps({"step": step, "why": error.strerror}))
        sys.exit(1)
    sys.exit(0)


def _report(error: LaunchError, fd: int | None) -> None:
    print(f"muster: {error.what}", file=sys.stderr, flush=True)
    if fd is not None:
        _quietly(
            os.write, fd, json.dumps({"code": error.code, "what": error.what}).encode() + b"\n"
        )
