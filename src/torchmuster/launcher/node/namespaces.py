"""System calls for namespaces and mounts, by ctypes: Python 3.11 has none of them.

Only fresh processes with a single thread use them (`place_launch`, `network_hold`). Nothing here
touches the machine's own mounts: each caller leaves them with `unshare` before it mounts anything.
"""

import ctypes
import errno
import os

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
