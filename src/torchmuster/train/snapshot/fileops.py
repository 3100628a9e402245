"""Every file operation of a save, by name, so that tests can kill a process at each of them.

`before` is called with the operation's name and the path before each operation; it does nothing unless a
test replaces it.
"""

import os
import shutil
from collections.abc import Callable
from typing import Any

from torchmuster.model import contract
from torchmuster.plainfile import write_all


def _nothing(_operation: str, _path: str) -> None:
    pass


before: Callable[[str, str], None] = _nothing


def make_dir(path: str) -> None:
    """Make a directory with its missing parents."""
    before("mkdir", path)
    run_dir = os.environ.get(contract.RUN_DIR_VARIABLE)
    if run_dir is not None and path.startswith(run_dir):
        os.makedirs(
            run_dir, mode=0o700, exist_ok=True
        )  # somebody has removed it: it was its user's alone
    os.makedirs(path, exist_ok=True)


def make_one_dir(path: str) -> None:
    """Make a directory; missing parents have vanished and are not created again, with other permissions."""
    before("mkdir", path)
    os.mkdir(path)


def create(path: str) -> int:
    """Open a new file for writing."""
    before("create", path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def claim(path: str) -> bool:
    """Create an empty file; return False if it exists already."""
    before("claim", path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    return True


def write(fd: int, data: Any, path: str) -> None:
    """Write all of `data`."""
    before("write", path)
    write_all(fd, data)


def sync(fd: int, path: str) -> None:
    """Flush a file to the disk."""
    before("fsync", path)
    os.fsync(fd)


def sync_dir(path: str) -> None:
    """Flush a directory to the disk."""
    before("fsync directory", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(old: str, new: str) -> None:
    """Rename, atomically within one file system."""
    before("rename", new)
    os.rename(old, new)


def remove_tree(path: str) -> None:
    """Remove a directory and its contents."""
    before("remove", path)
    shutil.rmtree(path, ignore_errors=True)
