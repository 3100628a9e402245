"""Copy a tree of files on this machine: only regular files and folders, nothing from outside the tree."""

import os
import re
import shutil

from torchmuster.errors import MusterError


def copy_tree(source: str, target: str, regex: str | None = None) -> int:
    """Copy what `regex` matches (at the start of the path below `source`); return how many files.

    A symbolic link is followed when it stays inside `source`.

    Raises:
        MusterError: A link leaves the tree, or a file can't be read or written.
    """
    root = os.path.realpath(source)
    wanted = re.compile(regex) if regex else None
    num_files = 0
    try:
        os.makedirs(target, exist_ok=True)
        for folder, folders, names in os.walk(root, onerror=_raise):
            inside = os.path.relpath(folder, root)
            for name in sorted(folders):
                _check_link(os.path.join(folder, name), root)
                if wanted is None:
                    os.makedirs(os.path.normpath(os.path.join(target, inside, name)), exist_ok=True)
            for name in names:
                relative = os.path.normpath(os.path.join(inside, name))
                if wanted is not None and not wanted.match(relative):
                    continue
                _copy_file(os.path.join(folder, name), os.path.join(target, relative), root)
                num_files += 1
    except OSError as error:
        where = str(error.filename or source)
        raise MusterError("a file can't be copied", where=where, why=error.strerror) from error
    return num_files


def _raise(error: OSError) -> None:
    raise error


def _copy_file(path: str, target: str, root: str) -> None:
    _check_link(path, root)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isfile(path):  # not a socket, a pipe or a device
        shutil.copyfile(path, target)
        shutil.copymode(path, target)


def _check_link(path: str, root: str) -> None:
    real = os.path.realpath(path)
    if os.path.islink(path) and os.path.commonpath([real, root]) != root:
        raise MusterError(
            "a symbolic link leads out of the folder",
            where=path,
            why=f"it points to {real}",
            fix="put the file itself there",
        )
