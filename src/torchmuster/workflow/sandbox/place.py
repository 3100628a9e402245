"""A task's private view of this machine's files: write it to disk, and start commands in it.

`plan_view` (in `place_plan`) decides what to mount, `write_view` writes the folder, and the
program `view` mounts it in the task's own process. Where the kernel gives no namespaces
(`namespaces_available`), `place_real` puts the files at their real paths.
"""

import contextlib
import functools
import glob
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files.atomic import read_json, write_json
from torchmuster.errors import MusterError
from torchmuster.workflow.sandbox.place_plan import Mirror, PlacedFile, ViewPlan, plan_view

__all__ = [
    "Mirror",
    "PlacedFile",
    "ViewPlan",
    "clear_view",
    "clear_views",
    "namespaces_available",
    "plan_view",
    "view_argv",
    "write_new",
    "write_view",
]

_PROBE_TIMEOUT_S = 10.0
_KERNEL_SWITCHES = (
    ("/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces is 0"),
    ("/proc/sys/user/max_mnt_namespaces", "0", "user.max_mnt_namespaces is 0"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone is 0"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor restricts them (kernel.apparmor_restrict_unprivileged_userns is 1)",
    ),
)


def write_view(
    plan: ViewPlan,
    *,
    join: Mapping[str, str | None] | None = None,
    environment: Mapping[str, str] | None = None,
    report_fd: int | None = None,
) -> str:
    """Write the folder of a view; return the path of its spec, for `view_argv`.

    Args:
        plan: The result of `plan_view`.
        join: Namespaces to enter first, `user` and `net` (`NetworkNamespace.join`).
        environment: Variables to add to those that the process is started with.
        report_fd: A pipe of the started process (`pass_fds`). If it closes without a message, the
            task runs; otherwise it brings a line of JSON that says why not.

    Raises:
        MusterError: The folder was used before, or can't be written.
    """
    try:
        os.mkdir(plan.folder, 0o700)
        os.mkdir(os.path.join(plan.folder, "files"), 0o700)
        for mirror in plan.mirrors:
            _make_folder(mirror.folder, mirror.mode)
            for relative in mirror.made:
                _make_folder(os.path.join(mirror.folder, relative), 0o755)
        for path, file in plan.files.items():
            write_new(path, file.content, file.mode)
        return _write_spec(plan, join or {}, environment or {}, report_fd)
    except OSError as error:
        raise MusterError(
            "the task's view of the files can't be written", where=plan.folder, why=str(error)
        ) from error


def view_argv(spec_path: str, command: Sequence[str], *, python: str = sys.executable) -> list[str]:
    """Return the command line that starts `command` in the view that a spec describes."""
    return proc.node_program("view", spec_path, "--", *command, python=python)


def clear_view(folder: str) -> None:
    """Remove an ended task's mount points and empty folders; what the task wrote stays."""
    spec_path = os.path.join(folder, "spec.json")
    spec = read_json(spec_path)
    if spec is None:
        return
    for mirror in spec["mirrors"]:
        _clear_mirror(mirror)
    with contextlib.suppress(OSError):
        os.unlink(spec_path)
    mirrors = [mirror["folder"] for mirror in spec["mirrors"]]
    for path in (*mirrors, os.path.join(folder, "files"), folder, os.path.dirname(folder)):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def clear_views(task_folder: str) -> None:
    """Clear, as `clear_view` does, the views that killed agents of a task have left."""
    for folder in glob.glob(os.path.join(glob.escape(task_folder), "place-*", "view-*", "view")):
        clear_view(folder)


def _clear_mirror(mirror: Mapping[str, Any]) -> None:
    """Remove the entries that are still as the launcher made them, seen from outside its mounts."""
    for name in mirror["dirs"]:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(mirror["folder"], name))
    for name, target in mirror["links"].items():
        with contextlib.suppress(OSError):
            if os.readlink(os.path.join(mirror["folder"], name)) == target:
                os.unlink(os.path.join(mirror["folder"], name))
    empties = [os.path.join(mirror["folder"], name) for name in mirror["files"]]
    for path in (*empties, mirror["folder"] + ".empty"):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_size == 0:
                os.unlink(path)


@functools.cache
def namespaces_available() -> str | None:
    """Return None if a task can have its own view here, else the reason as a sentence.

    Tries it once, in a separate process: some kernels grant the namespace but refuse the mounts.
    """
    with tempfile.TemporaryFile() as out:
        child = proc.start(proc.node_program("view", "--probe"), stdout=out.fileno())
        code = child.wait(_PROBE_TIMEOUT_S)
        if code == 0:
            return None
        if code is None:
            proc.kill_quietly(child.pid)
            child.wait(_PROBE_TIMEOUT_S)
            return f"the kernel did not answer within {_PROBE_TIMEOUT_S:.0f} s"
        out.seek(0)
        return _reason(out.read())


def write_new(path: str, content: bytes, mode: int) -> os.stat_result:
    """Create a file that must not exist yet; return its stat result."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), mode)
        return os.fstat(file.fileno())


def _make_folder(path: str, mode: int) -> None:
    os.mkdir(path, 0o700)
    os.chmod(path, mode)  # regardless of the umask


def _write_spec(
    plan: ViewPlan,
    join: Mapping[str, str | None],
    environment: Mapping[str, str],
    report_fd: int | None,
) -> str:
    path = os.path.join(plan.folder, "spec.json")
    mirrors = [
        {
            "at": mirror.at,
            "folder": mirror.folder,
            "dirs": list(mirror.dirs),
            "files": list(mirror.files),
            "links": dict(mirror.links),
        }
        for mirror in plan.mirrors
    ]
    spec = {
        "view": True,
        "join": dict(join),
        "environment": dict(environment),
        "report_fd": report_fd,
        "working_dir": plan.working_dir,
        "mirrors": mirrors,
        "covers": [{"at": at, "from": disk} for at, disk in plan.covers.items()],
    }
    write_json(path, spec, mode=0o600)
    return path


def _reason(answer: bytes) -> str:
    for path, value, sentence in _KERNEL_SWITCHES:
        try:
            with open(path) as switch:
                if switch.read().strip() == value and not (value == "1" and os.geteuid() == 0):
                    return f"this kernel gives users no namespaces: {sentence}"
        except OSError:
            continue
    try:
        said = json.loads(answer)
        return f"`{said['step']}` is refused here: {said['why']}{_seccomp()}"
    except (ValueError, KeyError, TypeError):
        return "the process that tried it ended without a message"


def _seccomp() -> str:
    try:
        with open("/proc/self/status") as status:
            filtered = "Seccomp:\t2" in status.read()
    except OSError:
        return ""
    return " (a seccomp filter is active, as in most containers)" if filtered else ""
