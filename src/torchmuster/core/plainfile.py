"""Open plain files at untrusted paths without blocking on a pipe, and write files completely.

A named pipe in place of a manifest or a muster.toml would block its reader for ever, and a device
may do anything.
"""

import errno
import os
import stat
from io import BufferedReader

_DESCRIPTORS = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")


def open_plain(path: str, *, or_descriptor: bool = False) -> BufferedReader:
    """Open a plain file for reading; symbolic links are followed.

    Args:
        path: Path of the file.
        or_descriptor: Also accept a descriptor that the shell has opened, `<(...)`.

    Raises:
        OSError: It can't be opened, or is not a plain file.
    """
    if or_descriptor and os.fspath(path).startswith(_DESCRIPTORS):
        return open(path, "rb")
    _check(os.stat(path), path)
    # Without O_NONBLOCK, opening a pipe that has just replaced the file would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(fd), path)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def open_own(path: str) -> BufferedReader:
    """Open a plain file of this user for reading; the last component must not be a link.

    Raises:
        OSError: It can't be opened, is a link, is not a plain file, or belongs to another user.
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
    """Write all of `data` to a descriptor, repeating partial writes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
