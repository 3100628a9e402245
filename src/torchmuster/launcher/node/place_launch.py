"""Build a task's view of the machine's files, then become the task's command.

    view SPEC.json -- COMMAND ARGUMENTS...
    view --probe                            exit 0 when views can be made

`place.write_view` writes SPEC.json (0600). The process keeps its pid, uid, gid, session,
standard streams and environment: it only enters its own namespaces, mounts and calls `exec`. On
failure it exits with 125, or with 126 or 127 as a shell does when the command is at fault. It
prints one sentence to standard error and writes the same as a line of JSON to the spec's
`report_fd`.
"""

import errno
import json
import os
import signal
import sys
from typing import Any, NoReturn

from torchmuster.launcher.node import namespaces

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
        _check_usage(arguments)
        spec = _read_spec(arguments[0])
        _enter(spec)
        environment = own_environment() | spec.get("environment", {})
        become(arguments[2:], environment)
    except LaunchError as error:
        _report(error, spec.get("report_fd"))
        sys.exit(error.code)


def _check_usage(arguments: list[str]) -> None:
    if len(arguments) < 3 or arguments[1] != "--":
        raise LaunchError(VIEW_FAILED, "use: view SPEC.json -- COMMAND ARGUMENTS...")


def own_environment() -> dict[str, str]:
    """Return our initial environment: in some locales Python adds LC_CTYPE to `os.environ`."""
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    except OSError:
        return dict(os.environ)
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
        try:
            known.update(os.listdir(folder))
        except OSError:
            continue
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    return f"; did you mean `{found[0]}`?" if found else ""


def _read_spec(path: str) -> dict[str, Any]:
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
        for kind, flag in (("user", namespaces.NEW_USER), ("net", namespaces.NEW_NETWORK)):
            if spec.get("join", {}).get(kind):
                namespaces.join(spec["join"][kind], flag)
        if spec.get("view"):
            step = "making a mount namespace"
            namespaces.enter_user_namespace(namespaces.NEW_MOUNTS)
            namespaces.stop_propagation()
            step = "building the task's view of the files"
            for mirror in spec["mirrors"]:
                show_mirror(mirror)
            for cover in spec["covers"]:
                namespaces.bind(cover["from"], cover["at"], recursive=False)
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
        namespaces.bind(folder, folder, recursive=False)
        _fill(folder, "/", mirror)
        namespaces.pivot_root(folder)
        return
    # The descriptor still refers to the machine's own directory once the folder is mounted over it.
    fd = os.open(at, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        namespaces.bind(folder, at, recursive=False)
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
            if not _quietly(namespaces.bind, os.path.join(source, name), place):
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
        namespaces.enter_user_namespace(namespaces.NEW_MOUNTS)
        step = "mount"
        namespaces.stop_propagation()
        namespaces.bind("/proc/self", "/proc/self", recursive=False)
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
