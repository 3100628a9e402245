"""Plain files: opened by a path that others gave, without a wait for somebody at its other end; written whole.

A named pipe in place of a manifest or a muster.toml would hold its reader for ever, and a device may do anything.
"""

import errno
import os
import stat
from io import BufferedReader

_DESCRIPTORS = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")


def open_plain(path: str, *, or_descriptor: bool = False) -> BufferedReader:
    """Open a plain file for reading; a link to one will do.

    Args:
        path: Of the file.
        or_descriptor: A path on a command line may also be a descriptor that the shell has opened: `<(...)`.

    Raises:
        OSError: It can't be opened, or is no plain file.
    """
    if or_descriptor and os.fspath(path).startswith(_DESCRIPTORS):
        return open(path, "rb")
    _check(os.stat(path), path)
    # Without O_NONBLOCK, a pipe that takes its place now would let us wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(fd), path)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def open_own(path: str) -> BufferedReader:
    """Open a plain file of this user for reading; the last part of its path is no link.

    Raises:
        OSError: It can't be opened, is a link, is no plain file, or another user's.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        _check(status, path)
        _check_owner(status, path)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _check_owner(status: os.stat_result, path: str) -> None:
    if status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it is another user's", path)


def _check(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a file", path)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data` to a descriptor, which may take it in parts."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
